"""The ring's own collectives, and the counts of the tokens it holds and the bytes it sends."""

from __future__ import annotations

import weakref

import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.launch.joining import RankSpec
from rlexp.training.ring.collectives import exchange, gather, ring_sum, rotate, sum_and_scatter
from rlexp.training.ring.groups import Ring, build_world
from tests.helpers.ranks import on_ranks


def sum_rank(spec: RankSpec) -> tuple[float, float, float, list[int]]:
    ring = build_world(2).ring
    mine = torch.tensor(10.0**spec.rank, dtype=torch.float64, requires_grad=True)
    total = ring_sum(mine, ring)
    (total * 3).backward()
    traveller = torch.tensor([float(spec.rank)])
    return float(total), float(mine.grad), float(rotate(traveller, ring).wait()), list(ring.ranks)


def test_ring_sum_adds_up_and_its_backward_is_the_identity() -> None:
    results = on_ranks(4, sum_rank)
    assert [result[0] for result in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert [result[1] for result in results] == [3.0] * 4  # 6.0 would be a summing backward
    assert [result[2] for result in results] == [1.0, 0.0, 3.0, 2.0]
    assert [result[3] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def kept_rank(spec: RankSpec) -> tuple[bool, bool]:
    coming = rotate(torch.ones(1000), build_world(2).ring)
    sent = weakref.ref(coming.sent)
    under_way = sent() is not None
    coming.wait()
    return under_way, sent() is not None


def test_what_is_sent_is_kept_while_it_is_under_way_and_no_longer() -> None:
    assert on_ranks(2, kept_rank) == [(True, False)] * 2


@pytest.mark.parametrize("collective", [ring_sum, rotate, gather, sum_and_scatter, exchange])
def test_a_ring_without_a_group_sends_nothing(collective) -> None:
    """Without a group, torch would use the group of the whole world."""
    with pytest.raises(AssertionError, match="has no group"):
        collective(torch.zeros(2, 3), Ring(0, (0, 1)))


def counts_rank(spec: RankSpec, cfgs) -> list[tuple[dict[str, float], int]]:
    """Take one step of each configuration; its row, and the tokens of its batch with their padding."""
    from rlexp.training.dataset.packing import pack_examples
    from rlexp.training.train.build import build, unprobed
    from rlexp.training.train.step import train_step

    counts = []
    for cfg in cfgs:
        task = build(cfg, probing=unprobed)
        multiple = task.run.layout.multiple(task.run.world.ring.size)
        padded = [len(pack_examples([task.train[index]], multiple).tokens_T) for index in task.batch(1).indices]
        counts.append((train_step(task, 1), sum(padded)))
    return counts


def sent(layout: str, ring: int, inner: int, heads: int, kv_heads: int) -> float:
    """Return how many heads' worth of elements a rank sends per token that it holds and per layer.

    There are two forward passes, of policy and reference, and one backward pass. docs/layouts.md has the formulas.
    """
    around = 2 * kv_heads
    if layout in ("zigzag", "contiguous"):  # K and V, ring − 1 hops; dK and dV come home again
        return around * (3 * (ring - 1) + (ring if ring > 1 else 0))
    if layout == "allgather":
        return around * (3 + 1) * (ring - 1)
    copies, outer = max(kv_heads, inner), ring // inner
    exchanged = (2 * heads + 2 * copies) * (inner - 1) / inner
    # A rank of an outer ring has all tokens of its neighbours, for a part of the heads.
    travelling = 2 * copies * (3 * (outer - 1) + (outer if outer > 1 else 0))
    return 3 * exchanged + travelling


@pytest.mark.parametrize(
    ("ring_size", "layouts"),
    [
        (1, [("zigzag", 1)]),
        (2, [("zigzag", 1), ("ulysses", 2)]),
        (4, [("contiguous", 1), ("allgather", 1), ("hybrid", 2)]),
        pytest.param(8, [("zigzag", 1), ("ulysses", 8), ("hybrid", 2), ("hybrid", 4)], marks=pytest.mark.slow),
    ],
    ids=["1", "2", "4", "8"],
)
def test_tokens_held_and_bytes_sent_are_the_layouts(ring_size: int, layouts: list[tuple[str, int]]) -> None:
    """A ring whose ranks all computed everything would hold all tokens, or send other bytes."""
    cfgs = [
        compose_config([
            "launch.device=cpu", "logger=none", f"parallel=ring{ring_size}", "engine=torch", "train.batch_size=2",
            "data.size=8", f"parallel.layout={layout}",
            *([f"parallel.ulysses_size={inner}"] if layout == "hybrid" else []),
        ])
        for layout, inner in layouts
    ]  # fmt: skip
    counts = on_ranks(ring_size, counts_rank, cfgs)[0]
    for (layout, inner), cfg, (row, tokens) in zip(layouts, cfgs, counts, strict=True):
        held = tokens // ring_size
        assert row["train/ring_tokens"] == held, layout
        layers, size, element = cfg.model.layers, cfg.model.hidden_size // cfg.model.heads, 4
        heads = sent(layout, ring_size, inner, cfg.model.heads, cfg.model.kv_heads)
        assert row["train/ring_bytes"] == layers * held * size * element * heads, (layout, inner)
