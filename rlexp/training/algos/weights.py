"""Loss normalizers, computed over the whole train batch and never over a part of it.

Shape letter: B samples of the train batch. `counts_B` is true where a sample is trained on. An empty answer that counts
is counted in a mean over answers, and adds nothing to its sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.config.schema.losses import Normalize


def token_weight(normalize: Normalize, length_B: Tensor, counts_B: Tensor, fixed: int) -> Tensor:
    """Return the weight of each sample's tokens in the loss, (B,), in float64. `fixed` is rollout.max_new_tokens.

    Example: two answers of 1 and 3 tokens, `fixed` 4. token: ¼ and ¼; sequence: ½ and ⅙; fixed: ⅛ and ⅛.
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
    """Return the weight of each sample in a loss of whole sequences, (B,), in float64."""
    counts_B = counts_B.bool()
    return _inverse(counts_B.sum().double().expand(counts_B.shape), counts_B)


def _inverse(divisor_B: Tensor, where_B: Tensor) -> Tensor:
    """Return 1 / divisor where `where_B` is true, else 0."""
    return where_B.double() / torch.where(where_B, divisor_B, 1.0)
