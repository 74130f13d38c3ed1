"""Which token a random number chooses, written out a second time from docs/rollouts_inside.md.

A sample's numbers follow from (seed, rollout, prompt, sample, position). A number u chooses the token at which the
probabilities of the tokens that may be drawn, added up in the order of the vocabulary, first exceed u times their sum.
`top_k`, `top_p` and `min_p`, in this order, say which may be drawn.

Rounding moves borders. A token is right if it would be chosen by log-probabilities that differ from the reference's by
no more than `rounding`. A token near a border of a cut is *in doubt*: it may be drawn, or may not.

Shape letters: n drawn tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.verify.recording import Array

HELD_OUT = 1 << 40  # the number of the rollout that answers held-out prompts
MASK = (1 << 64) - 1
ROWS = 1 << 21  # elements of a table of probabilities


def number_of(seed: int, rollout: int, prompt: int, sample: int, position: int) -> float:
    """Return the random number of a token: 53 bits, mixed by the last step of SplitMix64."""
    key = 0
    for part in (seed, rollout, prompt, sample):
        key = _mixed(key ^ _mixed(part & MASK))
    return (_mixed(key ^ _mixed(position + 1)) >> 11) / float(1 << 53)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Strayed:
    """By how much of the probability each number lies outside its token's part, (n,); 1 where the token may not be
    drawn at all. And the tokens in doubt."""

    apart_n: Array
    doubtful: int


@torch.no_grad()
def strayed(
    head: Any, hidden_nE: Tensor, tokens_n: Tensor, numbers_n: Tensor, cfg: RolloutConfig, rounding: float
) -> Strayed:
    """Compare drawn tokens with those that their numbers choose, from the hidden state before each."""
    rows = max(1, ROWS // head.weight.shape[0])
    pieces = zip(hidden_nE.split(rows), tokens_n.split(rows), numbers_n.split(rows), strict=True)
    parts = [_of_rows(head(hidden), tokens, numbers, cfg, rounding) for hidden, tokens, numbers in pieces]
    apart, doubtful = zip(*parts, strict=True)
    return Strayed(torch.cat(apart).cpu().numpy(), sum(doubtful))


def _of_rows(logits_nV: Tensor, tokens_n: Tensor, numbers_n: Tensor, cfg: RolloutConfig, rounding: float
             ) -> tuple[Tensor, int]:  # fmt: skip
    logps_nV = (logits_nV.double() / cfg.temperature).log_softmax(-1)
    token_n1, number_n1 = tokens_n.unsqueeze(-1), numbers_n.unsqueeze(-1)
    may_nV, must_nV = cut(logps_nV, cfg, rounding)
    probs_nV = logps_nV.exp()
    most_nV, least_nV = (probs_nV * may_nV).cumsum(-1), (probs_nV * must_nV).cumsum(-1)
    own_n1 = (probs_nV * must_nV).gather(-1, token_n1)
    below_n1, above_n1 = least_nV.gather(-1, token_n1) - own_n1, most_nV.gather(-1, token_n1)
    apart_n1 = torch.maximum(below_n1 - number_n1 * most_nV[:, -1:], number_n1 * least_nV[:, -1:] - above_n1).clamp(0.0)
    may_n1, must_n1 = may_nV.gather(-1, token_n1), must_nV.gather(-1, token_n1)
    return apart_n1.where(may_n1, 1.0).squeeze(-1), int((may_n1 & ~must_n1).sum())


def cut(logps_nV: Tensor, cfg: RolloutConfig, rounding: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that may be drawn if rounding is for them, and those that may be drawn even if it is not."""
    sorted_nV, order_nV = logps_nV.sort(dim=-1, descending=True)
    band_nV, spread = 2 * rounding * sorted_nV.abs().clamp(min=1.0), math.expm1(2 * rounding)
    mass_nV = torch.cat([torch.zeros_like(sorted_nV[:, :1]), sorted_nV.exp().cumsum(-1)], dim=-1)
    # How many tokens are likelier: at least, if near ones count as less likely; and at most, if they count as more.
    least_nV = torch.searchsorted(-sorted_nV, -(sorted_nV + band_nV))
    most_nV = torch.searchsorted(-sorted_nV, -(sorted_nV - band_nV)) - 1
    may_nV, must_nV = torch.ones_like(order_nV, dtype=torch.bool), torch.ones_like(order_nV, dtype=torch.bool)
    if cfg.top_k:
        may_nV, must_nV = least_nV < cfg.top_k, most_nV < cfg.top_k
    if cfg.top_p < 1:
        probs_nV = sorted_nV.exp()
        whole, sure = ((probs_nV * each_nV).sum(-1, keepdim=True) for each_nV in (may_nV, must_nV))
        before, at_most = mass_nV.gather(-1, least_nV), mass_nV.gather(-1, most_nV + 1) - probs_nV
        may_nV = may_nV & (before * (1 - spread) < cfg.top_p * whole * (1 + spread))
        must_nV = must_nV & (at_most * (1 + spread) < cfg.top_p * sure * (1 - spread))
    if cfg.min_p > 0:
        behind = sorted_nV - sorted_nV[:, :1] - math.log(cfg.min_p)
        may_nV, must_nV = may_nV & (behind >= -band_nV), must_nV & (behind >= band_nV)
    must_nV[:, 0] |= most_nV[:, 0] == 0  # no cut leaves out the likeliest token
    may, must = (torch.zeros_like(each).scatter(-1, order_nV, each) for each in (may_nV, must_nV))
    return may, must
