"""The ring's own collectives, and the counts of the tokens it holds and the bytes it sends."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch import watch
from rlexp.launch.joining import RankSpec
from rlexp.training.dealer.packing import pack_examples
from rlexp.training.ring.collectives import between, exchange, gather, ring_sum, sum_and_scatter
from rlexp.training.ring.layouts import get_layout
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.types import Pack
from rlexp.training.world.groups import ALONE, Ring, build_world
from tests.helpers.ranks import on_ranks


def sum_rank(spec: RankSpec) -> tuple[float, float, float, list[int]]:
    ring = build_world(2).ring
    mine = torch.tensor(10.0**spec.rank, dtype=torch.float64, requires_grad=True)
    total = ring_sum(mine, ring)
    (total * 3).backward()
    other, traveller = 1 - ring.rank, torch.tensor([float(spec.rank)])
    (came,) = between(ring, [(other, traveller)], [(other, torch.empty(1))]).wait()
    return float(total), float(mine.grad), float(came), list(ring.ranks)


def test_ring_sum_adds_up_and_its_backward_is_the_identity() -> None:
    results = on_ranks(4, sum_rank)
    assert [result[0] for result in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert [result[1] for result in results] == [3.0] * 4  # 6.0 would be a summing backward
    assert [result[2] for result in results] == [1.0, 0.0, 3.0, 2.0]
    assert [result[3] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def kept_rank(spec: RankSpec) -> tuple[bool, bool]:
    ring = build_world(2).ring
    other = 1 - ring.rank
    coming = between(ring, [(other, torch.ones(1000))], [(other, torch.empty(1000))])
    sent = weakref.ref(coming.sent[0])
    under_way = sent() is not None
    coming.wait()
    return under_way, sent() is not None


def test_what_is_sent_is_kept_while_it_is_under_way_and_no_longer() -> None:
    assert on_ranks(2, kept_rank) == [(True, False)] * 2


def across(buffer: torch.Tensor, ring: Ring) -> None:
    between(ring, [(1, buffer)], [])


@pytest.mark.parametrize("collective", [ring_sum, across, gather, sum_and_scatter, exchange])
def test_a_ring_without_a_group_sends_nothing(collective) -> None:
    """Without a group, torch would use the group of the whole world."""
    with pytest.raises(AssertionError, match="has no group"):
        collective(torch.zeros(2, 3), Ring(0, (0, 1)))


def counts_rank(spec: RankSpec, cfgs) -> list[tuple[dict[str, float], list[Pack]]]:
    """Take one step of each configuration; return its row, and the packs of its batch."""
    counts = []
    for cfg in cfgs:
        task = build(cfg, around=UNPROBED)
        multiple = task.run.layout.multiple(task.run.world.ring.size)
        packs = [pack_examples([task.examples.train[index]], multiple) for index in task.batch(1).indices]
        counts.append((train_step(task, 1), packs))
    return counts


def needed(pack: Pack, places: Sequence[Tensor]) -> Tensor:
    """Return (segment, rank, source): the tokens of the source that some token of the rank sees, one by one."""
    found = torch.zeros(len(pack.segments), len(places), len(places), dtype=torch.float64)
    for number, segment in enumerate(pack.segments):
        held = [p[(p >= segment.start) & (p < segment.start + segment.length)] for p in places]
        for rank, source in itertools.permutations(range(len(places)), 2):
            if len(held[rank]):
                found[number, rank, source] = (held[source] <= held[rank].max()).sum()
    return found


def sent(layout: str, transport: str, inner: int, cfg: Config, pack: Pack) -> Tensor:
    """Return how many heads' worth of elements each rank of the ring, or of an outer ring, sends in a layer.

    There are two forward passes, of policy and reference, and one backward pass, which sends keys again.
    """
    ring, heads, kv_heads = cfg.parallel.ring_size, cfg.model.heads, cfg.model.kv_heads
    outer = ring // inner
    around = get_layout(layout if layout == "contiguous" else "zigzag")
    rows = needed(pack, around.place(pack.segments, outer).places)
    if layout == "allgather":  # all ranks send as many rows as the one whose rows others need most
        most = rows.amax(1).sum(0).max()
        return (2 * kv_heads * (3 + 1) * (ring - 1) * most).expand(ring)
    copies, tokens = max(kv_heads, inner), len(pack.tokens_T) // ring
    exchanged = 3 * (2 * heads + 2 * copies) * (inner - 1) / inner * tokens
    if transport == "neighbour":  # in zigzag, and here, as far as the rank before its own, and home from there
        block = rows.amax(1).sum(0)
        hops = torch.stack([block.roll(hop) for hop in range(outer)])  # whose rows a rank sends at each hop
        keys, sums = hops[:-1].sum(0), hops[1:].sum(0)
        return 2 * copies / inner * (3 * keys + sums) + exchanged
    return 2 * copies / inner * (3 * rows.sum((0, 1)) + rows.sum((0, 2))) + exchanged


@pytest.mark.parametrize(
    ("ring_size", "layouts"),
    [
        (1, [("zigzag", "direct", 1)]),
        (2, [("zigzag", "direct", 1), ("ulysses", "", 2), ("zigzag", "neighbour", 1)]),
        (4, [("contiguous", "direct", 1), ("allgather", "", 1), ("hybrid", "direct", 2), ("zigzag", "neighbour", 1)]),
        pytest.param(
            8,
            [("zigzag", "direct", 1), ("ulysses", "", 8), ("hybrid", "direct", 2), ("hybrid", "neighbour", 4)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1", "2", "4", "8"],
)
def test_tokens_held_and_bytes_sent_are_the_layouts(ring_size: int, layouts: list[tuple[str, str, int]]) -> None:
    """A ring whose ranks all computed everything would hold all tokens, or send other bytes."""
    cfgs = [
        compose_config([
            "launch.device=cpu", "logger=none", f"parallel=ring{ring_size}", "engine=torch", "train.batch_size=2",
            "data.size=8", "data.share_prefix=false", "train.micro_batch_size=1", f"parallel.layout={layout}",
            *([f"parallel.transport={transport}"] if transport else []),
            *([f"parallel.ulysses_size={inner}"] if layout == "hybrid" else []),
        ])
        for layout, transport, inner in layouts
    ]  # fmt: skip
    counts = on_ranks(ring_size, counts_rank, cfgs)[0]
    for (layout, transport, inner), cfg, (row, packs) in zip(layouts, cfgs, counts, strict=True):
        assert row["train/ring_tokens"] == sum(len(pack.tokens_T) for pack in packs) // ring_size, layout
        layers, size, element = cfg.model.layers, cfg.model.hidden_size // cfg.model.heads, 4
        heads = torch.stack([sent(layout, transport, inner, cfg, pack) for pack in packs]).sum(0).max()
        assert row["train/ring_bytes"] == layers * size * element * float(heads), (layout, transport, inner)


def test_the_watch_counts_a_call_in_which_this_rank_sends_nothing() -> None:
    """Or a rank with less to send would be taken for one that is behind the others."""
    before = watch._progress.noted
    between(ALONE, [], [])
    assert watch._progress.noted == before + 1
