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

from rlexp.training.model.fused import operators, plain  # noqa: F401 — defines operators
from rlexp.training.model.fused.plain import wide
from rlexp.training.types import Shard, TokenLogps, TokenScores

LOGITS = 1 << 24  # elements of logits held at once, on a CPU
BYTES, FUSED_BYTES = 10, 2  # of an element of logits: in both dtypes and with its gradient; or in bfloat16 alone
SHARE, FUSED_SHARE = 32, 128  # of a GPU's memory, what logits may take: larger pieces write the sum less often


def logits_at_once(memory: int | None, *, fused: bool = False) -> int:
    """Return how many logits may be held at once, on a device with so many bytes."""
    share, each = (FUSED_SHARE, FUSED_BYTES) if fused else (SHARE, BYTES)
    return LOGITS if memory is None else max(LOGITS, memory // share // each)


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
        self.most, self.fused = most, False

    def forward(
        self, weight: Tensor, bias: Tensor | None, hidden_tE: Tensor, shard: Shard | None
    ) -> TokenLogps | Tensor:
        if shard is None:
            return logits_of(weight, bias, hidden_tE, self.temperature)
        fused = self.fused and bias is None
        rows = max(1, self.most // weight.shape[0])
        asked = _Asked(self.temperature, self.entropy, rows, self.likelihoods, self.hits, fused)
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
    return plain.widened(nn.functional.linear(hidden_nE, weight, bias), temperature)


@dataclass(frozen=True)
class _Asked:
    temperature: float
    entropy: Entropy
    rows: int  # in a piece
    likelihoods: bool
    hits: bool
    fused: bool  # all that is read of logits by one kernel, and their gradient written in their place by another


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
        trained = asked.entropy is not Entropy.unasked, asked.likelihoods, asked.hits
        values = [
            hidden_tE.new_zeros(len(hidden_tE), dtype=wide(weight.dtype)) if each else None
            for each in (True, True, True, *trained)
        ]
        read = torch.ops.rlexp.read_logits if asked.fused else plain.read_logits
        for at in trained_n.split(asked.rows):
            logits_nV = nn.functional.linear(hidden_tE.index_select(0, at), weight, bias)
            chosen_n, norm_n, *others = read(logits_nV, targets_t.index_select(0, at), asked.temperature, *trained)
            found = (chosen_n - norm_n, norm_n, *others)
            for into_t, values_n in zip(values, found, strict=True):
                if into_t is not None:
                    into_t.index_copy_(0, at, values_n)
            del logits_nV  # before the next piece makes its own
        logps_t, norms_t, means_t, entropy_t, likelihoods_t, hits_t = values
        ctx.save_for_backward(weight, bias, hidden_tE, targets_t, trained_n, norms_t, entropy_t)
        ctx.asked = asked
        logged = entropy_t if asked.entropy is Entropy.logged else None
        ctx.mark_non_differentiable(*(x for x in (means_t, likelihoods_t, hits_t, logged) if x is not None))
        return logps_t, means_t, entropy_t, likelihoods_t, hits_t

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
            del narrow_nV, logits_grad_nV
        weight_grad = total.rounded() if of_weight else None
        bias_grad = bias_V.to(bias.dtype) if bias_V is not None and of_bias else None
        return weight_grad, bias_grad, hidden_grad_tE, None, None, None


def _logits_grads(
    saved: tuple[Tensor, ...], asked: _Asked, logps_grad_t: Tensor, _: Any, entropy_grad_t: Any, *__: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each piece, and the gradient of their logits before the temperature."""
    weight, bias, hidden_tE, targets_t, trained_n, norms_t, entropy_t = saved
    joins = asked.entropy is Entropy.trained and entropy_grad_t is not None
    for at in trained_n.split(asked.rows):
        targets_n, norm_n, grad_n = (x.index_select(0, at) for x in (targets_t, norms_t, logps_grad_t))
        of_entropy = [x.index_select(0, at) for x in (entropy_t, entropy_grad_t)] if joins else [None, None]
        given = (targets_n, norm_n, grad_n, *of_entropy, asked.temperature)
        logits_nV = nn.functional.linear(hidden_tE.index_select(0, at), weight, bias)
        if asked.fused:
            torch.ops.rlexp.logits_backward(logits_nV, *given)
        else:
            logits_nV = plain.logits_gradient(logits_nV, *given)
        yield at, logits_nV
        del logits_nV


class _Sum:
    """The gradient of the head's weight: one product, or the sum of several in float32 (float64 for float64)."""

    def __init__(self, weight: Tensor, pieces: int) -> None:
        self.weight, self.pieces = weight, pieces
        self.total: Tensor | None = None

    def add(self, grad_nV: Tensor, hidden_nE: Tensor) -> None:
        if self.pieces == 1:
            self.total = grad_nV.T @ hidden_nE
            return
        dtype = wide(self.weight.dtype)
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
