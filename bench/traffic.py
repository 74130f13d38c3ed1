"""Count what the ranks of a ring send and hold for a layer of an 8B model: the tables of docs/measured/layouts.md.

    python -m bench.traffic                         print them
    python -m bench.traffic --write docs/measured/layouts.md

Each rank's own code attends on tensors without memory, in bfloat16, and every message and every tensor is counted. In
what is sent, a unit is the keys and values of one rank. `before` is a ring in which all keys and values go all the way
round, and their gradients with them in float32, as rlexp's did before and ring-flash-attn's does.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.tables import put, signature
from rlexp.preflight.children import Calls, at_once
from rlexp.training.ring.collectives import Posted
from rlexp.training.ring.plan import RingPlan
from rlexp.training.ring.transports.heads import HeadsPlan
from rlexp.training.ring.transports.travel import Travel
from rlexp.training.types import Segment
from rlexp.training.world.groups import Ring

RING, NODE = 8, 4  # ranks, and ranks of a node
HEADS, KV_HEADS, SIZE = 32, 8, 128
TOKENS = 131072
WINDOW = 1024
PROMPT, ANSWER = 1_000_000, 1024  # of a pair
TRANSPORTS = "rlexp.training.ring.transports."


@dataclass(frozen=True)
class Case:
    layout: str
    transport: str = "direct"
    inner: int = 1
    tokens: int = TOKENS
    window: int | None = None
    kernel: str = "torch_flash"  # its gradients are bfloat16; those of `plain` are float32
    sequences: int = 1  # of equal length
    shared: bool = False  # two sequences are one prompt with two answers

    @property
    def name(self) -> str:
        words = f"hybrid {self.inner} × zigzag" if self.layout == "hybrid" else self.layout
        travels = f" {self.transport}" if self.layout in ("zigzag", "contiguous", "hybrid") else ""
        return f"`{words}`{travels}{', gradients in float32' if self.kernel == 'plain' else ''}"

    @property
    def segments(self) -> tuple[Segment, ...]:
        length = self.tokens // self.sequences
        if self.shared:
            answers = (Segment(PROMPT + place * ANSWER, ANSWER, ANSWER, 0) for place in range(2))
            return (Segment(0, PROMPT, PROMPT), *answers)
        return tuple(Segment(start, length, length) for start in range(0, self.tokens, length))

    @property
    def unit(self) -> int:
        """Return the bytes of one rank's keys and values."""
        return 2 * self.tokens // RING * KV_HEADS * SIZE * 2

    @property
    def queries(self) -> int:
        """Return the bytes of one rank's queries."""
        return self.tokens // RING * HEADS * SIZE * 2


