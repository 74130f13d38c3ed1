"""Make of a model an ordinary folder in transformers' format, once per machine, where `model` asks for what changes
files: a GGUF file is written as safetensors, and new tokens get rows in the embeddings.

The folder's name holds its source's contents and what was asked, so nothing stale is ever found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import extract_commit_hash
from transformers.utils.logging import disable_progress_bar

from rlexp.base import cache
from rlexp.base.errors import ModelError, first_line
from rlexp.base.made_once import is_whole, making, seal
from rlexp.config.content_ids import files_of_model, sampled
from rlexp.config.model_names import called
from rlexp.config.schema import HFModelConfig, ModelConfig
from rlexp.training.model.export import Export, export
from rlexp.training.model.growing import grow

FORMAT = 2  # to be raised when the same key means other files
FROM_HUB = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")


def of_hub(cfg: ModelConfig) -> HFModelConfig | None:
    """Return the configuration of a model of the hub; None for any other."""
    return cfg if isinstance(cfg, HFModelConfig) and not Path(cfg.path).expanduser().is_dir() else None


def commit_of(cfg: ModelConfig) -> str | None:
    """Return the commit of a hub model, as this machine's cache holds it and as it is loaded; None for any other."""
    on_hub = of_hub(cfg)
    if on_hub is None:
        return None
    cached = try_to_load_from_cache(on_hub.path, on_hub.gguf or "config.json", revision=on_hub.revision)
    commit: str | None = extract_commit_hash(cached, None) if isinstance(cached, str) else None
    return commit


def prepared(cfg: ModelConfig) -> ModelConfig:
    """Return the configuration of the same model as a folder, or hub name, that transformers loads as it is."""
    if not isinstance(cfg, HFModelConfig):
        return cfg
    path = str(Path(cfg.path).expanduser()) if cfg.path.startswith("~") else cfg.path
    cfg = dataclasses.replace(cfg, path=path)
    if cfg.gguf is None and not cfg.add_tokens:
        return cfg
    folder = _folder(cfg)
    if cfg.gguf is not None:
        reason = f"model.gguf={cfg.gguf}"
        folder = _made(reason, called(cfg), [_state_of(folder / cfg.gguf)], partial(_from_gguf, folder, cfg.gguf))
    if cfg.add_tokens:
        reason = f"model.add_tokens={cfg.add_tokens}"
        state = [*map(_state_of, files_of_model(folder)), cfg.add_tokens]
        grown = partial(grow, folder, cfg.add_tokens, trust_remote_code=cfg.trust_remote_code)
        folder = _made(reason, called(cfg), state, grown)
    return dataclasses.replace(cfg, path=str(folder), revision=None, gguf=None, add_tokens=[])


def named_base(model: ModelConfig) -> tuple[str | None, str | None]:
    """Return the model that an adapter belongs to, as its description names it: a folder, or a name on the hub and a
    commit."""
    base = prepared(model)
    if not isinstance(base, HFModelConfig):
        return None, None
    folder = Path(base.path)
    return (str(folder.absolute()), None) if folder.is_dir() else (base.path, commit_of(base) or base.revision)


def _folder(cfg: HFModelConfig) -> Path:
    """Return the model's folder; a hub model is fetched."""
    if os.path.isdir(cfg.path):  # which also takes what can be no path
        return Path(cfg.path)
    wanted = FROM_HUB if cfg.gguf is None else (cfg.gguf,)
    try:
        folder = Path(snapshot_download(cfg.path, revision=cfg.revision, allow_patterns=list(wanted)))
        if cfg.gguf is None and not any(folder.glob("*.safetensors")):  # an old model
            snapshot_download(cfg.path, revision=cfg.revision, allow_patterns=["*.bin"])
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{cfg.group}.path={cfg.path}: is no folder, and cannot be fetched from the hub ({type(error).__name__}: "
            f"{first_line(error)}). Give a model's folder, or a hub name and, if need be, its {cfg.group}.revision."
        ) from error
    if cfg.gguf is not None and not (folder / cfg.gguf).is_file():
        raise ModelError(f"model.gguf={cfg.gguf}: no such file in model.path={cfg.path} on the hub.")
    return folder


def _state_of(file: Path) -> list[Any]:
    """Tell a file from another of its name; samples alone might be the same in two files of weights."""
    stat = file.stat()
    return [file.name, stat.st_size, stat.st_mtime_ns, sampled(file)]


# ---- a folder, made once ----


def _made(asked: str, name: str, state: list[Any], make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` writes, and make it if it is not here, or not whole. Others wait meanwhile."""
    key = hashlib.sha256(json.dumps([FORMAT, state]).encode()).hexdigest()[:16]
    place = cache.root() / "models" / f"{name.replace('/', '-')}-{key}"
    try:
        if not is_whole(place):
            with making(place) as folder:
                if folder is not None:
                    sys.stderr.write(f"rlexp: {asked}: the model is written once, to {place}\n")
                    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
                    folder.mkdir()
                    try:
                        make(folder)
                        seal(folder, {"of": asked})
                    except BaseException:  # it would fill the disk, and nobody goes on with it
                        shutil.rmtree(folder, ignore_errors=True)
                        raise
    except (OSError, SafetensorError) as error:  # safetensors so reports a full disk
        raise ModelError(
            f"{asked}: the model could not be written to {place} ({type(error).__name__}: {first_line(error)}). Make "
            f"room there, or set RLEXP_CACHE to a folder that can be written to."
        ) from error
    return place


# ---- GGUF ----


def _from_gguf(folder: Path, name: str, place: Path) -> None:
    """Write a GGUF file's model in float32, which holds every value of its blocks exactly, and its tokenizer."""
    disable_progress_bar()
    # The bar of this loading cannot be turned off, and writes line after line into a log.
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet:
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except Exception as error:  # a reader of files from anywhere raises anything
        raise ModelError(
            f"model.gguf={name}: cannot be loaded from {folder} ({type(error).__name__}: {first_line(error)}). Give a "
            f"whole GGUF file of an architecture that transformers reads from GGUF."
        ) from error
    del model.config.quantization_config  # it would claim that the weights are still in blocks
    export(Export(model, torch.float32, place), model.named_parameters(), tokenizer)
