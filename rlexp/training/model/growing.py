"""Add tokens to a model in a folder. The embeddings get rows for them, and only files with embeddings are rewritten.

A new row is the mean of the old rows, summed in their order in float64: the same bits on every machine. Rows that a
model has to spare are used as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlexp.base import plain_json
from rlexp.base.errors import ModelError, first_line
from rlexp.base.files import open_to_others, write_text
from rlexp.config.checks.model import refuse_known
from rlexp.training.model.export import Export, export

BLOCK = 1024  # rows that are summed at once
AS_THEY_ARE = ("generation_config.json", "*.py")


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
