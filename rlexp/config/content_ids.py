"""What stands in a file, or in a model's folder, as a short text: files are identified by it, so they may move."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from rlexp.base.file_hashes import contents

SAMPLE, SAMPLES = 4096, 256  # a file of weights is read at so many places, so many bytes at each
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")  # of which transformers loads the first kind that is there
OF_A_MODEL = (".json", ".safetensors", ".bin", ".gguf", ".model", ".jinja", ".txt")


def of_file(path: Path) -> str:
    return contents(path)[:16]


def of_model(path: Path) -> str:
    """Hash a model's folder: small files whole, and of weights their size and samples. A hub name stands for itself."""
    if not os.path.isdir(path):  # which also takes what can be no path
        return str(path)
    return _of_files(files_of_model(path))


def of_weights(path: Path) -> str:
    """Hash a folder's weights, which make it the same model whatever lies beside them."""
    kinds = ([each for each in sorted(path.glob(kind)) if each.is_file()] for kind in WEIGHTS)
    return _of_files(next(filter(None, kinds), []))


def _of_files(files: Iterable[Path]) -> str:
    return hashlib.sha256("".join(f"{file.name}:{sampled(file)}\n" for file in files).encode()).hexdigest()[:16]


def sampled(file: Path) -> str:
    """Hash a file's size and samples of it; a small file is hashed whole."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with file.open("rb") as handle:
        for place in range(0, size, max(SAMPLE, size // SAMPLES)):
            handle.seek(place)
            digest.update(handle.read(SAMPLE))
    return digest.hexdigest()


def files_of_model(path: Path) -> list[Path]:
    return [file for file in sorted(path.iterdir()) if file.suffix in OF_A_MODEL and file.is_file()]
