"""Choose tokens by inverse transform sampling: each token by one number in [0, 1).

The number follows from (seed, rollout, prompt, sample, position) alone. So a token does not depend on the rank that
draws it, on the samples drawn beside it, or on stops of the run.

The number is compared with the distribution's cumulative sums in float64. Rounding of the logits moves the borders
between tokens as little as it moves the logits. So a token flips only if its number lies between two roundings of a
border.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlexp.config.schema.rollouts import RolloutConfig

_GOLDEN, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BITS = 53  # precision of float64


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


def stream(seed: int, rollout: int, prompts: Sequence[int], numbers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return a key for each sample, for all positions of its answer."""
    key = np.zeros(len(prompts), dtype=np.uint64)
    for part in (np.full(len(prompts), seed), np.full(len(prompts), rollout), np.asarray(prompts), np.asarray(numbers)):
        key = _mixed(key ^ _mixed(part.astype(np.uint64)))
    return key


def uniform(stream_B: npt.NDArray[np.uint64], position: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the number for each sample's token at `position` of its answer: one for all, or one each."""
    bits = _mixed(stream_B ^ _mixed((np.zeros(len(stream_B), dtype=np.int64) + position + 1).astype(np.uint64)))
    return (bits >> np.uint64(64 - _BITS)) * np.float64(2.0**-_BITS)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits, as the last step of SplitMix64 does (Steele, Lea and Flood 2014): each depends on all others."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
