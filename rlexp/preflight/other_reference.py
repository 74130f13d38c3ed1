"""Whether a run with a reference model of its own can be rehearsed: only one like the policy can."""

from __future__ import annotations

from typing import Any

import torch

from rlexp.base.errors import ConfigError
from rlexp.config.checks.layout import heads_in
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.schema import Config, HFModelConfig
from rlexp.training.model.loading import load_config, random_model


def refuse_unlike_reference(cfg: Config, model: Any) -> None:
    """Refuse a reference model that is built otherwise than the policy.

    All layers are told from a few of both models together, so they must be the same.
    """
    if cfg.reference.path is None:
        return
    assert isinstance(cfg.model, HFModelConfig)
    other = load_config(model_of_reference(cfg), cfg.data.max_length)
    if _shapes(other) != _shapes(model) or heads_in(other.to_dict()) != heads_in(model.to_dict()):
        raise ConfigError(
            f"reference.path={cfg.reference.path}: its layers are not those of model.path={cfg.model.path}, and only "
            f"a reference model like the policy is rehearsed. Leave reference.path out to learn what the run needs "
            f"without it."
        )


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in random_model(config, 2).named_parameters()}
