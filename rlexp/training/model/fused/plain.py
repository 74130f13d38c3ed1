"""The fused pieces written out in plain torch: what they compute, on a CPU. The tests hold the Triton kernels to them.

Numbers are read and written in the dtype that they have; in between they are float32 (float64 for float64).

Shape letters: r rows (tokens, or tokens and heads), E size of a row, B batch, H heads, t tokens, D head size, n rows of
logits, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

PARTS = 512  # of the gradient of a norm's weight, at most: on a GPU each program adds up its own rows
NUMBERS = 4096  # that such a program holds at once
SILU, GELU_TANH, GELU, RELU_SQUARED = "silu", "gelu_tanh", "gelu", "relu_squared"
KINDS = (SILU, GELU_TANH, GELU, RELU_SQUARED)
TANH_SCALE, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- the norm: x over its root mean square, times a gain ----


def norm(x_rE: Tensor, weight_E: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and one over the root of each row's mean square. The gain is `weight + offset`."""
    to = wide(x_rE.dtype)
    x = x_rE.to(to)
    scale_r = torch.rsqrt(x.square().mean(-1) + eps)
    return (x * scale_r.unsqueeze(-1) * (weight_E.to(to) + offset)).to(x_rE.dtype), scale_r


def add_norm(
    x_rE: Tensor, residual_rE: Tensor, weight_E: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add to the residual stream, and return the norm of the sum, the sum, and one over the root of its mean square."""
    total = residual_rE + x_rE
    normed, scale_r = norm(total, weight_E, eps, offset)
    return normed, total, scale_r


def norm_backward(
    dout_rE: Tensor, dtotal_rE: Tensor | None, x_rE: Tensor, weight_E: Tensor, scale_r: Tensor, offset: float,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of x, with that of the residual stream beside it; and that of the weight (empty if not asked)
    in parts, which are still to be added up."""
    to = wide(x_rE.dtype)
    dout, scale = dout_rE.to(to), scale_r.unsqueeze(-1)
    normed = x_rE.to(to) * scale
    given = dout * (weight_E.to(to) + offset)
    dx = scale * (given - normed * (given * normed).mean(-1, keepdim=True))
    if dtotal_rE is not None:
        dx = dx + dtotal_rE.to(to)
    parts, each = parts_of(*x_rE.shape)
    if not of_weight or not parts:
        return dx.to(x_rE.dtype), dout.new_empty(0, dout.shape[1])
    padded = torch.nn.functional.pad(dout * normed, (0, 0, 0, parts * each - len(x_rE)))
    return dx.to(x_rE.dtype), padded.unflatten(0, (parts, each)).sum(1)


def parts_of(rows: int, size: int) -> tuple[int, int]:
    """Return in how many parts the gradient of a norm's weight is added up, and the rows of each."""
    many = rows_at_once(size)
    each = many * -(-rows // (many * PARTS))
    return (-(-rows // each), each) if rows else (0, 0)


def rows_at_once(size: int) -> int:
    return max(1, NUMBERS // (1 << (size - 1).bit_length()))


# ---- rotary positions ----


def rotate(q: Tensor, k: Tensor, cos_BtD: Tensor, sin_BtD: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, (B, H, t, D), by their positions: the halves of a head are the two coordinates.

    `inverse` is the gradient: the transposed matrix, which is the rotation back.
    """
    return _rotated(q, cos_BtD, sin_BtD, inverse), _rotated(k, cos_BtD, sin_BtD, inverse)


def _rotated(x: Tensor, cos_BtD: Tensor, sin_BtD: Tensor, inverse: bool) -> Tensor:
    to = wide(x.dtype)
    one, other = x.to(to).chunk(2, dim=-1)
    (cos, cos_other), (sin, sin_other) = (each.to(to).unsqueeze(1).chunk(2, dim=-1) for each in (cos_BtD, sin_BtD))
    out = tokens_first(x)
    if inverse:
        out.copy_(torch.cat((one * cos + other * sin_other, other * cos_other - one * sin), dim=-1))
    else:
        out.copy_(torch.cat((one * cos - other * sin, other * cos_other + one * sin_other), dim=-1))
    return out


def tokens_first(x_BHtD: Tensor) -> Tensor:
    """Make room for (B, H, t, D) with a token's heads beside each other in memory, as projections write them."""
    batch, heads, tokens, size = x_BHtD.shape
    return x_BHtD.new_empty(batch, tokens, heads, size).transpose(1, 2)


# ---- the gate of an MLP ----


def gate(gate_rE: Tensor, up_rE: Tensor, kind: str) -> Tensor:
    """Return the activation of the gate, times what goes up."""
    to = wide(gate_rE.dtype)
    return (activated(gate_rE.to(to), kind)[0] * up_rE.to(to)).to(gate_rE.dtype)


def gate_backward(dout_rE: Tensor, gate_rE: Tensor, up_rE: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    to = wide(gate_rE.dtype)
    value, slope = activated(gate_rE.to(to), kind)
    dout = dout_rE.to(to)
    return (dout * up_rE.to(to) * slope).to(gate_rE.dtype), (dout * value).to(up_rE.dtype)


def activated(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return an activation and its derivative."""
    if kind == SILU:
        share = torch.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    if kind == GELU_TANH:
        bent = torch.tanh(TANH_SCALE * (x + TANH_CUBE * x**3))
        inner = TANH_SCALE * (1 + 3 * TANH_CUBE * x**2)
        return 0.5 * x * (1 + bent), 0.5 * (1 + bent) + 0.5 * x * (1 - bent**2) * inner
    if kind == GELU:
        below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return x * below, below + x * torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    assert kind == RELU_SQUARED
    rest = torch.relu(x)
    return rest**2, 2 * rest


# ---- the head: what is read of logits ----


def read_logits(
    logits_nV: Tensor, targets_n: Tensor, temperature: float, entropy: bool, likelihood: bool, hit: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return of each row its target's logit, its log-sum-exp and its mean, and if asked its entropy, log Σ p² (the
    expected log-likelihood of a token drawn from p), and whether its largest is the target's (else empty)."""
    wide_nV = widened(logits_nV, temperature)
    norm_n, none = wide_nV.logsumexp(-1), wide_nV.new_empty(0)
    chosen_n, mean_n = wide_nV.gather(-1, targets_n.unsqueeze(-1)).squeeze(-1), wide_nV.mean(-1)
    entropy_n = norm_n - ((wide_nV - norm_n.unsqueeze(-1)).exp_() * wide_nV).sum(-1) if entropy else none
    hit_n = (wide_nV.argmax(-1) == targets_n).to(wide_nV.dtype) if hit else none
    likelihood_n = none
    if likelihood:
        own_nV = wide_nV.clone() if wide_nV is logits_nV else wide_nV  # last, since it uses the logits up
        likelihood_n = own_nV.sub_(norm_n.unsqueeze(-1)).mul_(2).logsumexp(-1)
    return chosen_n, norm_n, mean_n, entropy_n, likelihood_n, hit_n


def logits_gradient(
    logits_nV: Tensor, targets_n: Tensor, norm_n: Tensor, dlogps_n: Tensor, entropy_n: Tensor | None,
    dentropy_n: Tensor | None, temperature: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of logits before the temperature, from those of the targets' log-probabilities and of the
    entropies: with probabilities p and m = Σ p·logits, an entropy's gradient is −p·(logits − m). It uses the logits up.
    """
    wide_nV = widened(logits_nV, temperature)
    targets_n1, norm_n1, grad_n1 = (x.unsqueeze(-1) for x in (targets_n, norm_n, dlogps_n))
    each = grad_n1
    if entropy_n is not None and dentropy_n is not None:
        each = (wide_nV - (norm_n1 - entropy_n.unsqueeze(-1))).mul_(dentropy_n.unsqueeze(-1)).add_(grad_n1)
    grad_nV = wide_nV.sub_(norm_n1).exp_().mul_(each).neg_().scatter_add_(-1, targets_n1, grad_n1)
    return grad_nV if temperature == 1 else grad_nV.div_(temperature)


def logits_backward(logits_nV: Tensor, *given: Any) -> None:
    """Put the gradient of logits in their place."""
    logits_nV.copy_(logits_gradient(logits_nV, *given))


def widened(logits_nV: Tensor, temperature: float) -> Tensor:
    """Return logits over the temperature in float32 (float64 for float64)."""
    wide_nV = logits_nV.to(wide(logits_nV.dtype))
    return wide_nV if temperature == 1 else wide_nV / temperature
