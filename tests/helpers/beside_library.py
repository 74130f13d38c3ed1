"""Attention of the library ring-flash-attn beside our own layouts of the same names, on ranks that have joined a world.

Both attend to the same packs. What each rank computes is gathered over its ring and put together, and compared with
attention in float64 by one process. So it shows whether the library and flash-attn compute what we do, on CPU ranks
over a mock of flash-attn (`mock_flash`), and on GPUs over the package.

Shape letters: T tokens of the pack, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlexp.training.dealer.packing import pack_sequences
from rlexp.training.ring.kernels import Plain, get_kernel
from rlexp.training.ring.kernels.base import Ask, BlockKernel
from rlexp.training.ring.layouts import Layout, get_layout
from rlexp.training.ring.layouts.ring_flash_attn import library_layout
from rlexp.training.types import Segment
from rlexp.training.world.groups import ALONE, Ring, build_world
from rlexp.training.world.objects import gather_objects
from tests.helpers.ranks import seeded

LAYOUTS = ("zigzag", "allgather")
PARTS = ("out", "dq", "dk", "dv")
HEADS = 8
LENGTHS = (257, 1, 600, 3)
# Rounding to bf16 is 2⁻⁹ of a number at most. Results of both are rounded, and so are probabilities inside the kernels,
# and what the library's allgather sums: as far as kernels may lie from float64 (tests/bench/test_gpu.py).
APART = 2**-6
# Errors of the library relative to ours, measured up to 1.43: it rounds more often, as what blocks give it is added up.
LESS_EXACT = 1.6


@dataclass(frozen=True)
class Gap:
    """How far the library and our layout lie apart in one case, and each from float64, by part of both passes."""

    layout: str
    kv_heads: int
    apart: tuple[float, ...]  # the largest difference between the two, relative to the largest element in float64
    theirs: tuple[float, ...]  # root mean squared error, relative to the root mean square in float64
    ours: tuple[float, ...]

    @property
    def wrong(self) -> list[str]:
        """Say which parts lie further apart than bf16's rounding explains."""
        rows = zip(PARTS, self.apart, self.theirs, self.ours, strict=True)
        return [
            f"{self.layout}, {self.kv_heads} key/value heads, {part}: {apart:.2g} apart, with errors of {theirs:.2g} "
            f"and, in our own layout, {ours:.2g}"
            for part, apart, theirs, ours in rows
            if not (apart <= APART and theirs <= LESS_EXACT * ours)
        ]


def gaps(
    ring_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kernel: str = "auto",
    lengths: Sequence[int] = LENGTHS,
    size: int = 64,
    several: Sequence[int] = (HEADS, 2),
) -> list[Gap]:
    """Attend in both ways, on a ring of this size. All ranks of the world call it, and get the gaps of their own ring.

    `kernel` computes our layouts; the library has flash-attn's. `several` are numbers of key/value heads.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    ring = build_world(ring_size).ring if world > 1 else ALONE
    ours = get_kernel(kernel, device.type, dtype, size)
    found = []
    for name in LAYOUTS:
        for kv_heads in several:
            drawn = [
                [seeded(length, heads, size, seed=100 * number + part).to(dtype)
                 for part, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS))]
                for number, length in enumerate(lengths)
            ]  # fmt: skip
            exact = attended(
                get_layout("zigzag"), ALONE, Plain(), [[x.double() for x in each] for each in drawn], device
            )
            own, library = (
                attended(layout, ring, ours, drawn, device) for layout in (get_layout(name), library_layout(name))
            )
            found.append(_gap(name, kv_heads, own, library, exact))
    return found


def attended(
    layout: Layout, ring: Ring, kernel: BlockKernel, drawn: Sequence[Sequence[Tensor]], device: torch.device
) -> list[Tensor]:
    """Return out, dq, dk and dv of the sequences' tokens, end to end, on the CPU. A collective call of the ring."""
    segments = _segments([len(q) for q, *_ in drawn], layout, ring.size)
    total = sum(segment.padded for segment in segments)
    places = layout.place(segments, ring.size).places[ring.rank]
    mine = []
    for part in range(4):
        first = drawn[0][part]
        # Padding looks like any token. No loss uses its output, which so has no gradient.
        whole = seeded(total, *first.shape[1:], seed=9 + part).to(first.dtype) * (part < 3)
        for segment, tensors in zip(segments, drawn, strict=True):
            whole[segment.start : segment.start + segment.length] = tensors[part]
        mine.append(whole[places].to(device))
    q, k, v, dout = mine
    for tensor in (q, k, v):
        tensor.requires_grad_()
    plan = layout.plan(segments, ring, kernel).to(device)
    out = plan.attend(q, k, v, Ask(q.shape[-1] ** -0.5))
    held = [places, *(x.detach().cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), dout)))]
    return _put_together(gather_objects(held, ring.size, ring.group), segments)


def _segments(lengths: Sequence[int], layout: Layout, ring_size: int) -> tuple[Segment, ...]:
    tokens = [torch.zeros(length, dtype=torch.int32).numpy() for length in lengths]
    sequences = [(each[:0], each) for each in tokens]
    return pack_sequences(sequences, layout.multiple(ring_size), unit=layout.unit(ring_size)).segments


def _put_together(held: Sequence[Sequence[Tensor]], segments: Sequence[Segment]) -> list[Tensor]:
    places = torch.cat([each[0] for each in held])
    order = places.argsort()
    assert torch.equal(places[order], torch.arange(len(order))), "each place is held exactly once"
    real = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
    return [torch.cat([each[part] for each in held])[order][real].double() for part in range(1, 5)]


def _gap(name: str, kv_heads: int, own: list[Tensor], library: list[Tensor], exact: list[Tensor]) -> Gap:
    def errors(got: list[Tensor]) -> tuple[float, ...]:
        return tuple(float((a - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True))

    apart = [float((a - b).abs().max() / c.abs().max()) for a, b, c in zip(library, own, exact, strict=True)]
    return Gap(name, kv_heads, tuple(apart), errors(library), errors(own))
