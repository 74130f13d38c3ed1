"""Rules across the fields of losses over single answers."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.config.schema.losses import UnpairedConfig

ALONE = "estimates the divergence by giving each prompt another's answer, and one answer has no other"


def check_unpaired(cfg: Config, loss: UnpairedConfig) -> None:
    if loss.mismatches and cfg.train.batch_size == 1:
        raise ConfigError(f"train.batch_size=1: loss={loss.name} {ALONE}. Use train.batch_size=2 or more.")
