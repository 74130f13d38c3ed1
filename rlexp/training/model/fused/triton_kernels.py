"""The fused pieces as Triton kernels. What each computes stands in `plain.py`.

One compilation serves all lengths: only the sizes of rows and heads, and a model's numbers, are constants. As arguments
these numbers would be rounded to float32. `ACC` is the dtype in between, and `WARMTH` one over the temperature.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlexp.training.model.fused.plain import GELU, GELU_TANH, KINDS, SILU, parts_of, rows_at_once, tokens_first, wide

COLUMNS = 1024  # that a program of the gate takes
LOGITS = 8192  # of a row that a program of the head reads at once
SILU_KIND, TANH_KIND, GELU_KIND = (tl.constexpr(KINDS.index(kind)) for kind in (SILU, GELU_TANH, GELU))


def _acc(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype is torch.float64 else tl.float32


# ---- the norm ----


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, out, total, scale, rows, size, EPS: tl.constexpr, OFFSET: tl.constexpr,
    ADDS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = row[:, None] * size + column[None, :]
    given = tl.load(x + place, mask=inside, other=0.0)
    if ADDS:
        added = given.to(ACC) + tl.load(residual + place, mask=inside, other=0.0).to(ACC)
        given = added.to(total.dtype.element_ty)
        tl.store(total + place, given, mask=inside)
    value = given.to(ACC)
    root = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / size + EPS)
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(ACC) + OFFSET
    tl.store(out + place, (value * root[:, None] * gain[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, root, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "each"])
def _norm_backward(
    dout, dtotal, x, weight, scale, dx, dweight, rows, size, each, OFFSET: tl.constexpr,
    JOINS: tl.constexpr, OF_WEIGHT: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, SIZE)
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(ACC) + OFFSET
    summed = tl.zeros((SIZE,), dtype=ACC)
    first = tl.program_id(0).to(tl.int64) * each
    for start in range(0, each, ROWS):
        row = first + start + tl.arange(0, ROWS)
        row_mask = (row < rows) & (start + tl.arange(0, ROWS) < each)
        inside = row_mask[:, None] & (column < size)[None, :]
        place = row[:, None] * size + column[None, :]
        root = tl.load(scale + row, mask=row_mask, other=0.0)[:, None]
        normed = tl.load(x + place, mask=inside, other=0.0).to(ACC) * root
        given = tl.load(dout + place, mask=inside, other=0.0).to(ACC)
        if OF_WEIGHT:
            summed += tl.sum(given * normed, axis=0)
        given = given * gain[None, :]
        result = root * (given - normed * (tl.sum(given * normed, axis=1) / size)[:, None])
        if JOINS:
            result += tl.load(dtotal + place, mask=inside, other=0.0).to(ACC)
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
    if OF_WEIGHT:
        tl.store(dweight + tl.program_id(0) * size + column, summed, mask=column < size)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    out, scale = torch.empty_like(x), x.new_empty(len(x), dtype=wide(x.dtype))
    _call_norm(x, x, weight, out, x, scale, eps, offset, adds=False)
    return out, scale


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    out, total, scale = torch.empty_like(x), torch.empty_like(residual), x.new_empty(len(x), dtype=wide(x.dtype))
    _call_norm(x, residual, weight, out, total, scale, eps, offset, adds=True)
    return out, total, scale


def _call_norm(x, residual, weight, out, total, scale, eps, offset, *, adds):
    rows, size = x.shape
    if rows:
        width, many = _shape(size)
        _norm[(triton.cdiv(rows, many),)](
            x, residual, weight, out, total, scale, rows, size, EPS=eps, OFFSET=offset,
            ADDS=adds, ROWS=many, SIZE=width, ACC=_acc(x), num_warps=_warps(width * many),
        )  # fmt: skip


def norm_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, offset: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    width, many = _shape(size)
    programs, each = parts_of(rows, size)
    dx, parts = torch.empty_like(x), x.new_empty(programs if of_weight else 0, size, dtype=wide(x.dtype))
    if programs:
        _norm_backward[(programs,)](
            dout, dout if dtotal is None else dtotal, x, weight, scale, dx, parts, rows, size, each, OFFSET=offset,
            JOINS=dtotal is not None, OF_WEIGHT=of_weight, ROWS=many, SIZE=width, ACC=_acc(x),
            num_warps=_warps(width * many),
        )  # fmt: skip
    return dx, parts


def _shape(size: int) -> tuple[int, int]:
    """Return the columns and rows of a program."""
    return triton.next_power_of_2(size), rows_at_once(size)


def _warps(numbers: int) -> int:
    return min(16, max(4, numbers // 512))


# ---- rotary positions ----


@triton.jit
def _rotated(
    x, out, cos, sin, token, heads, half, x_h, x_t, out_h, out_t,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEADS).to(tl.int64), tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    place = x + token * x_t + head[:, None] * x_h + column[None, :]
    one = tl.load(place, mask=inside, other=0.0).to(ACC)
    other = tl.load(place + half, mask=inside, other=0.0).to(ACC)
    within = column < half
    cos_one = tl.load(cos + column, mask=within, other=0.0).to(ACC)[None, :]
    cos_other = tl.load(cos + half + column, mask=within, other=0.0).to(ACC)[None, :]
    sin_one = tl.load(sin + column, mask=within, other=0.0).to(ACC)[None, :]
    sin_other = tl.load(sin + half + column, mask=within, other=0.0).to(ACC)[None, :]
    if INVERSE:
        first, second = one * cos_one + other * sin_other, other * cos_other - one * sin_one
    else:
        first, second = one * cos_one - other * sin_one, other * cos_other + one * sin_other
    target = out + token * out_t + head[:, None] * out_h + column[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    q, k, q_out, k_out, cos, sin, q_heads, k_heads, half,
    q_b, q_h, q_t, k_b, k_h, k_t, q_out_b, q_out_h, q_out_t, k_out_b, k_out_h, k_out_t, cos_b, cos_t, sin_b, sin_t,
    INVERSE: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cos += row * cos_b + token * cos_t
    sin += row * sin_b + token * sin_t
    _rotated(q + row * q_b, q_out + row * q_out_b, cos, sin, token, q_heads, half, q_h, q_t, q_out_h, q_out_t,
             INVERSE, Q_HEADS, HALF, ACC)  # fmt: skip
    _rotated(k + row * k_b, k_out + row * k_out_b, cos, sin, token, k_heads, half, k_h, k_t, k_out_h, k_out_t,
             INVERSE, K_HEADS, HALF, ACC)  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, size = q.shape
    q_out, k_out = tokens_first(q), tokens_first(k)
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    if batch * tokens:
        _rotate[(tokens, batch)](
            q, k, q_out, k_out, cos, sin, heads, k.shape[1], size // 2,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *cos.stride()[:2],
            *sin.stride()[:2],
            INVERSE=inverse, Q_HEADS=triton.next_power_of_2(heads), K_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=triton.next_power_of_2(size // 2), ACC=_acc(q),
        )  # fmt: skip
    return q_out, k_out


# ---- the gate of an MLP ----


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """Return an activation and its derivative."""
    if KIND == SILU_KIND:
        share = 1.0 / (1.0 + tl.exp(-x))
        value, slope = x * share, share * (1.0 + x * (1.0 - share))
    elif KIND == TANH_KIND:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        bent = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        value = 0.5 * x * (1.0 + bent)
        rise = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + bent) + 0.5 * x * (1.0 - bent * bent) * rise
    elif KIND == GELU_KIND:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value, slope = x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        rest = tl.maximum(x, 0.0)
        value, slope = rest * rest, 2.0 * rest
    return value, slope


@triton.jit
def _gate(gate, up, out, size, gate_r, up_r, KIND: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    value, _slope = _activated(tl.load(gate + row * gate_r + column, mask=inside, other=0.0).to(ACC), KIND)
    value *= tl.load(up + row * up_r + column, mask=inside, other=0.0).to(ACC)
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(
    dout, gate, up, dgate, dup, size, gate_r, up_r, KIND: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    place = row * size + column
    value, slope = _activated(tl.load(gate + row * gate_r + column, mask=inside, other=0.0).to(ACC), KIND)
    given = tl.load(dout + place, mask=inside, other=0.0).to(ACC)
    above = tl.load(up + row * up_r + column, mask=inside, other=0.0).to(ACC)
    tl.store(dgate + place, (given * above * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + place, (given * value).to(dup.dtype.element_ty), mask=inside)


def gate(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    if rows:
        _gate[(rows, triton.cdiv(size, COLUMNS))](
            gate, up, out, size, gate.stride(0), up.stride(0), KIND=KINDS.index(kind), COLUMNS=COLUMNS, ACC=_acc(gate)
        )
    return out


def gate_backward(dout: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows, size = gate.shape
    dgate, dup = gate.new_empty(rows, size), up.new_empty(rows, size)
    if rows:
        _gate_backward[(rows, triton.cdiv(size, COLUMNS))](
            dout, gate, up, dgate, dup, size, gate.stride(0), up.stride(0),
            KIND=KINDS.index(kind), COLUMNS=COLUMNS, ACC=_acc(gate),
        )  # fmt: skip
    return dgate, dup


# ---- the head: what is read of logits ----


@triton.jit
def _read_logits(
    logits, targets, chosen, norm, mean, entropy, likelihood, hit, size, WARMTH: tl.constexpr,
    ENTROPY: tl.constexpr, LIKELIHOOD: tl.constexpr, HIT: tl.constexpr, LOGITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    highest = tl.full((), float("-inf"), ACC)
    total = tl.zeros((), ACC)  # of exponentials, relative to the highest logit so far
    weighted, squared, plain = tl.zeros((), ACC), tl.zeros((), ACC), tl.zeros((), ACC)
    best = tl.zeros((), tl.int64)
    for start in range(0, size, LOGITS):
        column = start + tl.arange(0, LOGITS)
        inside = column < size
        value = tl.load(logits + column, mask=inside, other=float("-inf")).to(ACC) * WARMTH
        here = tl.max(value, axis=0)
        if HIT:
            best = tl.where(here > highest, start + tl.argmax(value, axis=0).to(tl.int64), best)
        higher = tl.maximum(highest, here)
        centre = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(highest - centre)
        part = tl.exp(value - centre)
        total = total * shrink + tl.sum(part, axis=0)
        plain += tl.sum(tl.where(inside, value, 0.0), axis=0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(part * tl.where(inside, value, 0.0), axis=0)
        if LIKELIHOOD:
            squared = squared * shrink * shrink + tl.sum(part * part, axis=0)
        highest = higher
    target = tl.load(targets + row)
    joint = highest + tl.log(total)
    tl.store(chosen + row, tl.load(logits + target).to(ACC) * WARMTH)
    tl.store(norm + row, joint)
    tl.store(mean + row, plain / size)
    if ENTROPY:
        tl.store(entropy + row, joint - weighted / total)
    if LIKELIHOOD:
        tl.store(likelihood + row, tl.log(squared) - 2.0 * tl.log(total))
    if HIT:
        tl.store(hit + row, (best == target).to(ACC))


@triton.jit
def _logits_backward(
    logits, targets, norm, dlogps, entropy, dentropy, size, WARMTH: tl.constexpr,
    ENTROPY: tl.constexpr, LOGITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * LOGITS + tl.arange(0, LOGITS)
    inside = place < size
    address = logits + row * size + place
    value = tl.load(address, mask=inside, other=float("-inf")).to(ACC) * WARMTH
    joint, given = tl.load(norm + row), tl.load(dlogps + row).to(ACC)
    probability = tl.exp(value - joint)
    grad = tl.where(place == tl.load(targets + row), given, 0.0) - probability * given
    if ENTROPY:
        centre = joint - tl.load(entropy + row)
        apart = tl.where(inside, value - centre, 0.0)
        grad -= probability * apart * tl.load(dentropy + row).to(ACC)
    tl.store(address, (grad * WARMTH).to(logits.dtype.element_ty), mask=inside)


def read_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool, likelihood: bool, hit: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, size = logits.shape
    to = wide(logits.dtype)
    asked = (True, True, True, entropy, likelihood, hit)
    results: Any = tuple(logits.new_empty(rows if each else 0, dtype=to) for each in asked)
    if rows:
        _read_logits[(rows,)](
            logits, targets, *results, size, WARMTH=1.0 / temperature,
            ENTROPY=entropy, LIKELIHOOD=likelihood, HIT=hit, LOGITS=LOGITS, ACC=_acc(logits), num_warps=8,
        )  # fmt: skip
    return results


def logits_backward(
    logits: Tensor, targets: Tensor, norm: Tensor, dlogps: Tensor, entropy: Tensor | None, dentropy: Tensor | None,
    temperature: float,
) -> None:  # fmt: skip
    rows, size = logits.shape
    joins = entropy is not None and dentropy is not None
    if rows:
        _logits_backward[(rows, triton.cdiv(size, LOGITS))](
            logits, targets, norm, dlogps, entropy if joins else norm, dentropy if joins else norm, size,
            WARMTH=1.0 / temperature, ENTROPY=joins, LOGITS=LOGITS, ACC=_acc(logits), num_warps=8,
        )  # fmt: skip
