"""What attention does between the calls of a kernel, in one kernel each on a GPU: merge a block, and add a gradient.

On a GPU they are Triton kernels, which come with torch for CUDA. They are operators of torch, so a rehearsal counts
them. Elsewhere, and in float64, they are written out in plain torch, to which the tests hold them.

Shape letters: q query tokens, k key tokens, t tokens of a shard, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import merge_plain
from rlexp.training.ring.kernels.own_operators import define
from rlexp.training.ring.selection import Rows


def merge_rows(out_qHD: Tensor, lse_qH: Tensor, block_out_qHD: Tensor, block_lse_qH: Tensor) -> None:
    """Add a block to the running output and log-sum-exp of the same queries, in place."""
    if fused(out_qHD):
        torch.ops.rlexp.merge(out_qHD, lse_qH, block_out_qHD, block_lse_qH)
    else:
        merge_plain(out_qHD, lse_qH, block_out_qHD, block_lse_qH)


def add_keys(
    into_k_tGD: Tensor, into_v_tGD: Tensor, rows: Rows, dk_kGD: Tensor, dv_kGD: Tensor, *, once: bool = True
) -> None:
    """Add a block's part of dk and dv to rows. If one may stand twice among them, say so: then torch adds them."""
    index = None if isinstance(rows, slice) else rows
    into = (into_k_tGD, into_v_tGD) if index is not None else (into_k_tGD[rows], into_v_tGD[rows])
    if once and fused(into_k_tGD):
        torch.ops.rlexp.add_keys(*into, index, dk_kGD, dv_kGD)
    else:
        _add_plain(*into, index, dk_kGD, dv_kGD)


def fused(accumulated: Tensor) -> bool:
    return accumulated.device.type != "cpu" and accumulated.dtype is torch.float32


def _add_plain(into_k: Tensor, into_v: Tensor, rows: Tensor | None, dk: Tensor, dv: Tensor) -> None:
    for into, grad in ((into_k, dk), (into_v, dv)):
        if rows is None:
            into.add_(grad)
        else:
            into.index_add_(0, rows, grad.to(into.dtype))


# ---- on a GPU ----


@functools.cache
def triton_kernels() -> Any:
    """Import the kernels on first use: Triton takes seconds, and a CPU build of torch has none."""
    from rlexp.training.ring.kernels import fused_triton

    return fused_triton


def _merge_shapes(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    assert out.shape == block_out.shape
    assert lse.shape == block_lse.shape == out.shape[:2]


def _add_shapes(into_k: Tensor, into_v: Tensor, rows: Tensor | None, dk: Tensor, dv: Tensor) -> None:
    for into, grad in ((into_k, dk), (into_v, dv)):
        assert into.shape[1:] == grad.shape[1:]
        assert len(grad) == (len(into) if rows is None else len(rows))


for _schema, _shapes in (
    ("merge(Tensor(a!) out, Tensor(b!) lse, Tensor block_out, Tensor block_lse) -> ()", _merge_shapes),
    ("add_keys(Tensor(a!) into_k, Tensor(b!) into_v, Tensor? rows, Tensor dk, Tensor dv) -> ()", _add_shapes),
):
    _name = _schema.partition("(")[0]
    define(_schema, _shapes, CUDA=lambda *tensors, name=_name: getattr(triton_kernels(), name)(*tensors))
