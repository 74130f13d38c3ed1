"""Values of pairs that losses are tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlexp.config.schema import KINDS
from rlexp.config.schema.losses import MPOConfig, PreferenceConfig
from rlexp.training.algos.base import Sides, Values
from rlexp.verify.recording import Array
from tests.oracles.examples import SIDES

# Every loss over pairs but the sum of others.
LOSSES: Mapping[str, type[PreferenceConfig]] = {
    name: kind
    for name, kind in KINDS["loss"].items()
    if issubclass(kind, PreferenceConfig) and not issubclass(kind, MPOConfig)
}


def sides(chosen: Sequence[float], rejected: Sequence[float]) -> dict[str, Tensor]:
    return {
        "chosen": torch.tensor(chosen, dtype=torch.float64),
        "rejected": torch.tensor(rejected, dtype=torch.float64),
    }


def values_of(policy: Sides, reference: Sides | None = None, tokens: Sides | None = None) -> Values:
    return Values(policy, reference, tokens or {side: torch.ones_like(each) for side, each in policy.items()})


def random_values(pairs: int, seed: int = 0) -> Values:
    """Pairs with everything that a loss can ask for, of answers with 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(pairs, generator=generator, dtype=torch.float64)

    tokens = {side: torch.randint(1, 13, (pairs,), generator=generator).double() for side in SIDES}
    policy, reference = ({side: -tokens[side] * (0.05 + 2 * uniform()) for side in SIDES} for _ in range(2))
    return Values(policy, reference, tokens, {side: -2 * uniform() for side in SIDES}, 3 * uniform(), 5.5)


def sums_of(values: Values) -> dict[str, Array]:
    """By the names of the textbook."""
    assert values.reference is not None
    both = {"policy": values.logps, "reference": values.reference}
    return {f"{who}/{side}": each.detach().numpy() for who, logps in both.items() for side, each in logps.items()}


def slopes(losses_P: Tensor, policy: Sides) -> dict[str, Tensor]:
    """Return the derivatives of the sum of the losses."""
    grads = torch.autograd.grad(losses_P.sum(), list(policy.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(policy, grads, strict=True))


def trained(values: Sides) -> dict[str, Tensor]:
    return {side: each.clone().requires_grad_() for side, each in values.items()}
