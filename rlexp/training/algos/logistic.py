"""The logistic loss of a margin. Shape letter: P pairs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def logistic(margin_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return −log σ(margin), in the mean over labels of which the share `label_smoothing` is wrong, (P,)."""
    right_P = -F.logsigmoid(margin_P)
    if not label_smoothing:
        return right_P
    return (1 - label_smoothing) * right_P - label_smoothing * F.logsigmoid(-margin_P)
