"""By what the terms of a train batch are divided: counts of the whole batch, never of a part of it.

Shape letter: B samples of the train batch. `counts_B` is true where a sample is trained on. An empty answer that
counts is one of the answers of a mean over answers, and adds nothing to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.config.schema import Normalize


def token_weight(normalize: Normalize, length_B: Tensor, counts_B: Tensor, fixed: int) -> Tensor:
    """(B,): what each token of a sample weighs in the loss, in float64. `fixed` is rollout.max_new_tokens.

    With lengths 1 and 3, and `fixed` 4: by token ¼ and ¼, by sequence ½ and ⅙, fixed ⅛ and ⅛.
    """
    counts_B = counts_B.bool()
    length_B = length_B.double()
    samples = counts_B.sum().double()
    match normalize:
        case Normalize.token:
            divisor_B = (length_B * counts_B).sum().expand_as(length_B)
        case Normalize.sequence:
            divisor_B = samples * length_B
        case Normalize.fixed:
            divisor_B = (samples * fixed).expand_as(length_B)
    return _inverse(divisor_B, counts_B & (length_B > 0))


def sequence_weight(counts_B: Tensor) -> Tensor:
    """(B,): what a sample weighs in a loss by sequences, in float64."""
    counts_B = counts_B.bool()
    return _inverse(counts_B.sum().double().expand(counts_B.shape), counts_B)


def _inverse(divisor_B: Tensor, where_B: Tensor) -> Tensor:
    """1 / divisor, and 0 elsewhere."""
    return where_B.double() / torch.where(where_B, divisor_B, 1.0)
