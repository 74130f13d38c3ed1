"""The loss's formula, applied apart from the run: to the reference's own sums, and to the sums that the run computed.

The formula itself is the product's (`training/algos/`), and its own tests hold it to the papers and to TRL. What
`verify` judges is all that surrounds it: which sums it is given, for which samples, and what becomes of its results.
Shape letter: E examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlexp.training.algos.base import Loss, Values
from rlexp.verify.records import MISMATCHED, Array, Counts, Losses

OF_TOKENS = ("likelihoods", "entropies", "hits")  # log Σ p², the entropy, and whether the token is the likeliest


def losses_of(
    loss: Loss, sums: Mapping[str, Array], counts: Counts, carried: Mapping[str, float], *, held_out: bool = False
) -> tuple[Losses, Mapping[str, float]]:
    """Return the losses of a whole batch, their derivatives by the policy's sums, and what else the formula returns;
    then what it leaves to the next step."""
    sides = list(counts.tokens)
    policy, reference = (_by_side(sums, who, sides) for who in ("policy", "reference"))
    assert policy is not None
    for each in policy.values():
        each.requires_grad_()
    scores = loss.wanted.scores
    values = Values(
        logps={} if scores else policy,
        scores=policy if scores else None,
        reference=reference,
        tokens={side: torch.tensor(each, dtype=torch.float64) for side, each in counts.tokens.items()},
        of_tokens={who: by_side for who in OF_TOKENS if (by_side := _by_side(sums, who, sides))},
        margin_E=_tensor(counts.margins),
        label_E=_tensor(counts.labels),
        mismatched_B=_tensor(sums.get(MISMATCHED)),
        mean_tokens=counts.mean_tokens,
        carried=carried,
        held_out=held_out,
    )
    with torch.enable_grad():
        result = loss(values)
        slopes = torch.autograd.grad(result.losses_E.sum(), list(policy.values()), allow_unused=True)
    found = Losses(
        losses_E=result.losses_E.detach().numpy(),
        slopes={side: (torch.zeros_like(policy[side]) if slope is None else slope).numpy()
                for side, slope in zip(policy, slopes, strict=True)},
        values_E={name: values_E.numpy() for name, values_E in result.metrics_E.items()},
        weights_E={name: weights_E.numpy() for name, weights_E in result.weights_E.items()},
        carried=carried,
    )  # fmt: skip
    return found, result.carried


def losses_of_steps(loss: Loss, given: Sequence[tuple[Mapping[str, Array], Counts]]) -> Iterator[Losses]:
    """Yield the same for one step after the other, from the first."""
    carried: Mapping[str, float] = {}
    for sums, counts in given:
        losses, carried = losses_of(loss, sums, counts, carried)
        yield losses


def _tensor(values: Array | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def _by_side(sums: Mapping[str, Array], who: str, sides: Sequence[str]) -> dict[str, Tensor] | None:
    found = {side: sums[f"{who}/{side}"] for side in sides if f"{who}/{side}" in sums}
    return {side: torch.tensor(each, dtype=torch.float64) for side, each in found.items()} or None
