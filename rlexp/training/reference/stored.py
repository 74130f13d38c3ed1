"""Log-probabilities that were computed before training: kept in a folder, and laid on packs by the sequences' names.

A folder holds those of a list of sequences: `ends` (int64), where each sequence's values end, and `values`, one for
each trained token. Its name is a hash of everything that the values depend on, except for the rounding of a layout.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
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
from rlexp.base.made_once import Appending, mapped
from rlexp.base.version import __version__
from rlexp.config.content_ids import files_of_model
from rlexp.config.schema import Config, LoraConfig, ModelConfig
from rlexp.config.schema.models import Precision
from rlexp.training.dealer.packing import listed
from rlexp.training.reference.models import Reference
from rlexp.training.types import Example, Floats, Pack, Shard

FORMAT = 3  # of the folders, and of the code that computes what is in them
NO_WEIGHTS = ("freeze", "chat_template", "fused")  # keys of a model


# ---- the key ----


def cache_of(cfg: Config) -> Path:
    """Return this machine's cache, which keeps them in its folder `reference`."""
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


def digest_of(examples: Iterable[Example]) -> bytes:
    """Hash the tokens of examples, with what is trained on of each answer."""
    digest = hashlib.sha256()
    for example in examples:
        for part, mask in ((example.prompt, None), *example.masked):
            digest.update(f"{len(part)} {mask is not None}\n".encode())
            digest.update(np.asarray(part, dtype=np.int32).tobytes())
            if mask is not None:
                digest.update(np.asarray(mask, dtype=np.bool_).tobytes())
    return digest.digest()


def kept_dtype(precision: Precision) -> np.dtype[Any]:
    """Return the dtype of the values: the one in which a model's log-probabilities are computed."""
    return np.dtype(np.float64 if precision is Precision.fp64 else np.float32)


# ---- a folder ----


@dataclass(frozen=True)
class SequenceValues:
    ends: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def of(self, place: int) -> Floats:
        start = int(self.ends[place - 1]) if place else 0
        return np.array(self.values[start : int(self.ends[place])])

    @staticmethod
    def laid_out(arrays: Sequence[Floats], dtype: np.dtype[Any]) -> SequenceValues:
        ends = np.cumsum([len(each) for each in arrays], dtype=np.int64)
        return SequenceValues(ends, np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))

    @staticmethod
    def mapped(folder: Path, precision: Precision) -> SequenceValues:
        """Map a whole folder into memory: of its values only those are read that are asked for."""
        return SequenceValues(*(mapped(folder / name, dtype) for name, dtype in types_of(precision).items()))


def types_of(precision: Precision) -> dict[str, np.dtype[Any]]:
    return {"ends": np.dtype(np.int64), "values": kept_dtype(precision)}


def appended(making: Appending, arrays: Sequence[Floats], last: int) -> None:
    """Append the values of the sequences of some rows, of which the last is before row `last`."""
    part = SequenceValues.laid_out(arrays, making.types["values"])
    making.append({"ends": part.ends + making.length("values"), "values": part.values}, last)


# ---- the reference ----


@dataclass(frozen=True)
class ReferenceRows:
    """The examples whose values are kept, in order: all, or those at some places."""

    held_out: bool
    examples: Sequence[Example]
    places: np.ndarray | None = None  # sorted; None: all

    def __len__(self) -> int:
        return len(self.examples) if self.places is None else len(self.places)

    def __getitem__(self, number: int) -> Example:
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

    rows: ReferenceRows
    values: SequenceValues

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
