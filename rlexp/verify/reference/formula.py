"""The loss's formula, applied apart from the run: to the reference's own sums, and to the sums that the run computed.

The formula itself is the product's (`training/algos/`), and its own tests hold it to the papers and to TRL. What
`verify` judges is all that surrounds it: which sums it is given, for which samples, and what becomes of its results.
Shape letter: P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlexp.config.schema.losses import LossConfig
from rlexp.training.algos.base import PairLogps
from rlexp.training.algos.build import build_loss
from rlexp.verify.records import SIDES, Array, Losses


def losses_of(loss: LossConfig, sums: Mapping[str, Array]) -> Losses:
    """Return the losses of these pairs, their derivatives by the policy's sums, and what else the formula returns."""
    policy, reference = (
        [torch.tensor(sums[f"{who}/{side}"], dtype=torch.float64, requires_grad=who == "policy") for side in SIDES]
        for who in ("policy", "reference")
    )
    with torch.enable_grad():
        result = build_loss(loss)(PairLogps(*policy), PairLogps(*reference))
        slopes = torch.autograd.grad(result.losses_P.sum(), policy)
    return Losses(
        losses_P=result.losses_P.detach().numpy(),
        slopes={side: slope.numpy() for side, slope in zip(SIDES, slopes, strict=True)},
        values_P={name: values_P.numpy() for name, values_P in result.metrics_P.items()},
    )
