"""Log-probabilities that were computed before training: kept in a file, and laid on packs by the sequences' names.

A file holds those of a list of sequences. It begins with a line of JSON, which spaces fill up to a multiple of 64
bytes. Then come `ends` (int64), where each sequence's values end, and the values, one for each trained token.
The file's name is a hash of everything that the values depend on, except for the rounding of a layout.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base import cache
from rlexp.base.file_hashes import contents_of
from rlexp.base.files import replacing, sync
from rlexp.base.version import __version__
from rlexp.config.content_ids import files_of_model
from rlexp.config.schema import Config, LoraConfig, ModelConfig
from rlexp.config.schema.models import Precision
from rlexp.training.dealer.packing import listed
from rlexp.training.reference.base import Reference
from rlexp.training.types import Answered, Floats, Pack, Shard

FORMAT = 2  # of the files, and of the code that computes what is in them
ALIGNED = 64  # bytes
BLOCK = 1 << 24  # bytes that are read at once
NO_WEIGHTS = ("freeze", "chat_template", "fused")  # keys of a model


# ---- the key ----


def folder_of(cfg: Config) -> Path:
    """Return the folder of this machine in which the files are kept."""
    return cache_of(cfg) / "reference"


def cache_of(cfg: Config) -> Path:
    own: str | None = getattr(cfg.data, "cache", None)
    return Path(own).expanduser() if own else cache.root()


def facts_of(cfg: Config, model: ModelConfig, commit: str | None, sequences: str) -> dict[str, Any]:
    """Return all that the values depend on. `commit` is that of a hub model, `sequences` a hash of the tokens."""
    keys = {each.name: _plain(getattr(model, each.name)) for each in fields(model) if each.name not in NO_WEIGHTS}
    if "path" in keys:
        keys |= {"path": weights_of(keys["path"]), "commit": commit}
    if cfg.reference.path is None and isinstance(cfg.adapter, LoraConfig) and cfg.adapter.path is not None:
        keys["adapter"] = weights_of(cfg.adapter.path)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {
        "format": FORMAT,
        "model": keys,
        "precision": cfg.train.precision.value,
        "max_length": cfg.data.max_length,  # rotary positions may depend on it
        "versions": {"rlexp": __version__, **versions},
        "sequences": sequences,
    }


def weights_of(path: str) -> str:
    """Hash all files of a model's folder, whole: samples would miss a model of which little was trained. Its own Python
    code is among them. A hub name stands for itself."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    code = sorted(each for each in folder.glob("*.py") if each.is_file())
    return contents_of([*files_of_model(folder), *code])


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def key_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def digest_of(examples: Iterable[Answered]) -> bytes:
    """Hash the tokens of examples, with what is trained on of each answer."""
    digest = hashlib.sha256()
    for example in examples:
        for part, mask in ((example.prompt, None), *example.answers):
            digest.update(f"{len(part)} {mask is not None}\n".encode())
            digest.update(np.asarray(part, dtype=np.int32).tobytes())
            if mask is not None:
                digest.update(np.asarray(mask, dtype=np.bool_).tobytes())
    return digest.digest()


def kept_dtype(precision: Precision) -> np.dtype[Any]:
    """Return the dtype of the values: the one in which a model's log-probabilities are computed."""
    return np.dtype(np.float64 if precision is Precision.fp64 else np.float32)


# ---- a file ----


@dataclass(frozen=True)
class Values:
    """The values of a list of sequences."""

    said: Mapping[str, Any]  # the file's first line
    ends: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def of(self, place: int) -> Floats:
        start = int(self.ends[place - 1]) if place else 0
        return np.array(self.values[start : int(self.ends[place])])

    @staticmethod
    def laid_out(arrays: Sequence[Floats], dtype: np.dtype[Any]) -> Values:
        ends = np.cumsum([len(each) for each in arrays], dtype=np.int64)
        return Values({}, ends, np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))

    @staticmethod
    def mapped(path: Path) -> Values:
        """Map a whole file into memory: of its values only those are read that are asked for."""
        said, start = _first_line(path)
        dtype, count = np.dtype(said["dtype"]), said["sequences"]
        ends = _array(path, np.dtype(np.int64), start, count)
        return Values(said, ends, _array(path, dtype, start + ends.nbytes, said["values"]))


