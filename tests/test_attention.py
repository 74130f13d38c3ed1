"""Attention alone: forward and all gradients, on real ranks, against float64 full attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlexp.config.schema import KernelName, LayoutName
from rlexp.launch.place import Place
from rlexp.ring.attention import local_index, ring_attention, ring_batch
from rlexp.ring.groups import build_world
from rlexp.ring.kernels import get_kernel
from rlexp.ring.layouts import get_layout
from rlexp.types import Segment
from tests.ranks import on_ranks, seeded

LENGTHS = (1, 3, 37, 16, 101, 64)  # one token, shorter than the ring, prime, round
HEADS, SIZE = 8, 16
# Largest difference relative to the largest element of the pack. Measured over all cases here: 1.6e-15, 3.7e-7.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}


def forest(lengths: tuple[int, ...], multiple: int) -> tuple[Segment, ...]:
    segments, start = [], 0
    for length in lengths:
        padded = -(-length // multiple) * multiple
        segments.append(Segment(start, length, padded))
        start += padded
    return tuple(segments)


def inputs(lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """q, k, v and the gradient of the output for each segment, (length, heads, size)."""
    return [
        [seeded(length, heads, SIZE, seed=100 * number + part, dtype=dtype)
         for part, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS))]
        for number, length in enumerate(lengths)
    ]  # fmt: skip


def attend_rank(place: Place, lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype, kernel: str) -> list[Tensor]:
    """This rank's part of out, dq, dk, dv, with the places in the pack that it holds."""
    ring = build_world(place.world_size).ring
    layout = get_layout(LayoutName.zigzag)
    segments = forest(lengths, layout.multiple(ring.size))
    index = local_index(segments, ring.rank, ring.size, layout)
    total = sum(segment.padded for segment in segments)
    packed = []
    for part, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS)):
        # Padding looks like any token, and its output has a large gradient: none of it may matter.
        whole = seeded(total, heads, SIZE, seed=9 + len(packed), dtype=dtype) * (100 if len(packed) == 3 else 1)
        for segment, tensors in zip(segments, inputs(lengths, kv_heads, dtype), strict=True):
            whole[segment.start : segment.start + segment.length] = tensors[part]
        packed.append(whole[index])
    q, k, v, dout = packed
    for tensor in (q, k, v):
        tensor.requires_grad_()
    batch = ring_batch(segments, ring, layout, get_kernel(KernelName[kernel], "cpu"), max(lengths))
    out = ring_attention(q, k, v, batch, SIZE**-0.5)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [index, out.detach(), *grads]


def attend(world: int, lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype, kernel: str) -> list[list[Tensor]]:
    """out, dq, dk, dv of each segment, put together from all ranks."""
    multiple = get_layout(LayoutName.zigzag).multiple(world)
    segments = forest(lengths, multiple)
    total = sum(segment.padded for segment in segments)
    results = on_ranks(world, attend_rank, lengths, kv_heads, dtype, kernel)
    held = torch.cat([result[0] for result in results])
    assert torch.equal(held.sort().values, torch.arange(total)), "each place is held exactly once"
    wholes = []
    for part in range(1, 5):
        whole = torch.zeros(total, *results[0][part].shape[1:], dtype=dtype)
        for result in results:
            whole[result[0]] = result[part]
        wholes.append(whole)
    return [[whole[s.start : s.start + s.length] for whole in wholes] for s in segments]


def full(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Float64 attention with its whole score matrix, and its gradients."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def flash(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """One flash call over the whole sequence, in the dtype of its inputs."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    out = out.squeeze(0).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("kernel", ["cpu_flash", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_equals_full_attention(world: int, dtype: torch.dtype, kernel: str) -> None:
    for kv_heads in (HEADS, 2, 1):
        got = attend(world, LENGTHS, kv_heads, dtype, kernel)
        expected = [full(*tensors) for tensors in inputs(LENGTHS, kv_heads, dtype)]
        for part in range(4):
            # Relative to the pack: the queries of a segment of one token have no gradient at all.
            largest = max(tensors[part].abs().max() for tensors in expected)
            gaps = [(a[part].double() - b[part]).abs().max() for a, b in zip(got, expected, strict=True)]
            assert max(gaps) / largest < TOLERANCE[dtype]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_bf16_is_as_exact_as_one_flash_call(world: int, kv_heads: int) -> None:
    """Error against float64, of the whole pack; computing blocks in float32 measured 0.24 to 0.81 of flash's."""
    lengths = (257, 1, 600)
    got = attend(world, lengths, kv_heads, torch.bfloat16, "cpu_flash")
    ours, theirs = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for tensors, arguments in zip(got, inputs(lengths, kv_heads, torch.bfloat16), strict=True):
        expected = full(*arguments)
        ours += torch.stack([(a.double() - b).square().sum() for a, b in zip(tensors, expected, strict=True)])
        theirs += torch.stack(
            [(a.double() - b).square().sum() for a, b in zip(flash(*arguments), expected, strict=True)]
        )
    ratios = (ours / theirs).sqrt()
    assert (ratios <= 1.25).all(), ratios
    assert (theirs > 0).all()


@pytest.mark.parametrize("kernel", ["cpu_flash", "plain"])
def test_any_memory_layout_of_the_queries_is_read_right(kernel: str) -> None:
    """A model may hand over queries whose last dimension is not contiguous, and so may autograd their gradient."""
    block = get_kernel(KernelName[kernel], "cpu")
    q, k, v, dout = inputs((37,), 2, torch.float64)[0]

    def both(arrange) -> list[Tensor]:
        out, lse = block.forward(arrange(q), k, v, [37], [37], causal=True, scale=0.25)
        return [out, *block.backward(arrange(dout), arrange(q), k, v, out, lse, [37], [37], causal=True, scale=0.25)]

    permuted = both(lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    for one, other in zip(both(lambda x: x), permuted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-14)
