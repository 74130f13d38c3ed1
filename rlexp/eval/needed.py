"""Changes to a composed configuration: what only training needs is not asked for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rlexp.base.errors import ConfigError
from rlexp.base.file_hashes import files_of
from rlexp.config.schema.data import SourceConfig

KEYS = {each.name for each in fields(SourceConfig)}
OF_A_SET = {"subset": None, "revision": None, "streaming": False}  # and not of a file


def fit_layout(cfg: DictConfig) -> None:
    """Let the train batch, and the rollout of which it is a part, fit the layout: an evaluation uses neither."""
    for key, resolver, sizes in (
        ("train.batch_size", "rlexp_fitting_batch", "${train.micro_batch_size},${parallel.dp_size}"),
        ("rollout.batch_size", "rlexp_fitting_rollout", "${rollout.n_samples},${train.batch_size}"),
    ):
        OmegaConf.update(cfg, key, f"${{{resolver}:{OmegaConf.select(cfg, key)},{sizes}}}")


def hold_out_alone(cfg: DictConfig) -> None:
    """Let rows that are held out in a place of their own be enough: those to train on need not be there."""
    data = cfg.data
    if "eval_path" not in data:
        return
    if OmegaConf.is_missing(data, "path") and data.eval_path is None:
        raise ConfigError("data.eval_path: has no value. Give the rows to evaluate: data.eval_path=FILE.")
    sources = data.get("sources") or {}
    for source in (data, *(each for each in sources.values() if isinstance(each, DictConfig))):
        _take_held_out(source)
    held_out = {name: each for name, each in sources.items() if not _trained_on_alone(each)}
    if held_out:
        data.sources = held_out


def _trained_on_alone(source: Any) -> bool:
    """Return whether no row of a source is held out. One that is not written as it should be is refused later."""
    return (
        isinstance(source, DictConfig) and source.keys() <= KEYS and not (source.keys() & {"eval_path", "eval_split"})
    )


def _take_held_out(source: DictConfig) -> None:
    """Name the held-out rows where those to train on are named. A set's split, subset and revision may be of either."""
    place = source.get("eval_path")
    if not isinstance(place, str):
        return  # none, or one that is refused where sources are checked
    of_rows = {"split": "train"} | (OF_A_SET if files_of(place) else {})
    with open_dict(source):
        source.update({"path": place} | {key: value for key, value in of_rows.items() if key in source})
