"""Rules across the fields of a loss: each family has its own."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config.checks.policy_loss import check_policy_loss
from rlexp.config.checks.preference import check_preference
from rlexp.config.checks.unpaired import check_unpaired
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.losses import PolicyLossConfig, PreferenceConfig, UnpairedConfig
from rlexp.config.schema.row_kinds import ROWS_OF, Kind


def check_loss(cfg: Config) -> None:
    match cfg.loss:
        case PolicyLossConfig() as loss:
            check_policy_loss(cfg, loss)
        case PreferenceConfig() as loss:
            check_preference(loss)
        case UnpairedConfig() as loss:
            check_unpaired(cfg, loss)
    _check_unpair(cfg)


def _check_unpair(cfg: Config) -> None:
    if cfg.data.unpair and cfg.loss.rows is not Kind.unpaired:
        fit = ", ".join(f"loss={name}" for name, kind in KINDS["loss"].items() if issubclass(kind, UnpairedConfig))
        raise ConfigError(
            f"data.unpair=true: makes two single answers of each pair, and loss={cfg.loss.name} is trained on "
            f"{ROWS_OF[cfg.loss.rows]}. Leave it out, or use a loss on single answers: {fit}."
        )
