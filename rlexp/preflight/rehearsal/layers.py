"""After how many layers a model's layers are alike again, and whether those of a reference are like the policy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlexp.base.errors import ConfigError
from rlexp.config.checks.layout import heads_in
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.schema import Config, HFModelConfig
from rlexp.training.model.loading import load_config, random_model
from rlexp.training.model.small import listed

FEWEST = 2  # layers of the smallest rehearsal
ONE_BY_ONE = 5  # tries; after these, many more layers at once


@dataclass(frozen=True)
class Cycle:
    """The layers from `lead` on repeat after `period` of them."""

    lead: int
    period: int

    def few(self, layers: int, fewest: int) -> Iterator[int]:
        """Yield numbers of layers to rehearse, each beside one period more, from which whole periods lead to all."""
        few = self.lead + (layers - self.lead) % self.period + self.period * -(-fewest // self.period)
        tries = 0
        while few + self.period < layers:
            yield few
            tries += 1
            few += self.period * (1 if tries < ONE_BY_ONE else 2**tries)


_CYCLES: dict[str, Cycle] = {}


def cycle_of(config: Any) -> Cycle:
    """Return the shortest cycle of layers, by their parameters and by what the configuration lists for each."""
    key = config.to_json_string()
    if key not in _CYCLES:
        _CYCLES[key] = cycle(_kinds(config))
    return _CYCLES[key]


def cycle(kinds: Sequence[Any]) -> Cycle:
    """Return the cycle of layers of such kinds that is seen after the fewest layers."""
    cycles = [Cycle(_lead(kinds, period), period) for period in range(1, len(kinds) + 1)]
    return min(cycles, key=lambda each: each.lead + 2 * each.period)


def _lead(kinds: Sequence[Any], period: int) -> int:
    """Return from which layer on each is like the one a period later."""
    apart = [place for place in range(len(kinds) - period) if kinds[place] != kinds[place + period]]
    return apart[-1] + 1 if apart else 0


def _kinds(config: Any) -> list[Any]:
    """Return what a layer is, for each: what the configuration lists for it, and its parameters.

    A model that does not say which of its modules are layers might have any: then no two are alike.
    """
    count = int(config.num_hidden_layers)
    with torch.device("meta"):
        model = random_model(config, 2)
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if len(layers) != count:
        return list(range(count))
    lists = [value for _, value in sorted(listed(config).items())]
    shapes = [[(name, tuple(each.shape)) for name, each in layer.named_parameters()] for layer in layers]
    return [([each[place] for each in lists], shapes[place]) for place in range(count)]


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
