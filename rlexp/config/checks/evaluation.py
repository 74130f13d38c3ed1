"""Rules across the fields of evaluation."""

from __future__ import annotations

import itertools

from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.config.schema.cadence import eval_cadence
from rlexp.config.schema.data import ArithmeticDataConfig, RowsDataConfig, SyntheticDataConfig
from rlexp.config.schema.data_sources import has_held_out


def check_evaluation(cfg: Config) -> None:
    eval_cadence(cfg.train.eval_every)
    if cfg.train.eval_every is not None:
        refuse_nothing_held_out(cfg, f"train.eval_every={cfg.train.eval_every}", "leave train.eval_every out")
    if cfg.eval.before_training:
        refuse_nothing_held_out(cfg, "eval.before_training=true", "leave it out")
    bounds = cfg.eval.buckets
    setting = f"eval.buckets=[{','.join(map(str, bounds))}]"
    if bounds and (min(bounds) < 1 or any(one >= other for one, other in itertools.pairwise(bounds))):
        fit = sorted({each for each in bounds if each > 0}) or [512, 2048]
        raise ConfigError(
            f"{setting}: must be numbers of tokens that ascend, each at least 1. Use eval.buckets="
            f"[{','.join(map(str, fit))}]."
        )
    if bounds and cfg.loss.draws:
        raise ConfigError(
            f"{setting}: divides answers that the rows give, and loss={cfg.loss.name} generates its own. Leave it out."
        )


def refuse_nothing_held_out(cfg: Config, asked: str, otherwise: str) -> None:
    match cfg.data:
        case RowsDataConfig() as rows:
            held_out = has_held_out(rows)
        case SyntheticDataConfig(eval_size=size) | ArithmeticDataConfig(eval_size=size):
            held_out = size > 0
        case _:
            held_out = False
    if not held_out:
        raise ConfigError(
            f"{asked}: there is no held-out data. Give data.eval_path=FILE, data.eval_split=NAME (data=hf) or "
            f"data.eval_size=N, or {otherwise}."
        )
