"""Stand-ins for what needs numbers, other ranks or a GPU's kernels while samples are drawn and shared out."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rlexp.preflight.rehearsal.device import NAME, replaced
from rlexp.preflight.rehearsal.log import Log
from rlexp.preflight.rehearsal.mode import calling_line

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
HOPPER = 9  # from this generation on, torch prefers cuDNN's attention, which takes masks and grouped heads


def uncounted_objects() -> contextlib.AbstractContextManager[None]:
    """Leave Python objects that ranks tell each other out of the count: they are pickled on the host.

    In a rehearsal every rank is told what this rank says.
    """
    gather = dist.all_gather_object

    def gathered(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            gather(*args, **kwargs)

    return replaced(dist, all_gather_object=gathered)


def answering(log: Log) -> contextlib.AbstractContextManager[None]:
    """Answer a program that takes a tensor's numbers to the host, as the mode does for a single one: with 1, true or 0.

    The host waits for the device once.
    """

    def numbers(tensor: FakeTensor, **_: Any) -> np.ndarray:
        if tensor.device.type == NAME:
            log.counts.syncs[f"{calling_line()}: numbers of the device"] += 1
        kind = str(tensor.dtype).rpartition(".")[2]
        ones = tensor.dtype.is_floating_point or tensor.dtype is torch.bool
        return np.full(tuple(tensor.shape), ones, dtype="float32" if kind == "bfloat16" else kind)

    return replaced(FakeTensor, numpy=numbers, tolist=lambda tensor: numbers(tensor).tolist())


def fused_attention(log: Log, generation: int) -> contextlib.AbstractContextManager[None]:
    """Let torch's own attention take what its kernels take on a GPU, where torch would choose one that fuses.

    As `select_sdp_backend` of torch 2.13 chooses (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Its fused
    kernels make the output and a float32 number for each query; a mask of booleans is made one of numbers first. Where
    none fits, torch multiplies matrices, in a rehearsal too.
    """
    plain = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, scale: float, enable_gqa: bool
    ) -> Tensor:
        if query.device.type != NAME or not fuses(query.dtype, attn_mask is not None, enable_gqa, generation):
            return plain(query, key, value, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)
        bias = None if attn_mask is None else torch.where(attn_mask, 0.0, query.new_full((), -torch.inf))
        log.attended(4 * query.numel() * key.shape[2])
        # The operator for CPUs has the results that all of them have, and no numbers to compute here.
        out: Tensor
        out, *_ = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)
        return out

    return replaced(nn.functional, scaled_dot_product_attention=attention)


def fuses(dtype: torch.dtype, masked: bool, grouped: bool, generation: int) -> bool:
    """Say whether torch has a fused kernel on a GPU of this generation."""
    cudnn = dtype in HALF and generation >= HOPPER
    flash = dtype in HALF and not masked
    efficient = dtype is not torch.float64 and not grouped
    return cudnn or flash or efficient
