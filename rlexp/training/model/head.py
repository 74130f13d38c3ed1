"""Log-probabilities of a shard's targets from its hidden states and the head, some rows of logits at a time; or scores.

Both passes are written out. The backward pass computes the logits again, so between the passes only two numbers of each
row are kept. The gradient of the head's weight is added up over the pieces in float32 and rounded once: in bfloat16, a
sum over 256 pieces would be off by 1.2 %, and the number of pieces follows from the ring size.

Shape letters: t tokens of this rank, n of them in a piece, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlexp.training.types import Shard, TokenLogps, TokenScores

LOGITS = 1 << 24  # elements of logits held at once, on a CPU
BYTES = 10  # of an element of logits, in both dtypes and with its gradient
SHARE = 32  # the part of a GPU's memory that logits may take: larger pieces write the sum less often


def logits_at_once(memory: int | None) -> int:
    """Return how many logits may be held at once, on a device with so many bytes."""
    return LOGITS if memory is None else max(LOGITS, memory // SHARE // BYTES)


class Entropy(Enum):
    """Whether the entropy of each token's distribution is computed."""

    unasked = "unasked"
    logged = "logged"
    trained = "trained"  # it has a gradient


class HeadLogps(nn.Module):
    """Log-probabilities of a shard's targets; without a shard, the logits.

    This is a module that is given the head's parameters and calls no other module. So an engine that gathers parameters
    module by module gathers them once, however many pieces this rank's tokens make.
    """

    def __init__(
        self, temperature: float, entropy: Entropy, most: int = LOGITS, *, likelihoods: bool = False, hits: bool = False
    ) -> None:
        super().__init__()
        self.temperature, self.entropy, self.likelihoods, self.hits = temperature, entropy, likelihoods, hits
        self.most = most

    def forward(
        self, weight: Tensor, bias: Tensor | None, hidden_tE: Tensor, shard: Shard | None
    ) -> TokenLogps | Tensor:
        if shard is None:
            return logits_of(weight, bias, hidden_tE, self.temperature)
        rows = max(1, self.most // weight.shape[0])
        asked = _Asked(self.temperature, self.entropy, rows, self.likelihoods, self.hits)
        logps_t, means_t, entropy_t, likelihoods_t, hits_t = _Pieces.apply(
            weight, bias, hidden_tE, shard.targets_t, shard.trained_n, asked
        )
        return TokenLogps(logps_t, means_t, entropy_t, likelihoods_t=likelihoods_t, hits_t=hits_t)


class HeadScores(nn.Module):
    """The score at the end of each sequence, in float32 (float64 for float64): bfloat16 would leave it two digits.

    It is given the head's parameters, as `HeadLogps` is. Only the rows that are read are cast, and kept.
    """

    def forward(self, weight: Tensor, bias: Tensor | None, hidden_tE: Tensor, shard: Shard) -> TokenScores:
        assert shard.ends_n is not None
        to, read_nE = wide(weight.dtype), hidden_tE.index_select(0, shard.ends_n)
        scores_n1 = nn.functional.linear(read_nE.to(to), weight.to(to), None if bias is None else bias.to(to))
        return TokenScores(scores_n1.squeeze(-1))


def logits_of(weight: Tensor, bias: Tensor | None, hidden_nE: Tensor, temperature: float) -> Tensor:
    """Return logits over the temperature in float32 (float64 for float64), as sampling needs them."""
    logits_nV = nn.functional.linear(hidden_nE, weight, bias).to(wide(weight.dtype))
    return logits_nV if temperature == 1 else logits_nV / temperature


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Asked:
    temperature: float
    entropy: Entropy
    rows: int  # in a piece
    likelihoods: bool
    hits: bool


class _Pieces(torch.autograd.Function):
    """Values of the tokens `trained_n`, and zero for all others. Without such tokens all gradients are zero, but exist:
    no rank waits for another's."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        hidden_tE: Tensor,
        targets_t: Tensor,
        trained_n: Tensor,
        asked: _Asked,
    ) -> tuple[Tensor | None, ...]:
        values = [hidden_tE.new_zeros(len(hidden_tE), dtype=wide(weight.dtype)) for _ in range(4)]
        logps_t, means_t, entropy_t, norms_t = values
        likelihoods_t, hits_t = (
            torch.zeros_like(norms_t) if each else None for each in (asked.likelihoods, asked.hits)
        )
        for at in trained_n.split(asked.rows):
            logits_nV = logits_of(weight, bias, hidden_tE.index_select(0, at), asked.temperature)
            chosen_n = logits_nV.gather(-1, targets_t.index_select(0, at).unsqueeze(-1)).squeeze(-1)
            norm_n = logits_nV.logsumexp(-1)
            norms_t.index_copy_(0, at, norm_n)
            logps_t.index_copy_(0, at, chosen_n - norm_n)
            means_t.index_copy_(0, at, logits_nV.mean(-1))
            if asked.entropy is not Entropy.unasked:
                entropy_t.index_copy_(0, at, _entropy(logits_nV, norm_n))
            if hits_t is not None:
                right_n = logits_nV.argmax(-1) == targets_t.index_select(0, at)
                hits_t.index_copy_(0, at, right_n.to(hits_t.dtype))
            if likelihoods_t is not None:  # last, since it uses the logits up
                likelihoods_t.index_copy_(0, at, _likelihood(logits_nV, norm_n))
        ctx.save_for_backward(weight, bias, hidden_tE, targets_t, trained_n, norms_t, entropy_t)
        ctx.asked = asked
        untrained = [means_t, *(each for each in (likelihoods_t, hits_t) if each is not None)]
        if asked.entropy is Entropy.logged:
            untrained.append(entropy_t)
        ctx.mark_non_differentiable(*untrained)
        return logps_t, means_t, None if asked.entropy is Entropy.unasked else entropy_t, likelihoods_t, hits_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_t: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, hidden_tE, _, trained_n, *_ = ctx.saved_tensors
        of_weight, of_bias, of_hidden, *_ = ctx.needs_input_grad
        total = _Sum(weight, pieces=-(-len(trained_n) // ctx.asked.rows))
        bias_V = None if bias is None else bias.new_zeros(bias.shape, dtype=wide(bias.dtype))
        hidden_grad_tE = torch.zeros_like(hidden_tE) if of_hidden else None
        for at, logits_grad_nV in _logits_grads(ctx.saved_tensors, ctx.asked, *grads_t):
            narrow_nV = logits_grad_nV.to(weight.dtype)
            if hidden_grad_tE is not None:
                hidden_grad_tE.index_copy_(0, at, narrow_nV @ weight)
            if bias_V is not None:
                bias_V += logits_grad_nV.sum(0)
            if of_weight:
                total.add(narrow_nV, hidden_tE.index_select(0, at))
        weight_grad = total.rounded() if of_weight else None
        bias_grad = bias_V.to(bias.dtype) if bias_V is not None and of_bias else None
        return weight_grad, bias_grad, hidden_grad_tE, None, None, None


def _logits_grads(
    saved: tuple[Tensor, ...], asked: _Asked, logps_grad_t: Tensor, _: Any, entropy_grad_t: Tensor | None, *__: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each piece, and the gradient of their logits before the temperature.

    With probabilities p and m = Σ p·logits, an entropy's gradient is −p·(logits − m).
    """
    weight, bias, hidden_tE, targets_t, trained_n, norms_t, entropy_t = saved
    for at in trained_n.split(asked.rows):
        targets_n1, norm_n1, grad_n1 = (x.index_select(0, at).unsqueeze(-1) for x in (targets_t, norms_t, logps_grad_t))
        logits_nV = logits_of(weight, bias, hidden_tE.index_select(0, at), asked.temperature)
        each = grad_n1
        if asked.entropy is Entropy.trained and entropy_grad_t is not None:
            entropy_n1, entropy_grad_n1 = (x.index_select(0, at).unsqueeze(-1) for x in (entropy_t, entropy_grad_t))
            each = (logits_nV - (norm_n1 - entropy_n1)).mul_(entropy_grad_n1).add_(grad_n1)
        result_nV = logits_nV.sub_(norm_n1).exp_().mul_(each).neg_().scatter_add_(-1, targets_n1, grad_n1)
        yield at, result_nV if asked.temperature == 1 else result_nV.div_(asked.temperature)


class _Sum:
    """The gradient of the head's weight: one product, or the sum of several in float32 (float64 for float64)."""

    def __init__(self, weight: Tensor, pieces: int) -> None:
        self.weight, self.pieces = weight, pieces
        self.total: Tensor | None = None

    def add(self, grad_nV: Tensor, hidden_nE: Tensor) -> None:
        dtype = self.weight.dtype if self.pieces == 1 else wide(self.weight.dtype)
        if self.total is None:
            self.total = self.weight.new_zeros(self.weight.shape, dtype=dtype)
        if dtype is grad_nV.dtype:
            self.total.addmm_(grad_nV.T, hidden_nE)
        elif self.total.device.type == "cpu":  # it has no product of bfloat16 matrices into float32
            self.total.addmm_(grad_nV.T.to(dtype), hidden_nE.to(dtype))
        else:
            torch.addmm(self.total, grad_nV.T, hidden_nE, out_dtype=dtype, out=self.total)

    def rounded(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.total is None else self.total.to(self.weight.dtype)


def _likelihood(logits_nV: Tensor, norm_n: Tensor) -> Tensor:
    """Return log Σ p², the expected log-likelihood of a token drawn from p, with the logits' memory for its own."""
    return logits_nV.sub_(norm_n.unsqueeze(-1)).mul_(2).logsumexp(-1)


def _entropy(logits_nV: Tensor, norm_n: Tensor) -> Tensor:
    return norm_n - ((logits_nV - norm_n.unsqueeze(-1)).exp_() * logits_nV).sum(-1)
