"""The library ring-flash-attn in place of our own rings: its zigzag, and its llama3 functions as `allgather`.

In both flash-attn attends, in bfloat16 alone. They hold and compute something else than our layouts of the same names:

    zigzag     every segment is cut into 2 × ring equal chunks, so each is padded to a multiple of that. flash-attn
               does not know of the padding and computes it, without effect: no real token sees it
    allgather  the pack, with its padding at the end, is cut into as many equal pieces as the ring has ranks. So the
               rank with the end of a long sequence computes the most. The gradients of keys and values are summed over
               the ring in bfloat16; ours are summed in float32

The library's package imports an adapter for transformers, which asks for `is_flash_attn_greater_or_equal_2_10`. This
name is gone in transformers 5, so `import ring_flash_attn` fails up to 0.1.8, the newest version
(github.com/zhuzilin/ring-flash-attention/pull/88). The functions do not need the adapter. So the package is made here
without running its `__init__`, and its modules are imported from it unchanged. When a version without this fault is
out, require it in pyproject.toml, and let `functions` import from the package.

Shape letters: t tokens of this rank, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlexp.training.ring.base import Layout, Window
from rlexp.training.ring.kernels.base import Ask, BlockKernel, readable
from rlexp.training.ring.placement import Placement
from rlexp.training.ring.selection import Ranges, count, in_turn, pieces
from rlexp.training.ring.slices import seen
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

PACKAGE = "ring_flash_attn"
SUMMED = 4  # bytes of an element of dk and dv on their way around the library's zigzag


@functools.cache
def functions() -> SimpleNamespace:
    """Import the functions that are used here, and flash-attn's own for a ring of one, which sends nothing.

    `rlexp/config/checks/backend.py` checks before a process starts that both packages are installed.
    """
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    zigzag = importlib.import_module(f"{PACKAGE}.zigzag_ring_flash_attn_varlen")
    llama3 = importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")
    flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    return SimpleNamespace(
        zigzag=zigzag.zigzag_ring_flash_attn_varlen_func,
        llama3=llama3.llama3_flash_attn_varlen_func,
        llama3_plan=llama3.llama3_flash_attn_prepare_cu_seqlens,
        alone=flash_attn.flash_attn_varlen_func,
    )


def library_layout(name: str) -> Layout:
    return {each.name: each for each in (LibraryZigzag(), LibraryAllGather())}[name]


@dataclass(frozen=True)
class LibraryPlan:
    """Attention by flash-attn, and the bytes that the library sends for it by itself."""

    ring: Ring
    queries: Tensor  # the bounds of our queries' sequences in flash-attn's form: int32, one more than there are
    keys: Tensor  # those of the keys that they meet
    longest: tuple[int, int]  # of the queries, and of the keys
    gathered: slice | None = None  # where our keys lie in the whole pack; None: they are not gathered

    def to(self, device: torch.device) -> LibraryPlan:
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))

    def attend(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, ask: Ask) -> Tensor:
        q, k, v = map(readable, (q_tHD, k_tGD, v_tGD))  # it writes gradients in their strides
        deterministic = torch.are_deterministic_algorithms_enabled()
        out = self.call(q, k, v, {"softmax_scale": ask.scale, "causal": True, "deterministic": deterministic})
        forth, back = self.sent(k, v)
        self._count(forth)
        if out.requires_grad:
            out.register_hook(lambda _: self._count(back))
        return out

    def call(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        bounds, group = (self.queries, self.keys, *self.longest), self.ring.group
        if self.ring.size == 1:  # the library would send to itself, or take the whole world for the missing group
            return functions().alone(q, k, v, *bounds, **options)
        if self.gathered is None:
            return functions().zigzag(q, k, v, self.queries, self.longest[0], group=group, **options)
        return functions().llama3(
            q, k, v, *bounds, local_k_slice=self.gathered, group=group, **options,
            heads_k_stride=1,  # one key/value head at a time, like ours
        )  # fmt: skip

    def sent(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        """Return the bytes that this rank sends in the forward and in the backward pass."""
        forth = (self.ring.size - 1) * (k.nbytes + v.nbytes)
        if self.gathered is not None or self.ring.size == 1:
            return forth, 2 * forth  # gathered again, and their gradients in the same dtype
        return forth, forth + self.ring.size * SUMMED * (k.numel() + v.numel())

    def _count(self, sent: int) -> None:
        with self.ring.traffic.waiting(self.ring.traffic.send(sent)):
            pass  # the library has waited


class LibraryZigzag(Layout):
    """The library's zigzag. On a ring of one there is nothing to cut, and it is `LibraryAllGather`."""

    name = "zigzag"

    def multiple(self, ring_size: int) -> int:
        return self.unit(ring_size)

    def unit(self, ring_size: int) -> int:
        return 2 * ring_size if ring_size > 1 else 1

    def place(self, segments: Sequence[Segment], ring_size: int) -> Placement:
        if ring_size == 1:
            return LibraryAllGather().place(segments, 1)
        chunks = 2 * ring_size
        held = [
            [(s, range(s.start + s.padded // chunks * at, s.start + s.padded // chunks * (at + 1)))
             for s in segments for at in (rank, chunks - 1 - rank)]
            for rank in range(ring_size)
        ]  # fmt: skip
        real = (sum(max(0, min(run.stop, s.start + s.length) - run.start) for s, run in of_rank) for of_rank in held)
        return Placement(tuple(tuple(run for _, run in of_rank) for of_rank in held), tuple(real))

    def work(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> tuple[float, ...]:
        if ring_size == 1:
            return LibraryAllGather().work(segments, 1, window)
        return (sum(seen(range(segment.padded)) for segment in segments) / ring_size,) * ring_size

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, window: Window = None) -> LibraryPlan:
        assert window is None
        if ring.size == 1:
            return LibraryAllGather().plan(segments, ring, kernel)
        assert all(segment.padded % self.unit(ring.size) == 0 for segment in segments)
        return _plan_of([segment.padded // ring.size for segment in segments], ring)


class LibraryAllGather(Layout):
    name = "allgather"

    def place(self, segments: Sequence[Segment], ring_size: int) -> Placement:
        runs, real = _runs(segments), sum(segment.length for segment in segments)
        share = count(runs) // ring_size
        held = [min(max(real - rank * share, 0), share) for rank in range(ring_size)]
        return Placement(tuple(pieces(runs, share)), tuple(held))

    def work(self, segments: Sequence[Segment], ring_size: int, window: Window = None) -> tuple[float, ...]:
        seen_by = in_turn(range(1, len(run) + 1) for run in _runs(segments))
        return tuple(float(part.sum()) for part in seen_by.split(len(seen_by) // ring_size))

    def plan(self, segments: Sequence[Segment], ring: Ring, kernel: BlockKernel, window: Window = None) -> LibraryPlan:
        assert window is None
        whole = _plan_of([len(run) for run in _runs(segments)], ring)
        if ring.size == 1:
            return whole
        queries, keys, *longest, gathered = functions().llama3_plan(whole.keys, True, ring.rank, ring.size)
        return LibraryPlan(ring, queries, keys, (longest[0], longest[1]), gathered)


def _plan_of(lengths: Sequence[int], ring: Ring) -> LibraryPlan:
    """Return the plan of sequences whose queries meet their own keys."""
    bounds = torch.tensor([*accumulate(filter(None, lengths), initial=0)], dtype=torch.int32)
    return LibraryPlan(ring, bounds, bounds, (max(lengths), max(lengths)))


def _runs(segments: Sequence[Segment]) -> Ranges:
    """Return the pack in the order in which it is cut: all real tokens, then each segment's padding as a sequence."""
    real = [range(s.start, s.start + s.length) for s in segments]
    padding = [range(s.start + s.length, s.start + s.padded) for s in segments]
    return tuple(run for run in (*real, *padding) if run)
