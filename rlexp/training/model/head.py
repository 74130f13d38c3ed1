"""Log-probabilities of a shard's targets from its hidden states and the head, some rows of logits at a time; or scores.

Both passes are written out. The backward pass computes the logits again, so between the passes only two numbers of each
row are kept. The gradient of the head's weight is added up over the pieces in float32 and rounded once: in bfloat16, a
sum over 256 pieces would be off by 1.2 %, and the number of pieces follows from the ring size.

Shape letters: t tokens of this rank, u of them whose targets are trained on, p of these in a piece, n the trained
tokens of the sequences, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlexp.training.model.fused import operators, plain  # noqa: F401 — defines operators
from rlexp.training.model.fused.plain import wide
from rlexp.training.types import OF_TOKENS, Shard, TokenLogps, TokenScores, Wanted

LOGITS = 1 << 24  # elements of logits held at once, on a CPU
BYTES, FUSED_BYTES = 10, 2  # of an element of logits: in both dtypes and with its gradient; or in bfloat16 alone
SHARE, FUSED_SHARE = 32, 128  # of a GPU's memory, what logits may take: larger pieces write the sum less often


def logits_at_once(memory: int | None, *, fused: bool = False) -> int:
    """Return how many logits may be held at once, on a device with so many bytes."""
    share, each = (FUSED_SHARE, FUSED_BYTES) if fused else (SHARE, BYTES)
    return LOGITS if memory is None else max(LOGITS, memory // share // each)


class HeadLogps(nn.Module):
    """Log-probabilities of a shard's targets; without a shard, the logits over the temperature.

    This is a module that is given the head's parameters and calls no other module. So an engine that gathers parameters
    module by module gathers them once, however many pieces this rank's tokens make.
    """

    def __init__(self, wanted: Wanted, most: int = LOGITS) -> None:
        super().__init__()
        self.wanted, self.most, self.fused = wanted, most, False

    def forward(
        self, weight: Tensor, bias: Tensor | None, hidden_tE: Tensor, shard: Shard | None
    ) -> TokenLogps | Tensor:
        if shard is None:
            # in float32 (float64 for float64), as sampling needs them
            return plain.widened(nn.functional.linear(hidden_tE, weight, bias), self.wanted.temperature)
        reading = _Reading(self.wanted, max(1, self.most // weight.shape[0]), self.fused and bias is None)
        read_u = _Pieces.apply(weight, bias, hidden_tE, shard.targets_t, shard.trained_u, reading)
        logps_u, means_u, *of_tokens_u = read_u
        of_tokens_n = (None if each_u is None else shard.by_token(each_u) for each_u in of_tokens_u)
        return TokenLogps(shard.by_token(logps_u), shard.by_token(means_u), *of_tokens_n)


class HeadScores(nn.Module):
    """The score at the end of each sequence, in float32 (float64 for float64): bfloat16 would leave it two digits.

    It is given the head's parameters, as `HeadLogps` is. Only the rows that are read are cast, and kept.
    """

    def forward(self, weight: Tensor, bias: Tensor | None, hidden_tE: Tensor, shard: Shard) -> TokenScores:
        assert shard.ends_n is not None
        to, read_nE = wide(weight.dtype), hidden_tE.index_select(0, shard.ends_n)
        scores_n1 = nn.functional.linear(read_nE.to(to), weight.to(to), None if bias is None else bias.to(to))
        return TokenScores(scores_n1.squeeze(-1))


@dataclass(frozen=True)
class _Reading:
    wanted: Wanted
    rows: int  # in a piece
    fused: bool  # all that is read of logits by one kernel, and their gradient written in their place by another


class _Pieces(torch.autograd.Function):
    """Values of the tokens `trained_u`. Without such tokens all gradients are zero, but exist: no rank waits for
    another's."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        hidden_tE: Tensor,
        targets_t: Tensor,
        trained_u: Tensor,
        reading: _Reading,
    ) -> tuple[Tensor | None, ...]:
        wanted = reading.wanted
        of_tokens = [getattr(wanted, name) for name in OF_TOKENS]
        values = [
            hidden_tE.new_empty(len(trained_u), dtype=wide(weight.dtype)) if each else None
            for each in (True, True, True, *of_tokens)
        ]
        read = torch.ops.rlexp.read_logits if reading.fused else plain.read_logits
        for part, at in _parts(trained_u, reading.rows):
            logits_pV = nn.functional.linear(hidden_tE.index_select(0, at), weight, bias)
            chosen_p, norm_p, *others = read(logits_pV, targets_t.index_select(0, at), wanted.temperature, *of_tokens)
            pieces = (chosen_p - norm_p, norm_p, *others)
            for into_u, values_p in zip(values, pieces, strict=True):
                if into_u is not None:
                    into_u[part] = values_p
            del logits_pV  # before the next piece makes its own
        logps_u, norms_u, means_u, entropies_u, *others_u = values
        ctx.save_for_backward(weight, bias, hidden_tE, targets_t, trained_u, norms_u, entropies_u)
        ctx.reading = reading
        constant = [means_u, *others_u, *([] if wanted.entropy_gradient else [entropies_u])]
        ctx.mark_non_differentiable(*(each_u for each_u in constant if each_u is not None))
        return logps_u, means_u, entropies_u, *others_u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_u: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, hidden_tE, _, trained_u, *_ = ctx.saved_tensors
        of_weight, of_bias, of_hidden, *_ = ctx.needs_input_grad
        total = _Sum(weight, pieces=-(-len(trained_u) // ctx.reading.rows))
        bias_V = None if bias is None else bias.new_zeros(bias.shape, dtype=wide(bias.dtype))
        hidden_grad_tE = torch.zeros_like(hidden_tE) if of_hidden else None
        for at, logits_grad_pV in _logits_grads(ctx.saved_tensors, ctx.reading, *grads_u):
            narrow_pV = logits_grad_pV.to(weight.dtype)
            if hidden_grad_tE is not None:
                hidden_grad_tE.index_copy_(0, at, narrow_pV @ weight)
            if bias_V is not None:
                bias_V += logits_grad_pV.sum(0)
            if of_weight:
                total.add(narrow_pV, hidden_tE.index_select(0, at))
            del narrow_pV, logits_grad_pV
        weight_grad = total.rounded() if of_weight else None
        bias_grad = bias_V.to(bias.dtype) if bias_V is not None and of_bias else None
        return weight_grad, bias_grad, hidden_grad_tE, None, None, None


def _parts(trained_u: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of trained tokens: where they stand among these, and in the shard."""
    for first in range(0, len(trained_u), rows):
        part = slice(first, first + rows)
        yield part, trained_u[part]


def _logits_grads(
    saved: tuple[Tensor, ...], reading: _Reading, logps_grad_u: Tensor, _: Any, entropy_grad_u: Any, *__: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens of each piece, and the gradient of their logits before the temperature."""
    weight, bias, hidden_tE, targets_t, trained_u, norms_u, entropy_u = saved
    temperature, joins = reading.wanted.temperature, reading.wanted.entropy_gradient and entropy_grad_u is not None
    # A kernel reads them one after the other, and the gradient of a plain sum is one number for all.
    logps_grad_u = logps_grad_u.contiguous()
    entropy_grad_u = entropy_grad_u.contiguous() if joins else None
    for part, at in _parts(trained_u, reading.rows):
        of_entropy = [entropy_u[part], entropy_grad_u[part]] if joins else [None, None]
        given: Any = (targets_t.index_select(0, at), norms_u[part], logps_grad_u[part], *of_entropy, temperature)
        logits_pV = nn.functional.linear(hidden_tE.index_select(0, at), weight, bias)
        if reading.fused:
            torch.ops.rlexp.logits_backward(logits_pV, *given)
        else:
            logits_pV = plain.logits_gradient(logits_pV, *given)
        yield at, logits_pV
        del logits_pV


class _Sum:
    """The gradient of the head's weight: one product, or the sum of several in float32 (float64 for float64)."""

    def __init__(self, weight: Tensor, pieces: int) -> None:
        self.weight, self.pieces = weight, pieces
        self.total: Tensor | None = None

    def add(self, grad_pV: Tensor, hidden_pE: Tensor) -> None:
        if self.pieces == 1:
            self.total = grad_pV.T @ hidden_pE
            return
        dtype = wide(self.weight.dtype)
        if self.total is None:
            self.total = self.weight.new_zeros(self.weight.shape, dtype=dtype)
        if dtype is grad_pV.dtype:
            self.total.addmm_(grad_pV.T, hidden_pE)
        elif self.total.device.type == "cpu":  # it has no product of bfloat16 matrices into float32
            self.total.addmm_(grad_pV.T.to(dtype), hidden_pE.to(dtype))
        else:
            torch.addmm(self.total, grad_pV.T, hidden_pE, out_dtype=dtype, out=self.total)

    def rounded(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.total is None else self.total.to(self.weight.dtype)
