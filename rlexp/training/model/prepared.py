"""Make of a model an ordinary folder in transformers' format, once per machine, where `model` asks for what changes
files: a GGUF file is written as safetensors, and new tokens get rows in the embeddings.

The folder's name holds its source's contents and what was asked, so nothing stale is ever found. A new row is the mean
of the old rows, summed in their order in float64: the same bits on every machine. Rows that a model has to spare are
used as they are, and only files with embeddings are rewritten.
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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import extract_commit_hash
from transformers.utils.logging import disable_progress_bar

from rlexp.base import cache, plain_json
from rlexp.base.errors import ModelError, first_line
from rlexp.base.files import open_to_others, write_text
from rlexp.base.made_once import is_whole, making, seal
from rlexp.config.checks.model import refuse_known
from rlexp.config.content_ids import files_of_model, sampled
from rlexp.config.schema import HFModelConfig, ModelConfig
from rlexp.training.model.export import Export, export

FORMAT = 2  # to be raised when the same key means other files
BLOCK = 1024  # rows that are summed at once
AS_THEY_ARE = ("generation_config.json", "*.py")  # whatever tokens are added
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
    return extract_commit_hash(cached, None) if isinstance(cached, str) else None


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
        folder = _made(reason, cfg.called, [_state_of(folder / cfg.gguf)], partial(_from_gguf, folder, cfg.gguf))
    if cfg.add_tokens:
        reason = f"model.add_tokens={cfg.add_tokens}"
        state = [*map(_state_of, files_of_model(folder)), cfg.add_tokens]
        grown = partial(grow, folder, cfg.add_tokens, trust_remote_code=cfg.trust_remote_code)
        folder = _made(reason, cfg.called, state, grown)
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


# ---- new tokens ----


def grow(folder: Path, tokens: list[str], place: Path, *, trust_remote_code: bool = False) -> None:
    """Write the model of `folder` with new tokens to `place`. Files that stay as they are become links."""
    trusted = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
        config = AutoConfig.from_pretrained(folder, **trusted)
        tables = _files_with_rows(folder, _tables(config, trusted))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model.add_tokens={tokens}: no tokenizer and causal model can be loaded from {folder} "
            f"({type(error).__name__}: {first_line(error)})."
        ) from error
    refuse_known(tokens, set(tokenizer.get_vocab()))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    rows = max(tokenizer.get_vocab().values()) + 1
    if rows <= config.get_text_config().vocab_size:
        _copy(folder, place, config.get_text_config().vocab_size)
    elif tables:
        _copy(folder, place, rows, tables)
    else:
        _whole(folder, place, rows, tokenizer, trusted)
        return
    tokenizer.save_pretrained(place)


def _tables(config: Any, trusted: Mapping[str, bool]) -> set[str]:
    """Return the names of the parameters that have a row, or a number, for each token."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **trusted)
    modules = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    own = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own}


def _files_with_rows(folder: Path, tables: set[str]) -> dict[str, set[str]]:
    """Return the files with such parameters, and their names there; nothing where the files have other names."""
    files: dict[str, set[str]] = {}
    for file in _weights(folder):
        with safe_open(file, framework="pt") as content:
            # Some files leave out the name of the module that holds all others.
            names = {key for key in content.keys() if any(f".{table}".endswith(f".{key}") for table in tables)}  # noqa: SIM118
        if names:
            files[file.name] = names
    return files


def _weights(folder: Path) -> list[Path]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        return [folder / name for name in sorted(set(plain_json.loads(index.read_text())["weight_map"].values()))]
    return [file for file in (folder / SAFE_WEIGHTS_NAME,) if file.exists()]


def mean_row(table: Tensor) -> Tensor:
    """Return the mean over the first dimension, to the bit the same on every machine: rows are added in their order."""
    flat = table.reshape(table.shape[0], -1)
    total = np.zeros((1, flat.shape[1]))
    for block in flat.split(BLOCK):
        rows = np.concatenate([total, block.double().numpy()])
        total = np.add.accumulate(rows, axis=0)[-1:]
    return torch.from_numpy(total / table.shape[0]).reshape(table.shape[1:]).to(table.dtype)


def _with_rows(table: Tensor, rows: int) -> Tensor:
    more = rows - table.shape[0]
    return torch.cat([table, mean_row(table).expand(more, *table.shape[1:])]) if more > 0 else table


def _copy(folder: Path, place: Path, rows: int, rewritten: Mapping[str, set[str]] | None = None) -> None:
    """Write all but the tokenizer: the files to be rewritten with more rows, the others as links."""
    config = plain_json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config")
    (text if isinstance(text, dict) and "vocab_size" in text else config)["vocab_size"] = rows
    write_text(place / "config.json", json.dumps(config, indent=2) + "\n")
    added = 0
    for name, tables in (rewritten or {}).items():
        content = load_file(folder / name)
        before = sum(tensor.nbytes for tensor in content.values())
        content |= {table: _with_rows(content[table], rows).contiguous() for table in tables}
        save_file(content, place / name, metadata={"format": "pt"})
        open_to_others(place / name)
        added += sum(tensor.nbytes for tensor in content.values()) - before
    if (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        index = plain_json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))
        index.get("metadata", {}).pop("total_parameters", None)  # nobody needs it, and it is no longer true
        index.setdefault("metadata", {})["total_size"] = index.get("metadata", {}).get("total_size", 0) + added
        write_text(place / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")
    others = [file for pattern in AS_THEY_ARE for file in folder.glob(pattern)]
    others += _weights(folder) or [*folder.glob("*.bin"), *folder.glob("*.bin.index.json")]
    for file in others:
        if not (place / file.name).exists():
            _link(file, place / file.name)


def _link(file: Path, place: Path) -> None:
    """A hard link outlives its source; to another disk there is only a symbolic one."""
    real = file.resolve()
    with contextlib.suppress(OSError):
        os.link(real, place)
        return
    place.symlink_to(real)


def _whole(folder: Path, place: Path, rows: int, tokenizer: Any, trusted: Mapping[str, bool]) -> None:
    """Write every file anew, by way of transformers: for old formats, and files with other names of the weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **trusted)
    modules = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    before = {id(each): {name: p.detach().clone() for name, p in each.named_parameters()} for each in modules}
    model.resize_token_embeddings(rows, mean_resizing=False)
    for old, module in zip(modules, (model.get_input_embeddings(), model.get_output_embeddings()), strict=False):
        for name, parameter in module.named_parameters():
            parameter.data.copy_(_with_rows(before[id(old)][name], rows))
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    export(Export(model, model.dtype, place), model.named_parameters(), tokenizer)
