"""The ring's own collectives, and the counting of what it holds and sends."""

from __future__ import annotations

import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.launch.place import Place
from rlexp.ring.collectives import ring_sum, rotate
from rlexp.ring.groups import build_world
from tests.ranks import on_ranks


def sum_rank(place: Place) -> tuple[float, float, float, list[int]]:
    ring = build_world(2).ring
    mine = torch.tensor(10.0**place.rank, dtype=torch.float64, requires_grad=True)
    total = ring_sum(mine, ring)
    (total * 3).backward()
    traveller = torch.tensor([float(place.rank)])
    return float(total), float(mine.grad), float(rotate(traveller, ring).wait()), list(ring.ranks)


def test_ring_sum_adds_up_and_its_backward_is_the_identity() -> None:
    results = on_ranks(4, sum_rank)
    assert [result[0] for result in results] == [11.0, 11.0, 1100.0, 1100.0]
    assert [result[1] for result in results] == [3.0] * 4  # 6.0 would be a summing backward
    assert [result[2] for result in results] == [1.0, 0.0, 3.0, 2.0]
    assert [result[3] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def counts_rank(place: Place, cfg) -> tuple[dict[str, float], int, int]:
    from rlexp.data.packing import pack_pairs
    from rlexp.train.build import build
    from rlexp.train.step import train_step

    run = build(cfg)
    batch = run.sampler.batch(1)
    padded = [
        len(pack_pairs([run.pairs[index]], run.layout.multiple(run.world.ring.size)).tokens_T)
        for index in batch.indices
    ]
    return train_step(run, batch), sum(padded), len(batch.indices)


@pytest.mark.parametrize("ring_size", [1, 2, 4, 8])
def test_tokens_held_and_bytes_sent_are_the_layouts(ring_size: int) -> None:
    """A ring that secretly computed everything everywhere would hold all tokens, or send other bytes.

    Forward: K and V travel ring − 1 hops, for policy and reference. Backward: once more, and dK and dV in the
    accumulation dtype travel ring hops, home again.
    """
    cfg = compose_config(["launch.device=cpu", "logger=none", f"parallel=ring{ring_size}", "engine=torch"])
    row, tokens, _ = on_ranks(ring_size, counts_rank, cfg)[0]
    held = tokens // ring_size
    assert row["train/ring_tokens"] == held
    layers, kv_heads, size, element = cfg.model.layers, cfg.model.kv_heads, 8, 4
    kv = 2 * held * kv_heads * size * element
    hops = 3 * (ring_size - 1) + (ring_size if ring_size > 1 else 0)
    assert row["train/ring_bytes"] == layers * kv * hops