CASES = (
    Case("zigzag"),
    Case("zigzag", kernel="plain"),
    Case("zigzag", "neighbour"),
    Case("contiguous"),
    Case("contiguous", "neighbour"),
    Case("allgather"),
    Case("ulysses"),
    Case("hybrid", "direct", 4),
    Case("hybrid", "neighbour", 4),
    Case("hybrid", "neighbour", 2),
)
PAIR = tuple(replace(case, tokens=PROMPT + 2 * ANSWER, shared=True) for case in CASES if case.kernel == "torch_flash")
COPIED = tuple(replace(case, tokens=2 * (PROMPT + ANSWER), sequences=2, shared=False) for case in PAIR)
WINDOWED = tuple(Case("zigzag", tokens=tokens, window=WINDOW) for tokens in (TOKENS // 8, TOKENS))


@dataclass(frozen=True)
class OfRank:
    """What a rank sends to each other, and the most that it holds at a time beside queries, keys and values that the
    layer is given: bytes of the forward and of the backward pass."""

    sent: tuple[list[int], list[int]]
    held: tuple[int, int]
    calls: int  # of the kernel, in the forward pass
    copied: float  # rows of keys that are selected by index for them, over the rows that the rank holds
    wide: bool  # whether gradients of keys are sent in float32


@dataclass(frozen=True)
class Sent:
    """Bytes from each rank to each other, (rank, rank), in both passes."""

    forward: Tensor
    backward: Tensor

    @classmethod
    def of(cls, ranks: Sequence[OfRank]) -> Sent:
        return cls(*(torch.tensor([rank.sent[number] for rank in ranks]) for number in range(2)))

    @property
    def both(self) -> Tensor:
        return self.forward + self.backward

    def across(self) -> tuple[float, float]:
        """Return what goes from the first node to the second, and back."""
        both = self.both
        return float(both[:NODE, NODE:].sum()), float(both[NODE:, :NODE].sum())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    options = parser.parse_args()
    packs = [replace(case, sequences=2) for case in CASES if case.kernel == "torch_flash"]
    every = [*CASES, *WINDOWED, *packs, *PAIR, *COPIED]
    ranks = dict(zip(every, counted(every), strict=True))
    for name, text in (("traffic", of_messages(ranks)), ("held", of_memory(ranks)), ("pair", of_pair(ranks))):
        print(text)
        if options.write:
            put(options.write, text, name)


def of_messages(ranks: Mapping[Case, Sequence[OfRank]]) -> str:
    before = 3 * RING + RING - 2  # forward, again in the backward pass, and gradients of twice the bytes all the way
    lines = ["| layout | forward | both passes | busiest rank | across nodes, there and back |",
             "| --- | ---: | ---: | ---: | ---: |",
             f"| before | {RING - 1:.2f} | {before:.2f} | {before:.2f} | {before} and {before} |"]  # fmt: skip
    for case in CASES:
        sent = Sent.of(ranks[case])
        there, back = (bytes_ / case.unit for bytes_ in sent.across())
        busiest = float(sent.both.sum(1).max()) / case.unit
        means = [float(each.sum()) / RING / case.unit for each in (sent.forward, sent.both)]
        lines.append(f"| {case.name} | {means[0]:.2f} | {means[1]:.2f} | {busiest:.2f} | {there:.0f} and {back:.0f} |")
    halos = [f"{float(Sent.of(ranks[case]).both.sum()) / 1e6:.0f} MB with {case.tokens:,} tokens" for case in WINDOWED]
    return (
        f"Units that a rank sends on average, for a layer with {HEADS} query and {KV_HEADS} key/value heads of {SIZE}, "
        f"in bfloat16, on a\nring of {RING}; across nodes: of all ranks together, on two nodes of {NODE}. A unit is "
        f"the keys and values of one rank:\n{CASES[0].unit / 1e6:.0f} MB with {TOKENS:,} tokens. `before` is a ring in "
        f"which all keys and values go all the way round, and\ntheir gradients with them in float32, as in "
        f"ring-flash-attn.\n{signature('bench.traffic')}\n\n" + "\n".join(lines) + f"\n\nA layer with a window of "
        f"{WINDOW:,} sends in `zigzag`, in both passes, all ranks together,\n{' and '.join(halos)}."
    )


def of_memory(ranks: Mapping[Case, Sequence[OfRank]]) -> str:
    lines = [
        "| layout | forward | backward | two sequences: forward | backward |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for case in (each for each in CASES if each.kernel == "torch_flash"):  # others hold more of their own
        packs = (ranks[case], ranks[replace(case, sequences=2)])
        most = [max(rank.held[number] for rank in each) / case.queries for each in packs for number in range(2)]
        lines.append(f"| {case.name} | {' | '.join(f'{each:.1f}' for each in most)} |")
    return (
        f"The most that a rank holds at a time beside the layer's own queries, keys and values, on the rank that holds "
        f"most. A unit\nis one rank's queries: {CASES[0].queries / 1e6:.0f} MB with {TOKENS:,} tokens.\n"
        f"{signature('bench.traffic')}\n\n" + "\n".join(lines)
    )


def of_pair(ranks: Mapping[Case, Sequence[OfRank]]) -> str:
    lines = [
        "| layout | calls of a rank | keys copied for them | gradients of keys travel in | sent, to two copies |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for case, copies in zip(PAIR, COPIED, strict=True):
        found = ranks[case]
        sent, of_copies = (float(Sent.of(ranks[each]).both.sum()) for each in (case, copies))
        dtype = "float32" if any(rank.wide for rank in found) else "bfloat16"
        calls, keys = max(rank.calls for rank in found), max(rank.copied for rank in found)
        lines.append(f"| {case.name} | {calls} | {keys:.2f} | {dtype} | {sent / of_copies:.2f} |")
    return (
        f"A pair with a prompt of {PROMPT:,} tokens and two answers of {ANSWER:,}, on a ring of {RING}: calls of the "
        f"kernel in a\nforward pass, on the rank that makes most; rows of keys that are selected by index for them, "
        f"over those that a rank\nholds; and the bytes that are sent, over those of two sequences with a prompt each.\n"
        f"{signature('bench.traffic')}\n\n" + "\n".join(lines)
    )


def counted(cases: Sequence[Case]) -> list[list[OfRank]]:
    """Rehearse every rank of every case, each in a process of its own."""

    def calls() -> Calls:
        return (yield [(by_rank, (case, rank)) for case in cases for rank in range(RING)])

    (answers,) = at_once([calls()], len(os.sched_getaffinity(0)))
    return [answers[first : first + RING] for first in range(0, len(answers), RING)]


def by_rank(case: Case, rank: int) -> OfRank:
    from rlexp.preflight.rehearsal.device import NAME, joined, rehearsed_device
    from rlexp.preflight.rehearsal.log import Log
    from rlexp.preflight.rehearsal.mode import Rehearsing
    from rlexp.training.ring.kernels import get_kernel
    from rlexp.training.ring.kernels.base import Ask
    from rlexp.training.ring.layouts import get_layout
    from rlexp.training.world.groups import build_world

    device, sent = rehearsed_device(), [0] * RING
    with joined(rank, RING), (mode := Rehearsing(Log(device.type))), ExitStack() as stack:
        for each in watching(sent):
            stack.enter_context(each)
        ring = build_world(RING, case.inner).ring
        layout = get_layout(case.layout, case.inner, case.transport)
        plan = layout.plan(case.segments, ring, get_kernel(case.kernel, "cuda", torch.bfloat16), case.window)
        around = plan.around if isinstance(plan, HeadsPlan) else plan
        assert isinstance(around, RingPlan)
        facts = (sum(map(len, around.steps)), copied(around), wide(around))
        plan = plan.to(device)
        q, k, v = (
            torch.empty(case.tokens // RING, heads, SIZE, device=device, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        held, peaks = mode.held(NAME), []
        given = held.live

        def passed(work: Callable[[], Any]) -> Any:
            mode.reset_peaks()
            result = work()
            peaks.append(held.peak - given)
            return result

        out = passed(lambda: plan.attend(q, k, v, Ask(1.0, case.window)))
        forward, gradient = list(sent), torch.empty_like(out)
        passed(lambda: out.backward(gradient))
    backward = [both - before for both, before in zip(sent, forward, strict=True)]
    return OfRank((forward, backward), (peaks[0], peaks[1]), *facts)


def copied(plan: RingPlan) -> float:
    """Return the rows of keys that are selected by index for a rank's calls, over those that it holds."""
    selected = [call.keys for step in plan.steps for call in step]
    selected += plan.transport.orders if isinstance(plan.transport, Travel) else []
    held = sum(order.count for order, first in plan.orders.items() if first)
    return sum(each.count for each in selected if isinstance(each.index, Tensor)) / held


def wide(plan: RingPlan) -> bool:
    """Say whether gradients of keys are sent as sums."""
    return not isinstance(plan.transport, Travel) or any(not leg.once for leg in plan.transport.legs)


def watching(sent: list[int]) -> Iterator[mock._patch[object]]:
    """Count every message on its way to a rank."""
    from rlexp.training.ring import collectives

    def between(ring: Ring, going: Posted, coming: Posted) -> collectives.Underway:
        for to, x in going:
            sent[ring.ranks[to]] += x.nbytes
        return collectives.between(ring, going, coming)

    def to_all(name: str, share: int) -> mock._patch[object]:
        send = getattr(collectives, name)

        def counting(buffer: Tensor, ring: Ring) -> object:
            for place, rank in enumerate(ring.ranks):
                sent[rank] += buffer.nbytes // (ring.size if share else 1) if place != ring.rank else 0
            return send(buffer, ring)

        return mock.patch(f"{TRANSPORTS}{'heads' if name == 'exchange' else 'gather'}.{name}", counting)

    yield mock.patch(f"{TRANSPORTS}travel.between", between)
    yield to_all("gather", 0)
    yield to_all("sum_and_scatter", 1)
    yield to_all("exchange", 1)


if __name__ == "__main__":
    main()
