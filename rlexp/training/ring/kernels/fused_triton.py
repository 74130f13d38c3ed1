"""The Triton kernels of `fused.py`. A program takes some rows: a row is one head of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlexp.training.ring.kernels.base import readable

ROWS = 16  # of a program: with heads of 128, 2,048 numbers


@triton.jit
def _merge(
    out, lse, block_out, block_lse, rows, heads, size,
    out_q, out_h, lse_q, lse_h, block_q, block_h, block_lse_q, block_lse_h,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    q, h = row // heads, row % heads
    known = tl.load(lse + q * lse_q + h * lse_h, mask=valid, other=0.0)
    added = tl.load(block_lse + q * block_lse_q + h * block_lse_h, mask=valid, other=0.0)
    empty = added == float("-inf")
    share = tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(known - added)))
    highest = tl.maximum(known, added)
    joint = highest + tl.log(tl.exp(known - highest) + tl.exp(added - highest))
    tl.store(lse + q * lse_q + h * lse_h, tl.where(empty, known, joint), mask=valid)
    column = tl.arange(0, SIZE)
    inside = valid[:, None] & (column < size)[None, :]
    place = out + (q * out_q + h * out_h)[:, None] + column[None, :]
    before = tl.load(place, mask=inside, other=0.0)
    block = tl.load(block_out + (q * block_q + h * block_h)[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(place, before + share[:, None] * (block.to(tl.float32) - before), mask=inside)


@triton.jit
def _add_keys(
    into_k, into_v, index, dk, dv, rows, heads, size_k, size_v,
    into_k_t, into_k_g, into_v_t, into_v_g, dk_t, dk_g, dv_t, dv_g,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    token, g = row // heads, row % heads
    target = tl.load(index + token, mask=valid, other=0) if INDEXED else token
    column = tl.arange(0, SIZE_K)
    inside = valid[:, None] & (column < size_k)[None, :]
    place = into_k + (target * into_k_t + g * into_k_g)[:, None] + column[None, :]
    k = tl.load(dk + (token * dk_t + g * dk_g)[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(place, tl.load(place, mask=inside, other=0.0) + k.to(tl.float32), mask=inside)
    column = tl.arange(0, SIZE_V)
    inside = valid[:, None] & (column < size_v)[None, :]
    place = into_v + (target * into_v_t + g * into_v_g)[:, None] + column[None, :]
    v = tl.load(dv + (token * dv_t + g * dv_g)[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(place, tl.load(place, mask=inside, other=0.0) + v.to(tl.float32), mask=inside)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    queries, heads, size = out.shape
    rows = queries * heads
    if rows == 0:
        return
    _merge[(triton.cdiv(rows, ROWS),)](
        out, lse, readable(block_out), block_lse, rows, heads, size,
        *out.stride()[:2], *lse.stride(), *readable(block_out).stride()[:2], *block_lse.stride(),
        ROWS=ROWS, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip


def add_keys(into_k: Tensor, into_v: Tensor, index: Tensor | None, dk: Tensor, dv: Tensor) -> None:
    keys, heads, size = dk.shape
    rows = keys * heads
    if rows == 0:
        return
    dk, dv = readable(dk), readable(dv)
    _add_keys[(triton.cdiv(rows, ROWS),)](
        into_k, into_v, index if index is not None else into_k, dk, dv, rows, heads, size, dv.shape[2],
        *into_k.stride()[:2], *into_v.stride()[:2], *dk.stride()[:2], *dv.stride()[:2],
        INDEXED=index is not None, ROWS=ROWS,
        SIZE_K=triton.next_power_of_2(size), SIZE_V=triton.next_power_of_2(dv.shape[2]),
    )  # fmt: skip
