"""What one operator costs: whether it launches a kernel, its floating-point operations, bytes read, written and sent.

The counts are of torch's operators as the dispatcher shows them, on real tensors and in a rehearsal alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.training.ring.kernels import flash_attn_4

aten, c10d = torch.ops.aten, torch.ops.c10d

# They make a tensor or describe one, and leave its memory as it is.
_WITHOUT_KERNEL = {
    *("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::detach", "aten::_unsafe_view", "aten::lift_fresh", "aten::alias", "aten::set_", "aten::resize_"),
    *("aten::record_stream", "aten::_local_scalar_dense", "aten::is_pinned", "aten::_reshape_alias"),
}


@functools.cache
def launches(func: Any) -> bool:
    """Say whether the operator computes: it is no view, and it does not only make or name a tensor."""
    if func.namespace not in ("aten",):
        return func.namespace not in ("prim", "c10d")
    schema = func._schema
    if schema.name in _WITHOUT_KERNEL:
        return False
    returned = [each.alias_info for each in schema.returns]
    return not (returned and all(info is not None and not info.is_write for info in returned))


# Matrix products, by the place of the first factor among the arguments.
_PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::_scaled_mm", "aten::_grouped_mm"), 0),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_"), 1),
}


def flops(func: Any, args: Any) -> int:
    """Return the floating-point operations of a matrix product; those of other operators are not counted."""
    first = _PRODUCTS.get(func._schema.name)
    return 0 if first is None else 2 * args[first].numel() * args[first + 1].shape[-1]


def moved_bytes(args: Any, kwargs: Any, made: Any) -> int:
    """Return the bytes of all tensors that an operator reads and writes."""
    seen = {id(tensor): tensor for tensor in (*tensors(args), *tensors(kwargs.values()), *tensors((made,)))}
    return sum(tensor.nbytes for tensor in seen.values())


def group_of(args: Any) -> dist.ProcessGroup:
    """Return the group of a collective."""
    return next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))


def called(func: Any, args: Any) -> tuple[str, int | None] | None:
    """Return what is called over a group, and the rank of the group from which a message comes; None if nothing is."""
    if func.namespace != "c10d":
        return None
    if func._schema.name == "c10d::recv_":
        return "recv", int(args[2])
    if (sending := sent(func, args)) is not None:
        return sending[0], None
    return ("barrier", None) if func._schema.name == "c10d::barrier" else None


# By operator: the collective, the place of the tensors that count, how often a rank sends as much as each other one has
# of them, and whether that is a share.
_SENT = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all_reduce", 0, 2, True)),
    **dict.fromkeys(("allgather", "allgather_base", "allgather_into_tensor_coalesced"), ("all_gather", 1, 1, False)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
                    ("reduce_scatter", 1, 1, True)),
    **dict.fromkeys(("alltoall_base", "alltoall"), ("all_to_all", 1, 1, True)),
    "broadcast": ("broadcast", 0, 1, True),
}  # fmt: skip


def sent(func: Any, args: Any) -> tuple[str, int] | None:
    """Return a collective's name and the bytes that this rank sends, by the usual algorithms; None for others."""
    name = func._schema.name.partition("::")[2].strip("_")
    if func.namespace == "c10d" and name == "send":
        return name, _bytes(args[0])
    if func.namespace != "c10d" or name not in _SENT:
        return None
    collective, place, times, shares = _SENT[name]
    ranks = group_of(args).size()
    size = times * _bytes(args[place]) * (ranks - 1)
    return collective, size // ranks if shares else size


def received(func: Any, args: Any) -> list[Tensor]:
    """Return the tensors into which a collective receives what other ranks sent, if it has such tensors."""
    name = func._schema.name.partition("::")[2]
    of_others = ("recv_", "allgather_", "_allgather_base_", "alltoall_base_", "alltoall_", "_reduce_scatter_base_")
    return list(tensors((args[0],))) if name in of_others else []


def _bytes(values: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors((values,)))


def tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def workspace(func: Any, args: Any) -> int:
    """Return the bytes that an operator takes for itself while it runs, where they are as large as its arguments.

    flash-attn 2's backward pass adds dq up in float32, and expands dk and dv to the heads of the queries
    (mha_varlen_bwd in torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp). A log-sum-exp takes the
    exponentials of all its numbers; on a CPU it does too, but what is counted there are tensors. Gloo, which sends
    between CPUs, adds up in a copy of what it reduces and scatters.
    """
    if func is aten.logsumexp.default:
        taken: int = 0 if args[0].device.type == "cpu" else args[0].nbytes
        return taken
    if func is torch.ops.c10d._reduce_scatter_base_.default:
        size: int = args[1].nbytes if args[1].device.type == "cpu" else 0
        return size
    if func is torch.ops.rlexp.flash_attn_4_backward.default:
        return flash_attn_4.workspace(*args)
    if func is aten._flash_attention_backward.default:
        _, q, k = args[:3]
        (tokens, heads, size), keys = q.shape, k.shape[0]
        padded = tokens + 128 * (args[6].shape[0] - 1)
        expanded = 2 * keys * heads * size * k.element_size() if k.shape[1] != heads else 0
        return padded * heads * (size + 1) * 4 + expanded
    return 0
