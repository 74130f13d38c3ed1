"""From logits to a token: by the inverse of the distribution's sums, at a number that is given.

One number a token, compared with sums in float64: what rounding does to the logits moves the borders between tokens
as little, and a token flips only where the number falls between a border's two roundings.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlexp.config.schema import RolloutConfig


def choose(logits_BV: Tensor, uniform_B: Tensor, cfg: RolloutConfig) -> tuple[Tensor, Tensor]:
    """The token of each row, and its log-probability in the whole distribution, in float64. The logits have been
    divided by the temperature."""
    logps_BV = logits_BV.double().log_softmax(-1)
    sums_BV = kept(logps_BV, cfg).cumsum(-1)
    # Never beyond the last token that has a probability, whatever its sum was rounded to.
    whole_B1 = sums_BV[:, -1:].contiguous()
    last_B1 = torch.searchsorted(sums_BV, whole_B1).clamp(max=sums_BV.shape[-1] - 1)  # of NaN it is beyond
    token_B1 = torch.searchsorted(sums_BV, uniform_B.unsqueeze(-1) * whole_B1, right=True).minimum(last_B1)
    return token_B1.squeeze(-1), logps_BV.gather(-1, token_B1).squeeze(-1)


def kept(logps_BV: Tensor, cfg: RolloutConfig) -> Tensor:
    """Probabilities, zero where top-k, top-p or min-p (in that order) leave a token out; not summing up to 1."""
    probs_BV = logps_BV.exp()
    if 0 < cfg.top_k < probs_BV.shape[-1]:
        smallest_B1 = probs_BV.topk(cfg.top_k, dim=-1).values[:, -1:]
        probs_BV = probs_BV.where(probs_BV >= smallest_B1, 0.0)
    if cfg.top_p < 1:
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        enough_BV = before_BV >= cfg.top_p * sorted_BV.sum(-1, keepdim=True)
        probs_BV = probs_BV.masked_fill(torch.zeros_like(enough_BV).scatter(-1, order_BV, enough_BV), 0.0)
    if cfg.min_p > 0:
        probs_BV = probs_BV.where(probs_BV >= cfg.min_p * probs_BV.amax(-1, keepdim=True), 0.0)
    return probs_BV
