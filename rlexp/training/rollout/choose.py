"""Choose tokens by inverse transform sampling: each token by one given number.

The number is compared with the distribution's cumulative sums in float64. Rounding of the logits moves the borders
between tokens as little as it moves the logits. So a token flips only if its number lies between two roundings of a
border.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.config.schema.rollouts import RolloutConfig


def choose(logits_BV: Tensor, uniform_B: Tensor, cfg: RolloutConfig) -> tuple[Tensor, Tensor]:
    """Return each row's token and its log-probability in the whole distribution, in float64.

    The logits are already divided by the temperature.
    """
    logps_BV = logits_BV.double().log_softmax(-1)
    sums_BV = running_sums(kept(logps_BV, cfg))
    # No token beyond the last one with a probability above 0, however the sums were rounded.
    whole_B1 = sums_BV[:, -1:].contiguous()
    last_B1 = torch.searchsorted(sums_BV, whole_B1).clamp(max=sums_BV.shape[-1] - 1)  # beyond the end if NaN
    token_B1 = torch.searchsorted(sums_BV, uniform_B.unsqueeze(-1) * whole_B1, right=True).minimum(last_B1)
    return token_B1.squeeze(-1), logps_BV.gather(-1, token_B1).squeeze(-1)


def kept(logps_BV: Tensor, cfg: RolloutConfig) -> Tensor:
    """Return the probabilities, with 0 for tokens that top-k, top-p or min-p (in this order) leave out.

    They are not normalized again.
    """
    probs_BV = logps_BV.exp()
    if 0 < cfg.top_k < probs_BV.shape[-1]:
        smallest_B1 = probs_BV.topk(cfg.top_k, dim=-1).values[:, -1:]
        probs_BV = probs_BV.where(probs_BV >= smallest_B1, 0.0)
    if cfg.top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = running_sums(sorted_BV) - sorted_BV
        enough_BV = before_BV >= cfg.top_p * sorted_BV.sum(-1, keepdim=True)
        probs_BV = probs_BV.masked_fill(torch.zeros_like(enough_BV).scatter(-1, order_BV, enough_BV), 0.0)
    if cfg.min_p > 0:
        probs_BV = probs_BV.where(probs_BV >= cfg.min_p * probs_BV.amax(-1, keepdim=True), 0.0)
    return probs_BV


def running_sums(probs_BV: Tensor) -> Tensor:
    """Return the cumulative sums; under `launch.deterministic` on the host, since torch has no such kernel for CUDA."""
    if probs_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return probs_BV.cpu().cumsum(-1).to(probs_BV.device)
    return probs_BV.cumsum(-1)
