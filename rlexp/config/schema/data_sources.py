"""The sources of a data set of rows: one, or several with weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from rlexp.base.errors import ConfigError
from rlexp.base.file_hashes import files_of
from rlexp.config.checks.files import check_rows, check_rows_or_name, expanded
from rlexp.config.schema.bounds import check_bounds
from rlexp.config.schema.data import HFDataConfig, JsonlDataConfig, RowsDataConfig, SourceConfig
from rlexp.config.schema.keys import suggestion
from rlexp.config.schema.value_kinds import typed_entry

# of rows, by which data.columns names columns
FIELDS = ("prompt", "chosen", "rejected", "completion", "label", "messages", "text", "answer", "input", "system",
          "tools", "options", "margin", "score_chosen", "score_rejected")  # fmt: skip
OF_ONE = ("path", "eval_path", "subset", "eval_split", "revision")  # keys that describe a single source


@dataclass(frozen=True)
class NamedSource:
    """One source. Its keys stand below `key`: `data`, or `data.sources.NAME`."""

    name: str
    key: str
    cfg: SourceConfig


def sources_of(cfg: RowsDataConfig) -> list[NamedSource]:
    """Return the named sources, or the single one that the keys of `data` describe."""
    match cfg:
        case HFDataConfig(sources=sources) if sources:
            return [_named(str(name), keys) for name, keys in sources.items()]
        case JsonlDataConfig() | HFDataConfig():
            own = {field.name: getattr(cfg, field.name) for field in fields(SourceConfig) if hasattr(cfg, field.name)}
            return [NamedSource("data", "data", SourceConfig(**own))]
        case _:
            raise AssertionError(cfg)


def weights_of(sources: Sequence[NamedSource]) -> list[float] | None:
    """Return the weights of the sources; None if all their rows are taken."""
    return [source.cfg.weight for source in sources if source.cfg.weight is not None] or None


def _named(name: str, keys: Any) -> NamedSource:
    key = f"data.sources.{name}"
    if not isinstance(keys, dict):
        raise ConfigError(f"{key}={keys}: must be a group of keys. For example: {key}={{path: FILE, weight: 1.0}}.")
    own = {str(leaf): value for leaf, value in keys.items()}
    return NamedSource(name, key, typed_entry(key, SourceConfig, own, "a source"))


def check_sources(cfg: RowsDataConfig, *, reads_rows: bool = True) -> None:
    """Refuse what cannot be read."""
    if isinstance(cfg, HFDataConfig):
        _check_one_or_many(cfg)
    sources = sources_of(cfg)
    for source in sources:
        check_bounds(source.cfg, f"{source.key}.")
        for ours, theirs in source.cfg.columns.items():
            if ours not in FIELDS:
                near = suggestion(ours, list(FIELDS))
                raise ConfigError(
                    f"{source.key}.columns.{ours}={theirs}: no such field.{near} Fields: {', '.join(FIELDS)}."
                )
        check = check_rows if isinstance(cfg, JsonlDataConfig) else check_rows_or_name
        if reads_rows and source.cfg.eval_path is not None:  # first: an evaluation has no other
            check(f"{source.key}.eval_path", source.cfg.eval_path)
        if reads_rows:
            check(f"{source.key}.path", source.cfg.path)
        _check_splits(source)
    bare = [source for source in sources if source.cfg.weight is None]
    if bare and len(bare) < len(sources):
        raise ConfigError(
            f"{bare[0].key}.weight: has no value, and other sources have one. Give every source a weight, or none: "
            f"then all their rows are taken."
        )
    if isinstance(cfg.eval_size, float) and cfg.eval_size >= 1:
        raise ConfigError(
            f"data.eval_size={cfg.eval_size}: a share of the rows must be less than 1, and a number of rows is whole. "
            f"Use data.eval_size=0.05 or data.eval_size={round(cfg.eval_size)}."
        )
    if cfg.eval_size and has_held_out(cfg, sized=False):
        raise ConfigError(
            f"data.eval_size={cfg.eval_size}: holds out some of the rows to train on, and others are held out already. "
            f"Leave out data.eval_size, or eval_path and eval_split."
        )


def _check_one_or_many(cfg: HFDataConfig) -> None:
    given = [key for key in OF_ONE if getattr(cfg, key) is not None]
    if cfg.sources and given:
        raise ConfigError(
            f"data.{given[0]}={getattr(cfg, given[0])}: describes a single source, and data.sources names "
            f"{', '.join(map(str, cfg.sources))}. Give it to one of them: data.sources.NAME.{given[0]}=VALUE."
        )
    if cfg.sources and cfg.columns:
        raise ConfigError(
            f"data.columns={cfg.columns}: each of several sources has its own columns. Say "
            f"data.sources.NAME.columns.{next(iter(cfg.columns))}=COLUMN."
        )
    if not cfg.sources and cfg.path is None:
        raise ConfigError(
            "data.path: has no value. Give a file, a folder or a hub name: data.path=PATH; or several sources: "
            "data.sources.NAME.path=PATH."
        )


def _check_splits(source: NamedSource) -> None:
    """Refuse what a path does not have: it would be ignored, and rows to train on would be held out too."""
    key, cfg = source.key, source.cfg
    if files_of(cfg.path):
        given = {"split": None if cfg.split == "train" else cfg.split}
        if cfg.eval_path is None or files_of(cfg.eval_path):  # else they are of the set that is held out
            given |= {"subset": cfg.subset, "revision": cfg.revision, "eval_split": cfg.eval_split,
                      "streaming": "true" if cfg.streaming else None}  # fmt: skip
        for name, value in given.items():
            if value:
                none = {"split": "train", "streaming": "false"}.get(name, "null")
                raise ConfigError(
                    f"{key}.{name}={value}: {key}.path={cfg.path} is a file, and only a data set has a {name}. Leave "
                    f"it out, or if an experiment sets it, give {key}.{name}={none}. Hold rows out with "
                    f"{key}.eval_path=FILE or data.eval_size=N."
                )
    elif os.path.isdir(expanded(f"{key}.path", cfg.path)) and cfg.revision is not None and cfg.eval_path is None:
        raise ConfigError(f"{key}.revision={cfg.revision}: {key}.path={cfg.path} is a folder, which has no revisions.")
    if cfg.eval_path is None and cfg.eval_split == cfg.split:
        raise ConfigError(
            f"{key}.eval_split={cfg.eval_split}: these are the rows to train on. Name another split, or hold some of "
            f"them out with data.eval_size=N."
        )


def held_out_of(eval_size: int | float, rows: int) -> int:
    """Return how many of the rows `data.eval_size` holds out: a share is rounded down, and is at least one row."""
    if isinstance(eval_size, int):
        return eval_size
    return max(1, int(Fraction(str(eval_size)) * rows)) if eval_size else 0


def has_held_out(cfg: RowsDataConfig, *, sized: bool = True) -> bool:
    named = any(each.cfg.eval_path is not None or each.cfg.eval_split is not None for each in sources_of(cfg))
    return named or (sized and cfg.eval_size > 0)