def _array(path: Path, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray:
    if not count:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(count,))


def write(path: Path, parts: Sequence[Values], dtype: np.dtype[Any], **facts: Any) -> None:
    """Write the values of all parts, one after the other, into a file that gets its name when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = np.cumsum([0, *(len(part.values) for part in parts)])
    blocks = [part.ends + start for part, start in zip(parts, starts, strict=False)]
    blocks += [part.values for part in parts]
    crc = 0
    for block in blocks:
        crc = zlib.crc32(np.ascontiguousarray(block).data, crc)
    said = {**facts, "dtype": dtype.name, "sequences": sum(map(len, parts)), "values": int(starts[-1]), "crc32": crc}
    line = json.dumps(said, sort_keys=True).encode()
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            file.write(line + b" " * (-(len(line) + 1) % ALIGNED) + b"\n")
            for block in blocks:
                block.tofile(file)
        sync(temporary)
    sync(path.parent)


def damage(path: Path, key: str, sequences: int) -> str | None:
    """Say what is wrong with the file of a key; None if nothing is. Reads all of it."""
    try:
        said, start = _first_line(path)
        if said["key"] != key or said["sequences"] != sequences:
            return "it is of other sequences or weights"
        size = start + 8 * sequences + np.dtype(said["dtype"]).itemsize * said["values"]
        if path.stat().st_size != size:
            return f"it has {path.stat().st_size:,} bytes of {size:,}"
        crc = 0
        with path.open("rb") as file:
            file.seek(start)
            while content := file.read(BLOCK):
                crc = zlib.crc32(content, crc)
        ends = Values.mapped(path).ends
        if crc != said["crc32"] or (sequences and ends[-1] != said["values"]):
            return "it has other bytes than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first_line(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    if len(line) % ALIGNED:
        raise ValueError("its first line is torn")
    said: dict[str, Any] = json.loads(line)
    return said, len(line)


# ---- the reference ----


@dataclass(frozen=True)
class Rows:
    """The examples whose values are kept, in order: all, or those at some places."""

    held_out: bool
    examples: Sequence[Answered]
    places: np.ndarray | None = None  # sorted; None: all

    def __len__(self) -> int:
        return len(self.examples) if self.places is None else len(self.places)

    def __getitem__(self, number: int) -> Answered:
        return self.examples[number if self.places is None else int(self.places[number])]

    def number(self, place: int) -> int:
        """Return which of the rows is the example at a place."""
        if self.places is None:
            return place
        number = int(np.searchsorted(self.places, place))
        assert number < len(self.places), f"example {place} is not kept"
        assert self.places[number] == place, f"example {place} is not kept"
        return number


@dataclass(frozen=True)
class Kept:
    """What is kept of rows, each with as many sequences as a row has answers."""

    rows: Rows
    values: Values

    def of(self, example: int, answer: int) -> Floats:
        sides = len(self.values) // len(self.rows)
        return self.values.of(self.rows.number(example) * sides + answer)


class Stored(Reference):
    """Values that are kept: of the examples to train on, and of those held out. No model is in memory."""

    def __init__(self, kept: Sequence[Kept], precision: Precision) -> None:
        self.kept = {each.rows.held_out: each for each in kept}
        self.dtype = torch.float64 if precision is Precision.fp64 else torch.float32

    def known(self, pack: Pack, shard: Shard) -> Shard:
        assert len(pack.names) == pack.sequences, "a stored reference knows sequences by their names"
        values = [self.kept[name.held_out].of(name.example, name.answer) for name in pack.names]
        return replace(shard, known_n=listed(values, self.dtype)[shard.listed_n])

    def logps(self, shard: Shard) -> Tensor:
        assert shard.known_n is not None
        return shard.known_n
