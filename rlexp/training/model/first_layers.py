"""The configuration of the same model with fewer layers: its first ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


def first_layers(config: Any, layers: int | None) -> Any:
    """Return the configuration with this many of its layers; with all of them for None."""
    if layers is None or layers == config.num_hidden_layers:
        return config
    small = copy.deepcopy(config)
    for name, each in listed(config).items():
        setattr(small, name, list(each[:layers]))
    small.num_hidden_layers = layers
    return small


def listed(config: Any) -> dict[str, Sequence[Any]]:
    """Return what a configuration lists layer by layer."""
    count = int(config.num_hidden_layers)
    return {name: each for name, each in vars(config).items() if isinstance(each, list | tuple) and len(each) == count}
