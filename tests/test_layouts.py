"""Layouts as pure functions of (rank, size)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlexp.config.schema import LayoutName
from rlexp.data.packing import pack_sequences
from rlexp.ring.attention import local_index, real_lengths
from rlexp.ring.groups import Ring
from rlexp.ring.kernels import Plain
from rlexp.ring.layouts import EARLY, LATE, get_layout
from rlexp.ring.shard import shard_pack
from tests.test_attention import forest

LAYOUTS = st.sampled_from([get_layout(name) for name in LayoutName])
RINGS = st.sampled_from([1, 2, 3, 4, 8])
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=6).map(tuple)


@given(LAYOUTS, RINGS, LENGTHS)
def test_each_token_is_held_once_and_shares_are_equal(layout, ring_size, lengths) -> None:
    segments = forest(lengths, layout.multiple(ring_size))
    held = [local_index(segments, rank, ring_size, layout) for rank in range(ring_size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(s.padded for s in segments)))
    assert len({len(index) for index in held}) == 1
    for segment in segments:
        real = [sum(real_lengths(segment, rank, ring_size, layout)) for rank in range(ring_size)]
        assert sum(real) == segment.length


@given(LAYOUTS, RINGS, st.integers(1, 40))
def test_blocks_are_exactly_the_causal_mask(layout, ring_size, units) -> None:
    """Drawing every block of every rank gives each pair of query and earlier key once, and no later key."""
    length = units * layout.multiple(ring_size)
    seen = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(ring_size):
        for source in range(ring_size):
            block = layout.block(rank, source, ring_size)
            if block is None:
                continue
            queries = _positions(layout, block.queries, length, rank, ring_size)
            keys = _positions(layout, block.keys, length, source, ring_size)
            mask = torch.ones(len(queries), len(keys), dtype=torch.int64)
            seen[queries.unsqueeze(1), keys] += mask.tril() if block.causal else mask
    assert torch.equal(seen, torch.ones(length, length, dtype=torch.int64).tril())


def _positions(layout, part, length: int, rank: int, ring_size: int) -> torch.Tensor:
    chunks = [torch.arange(chunk.start, chunk.stop) for chunk in layout.chunks(length, rank, ring_size)]
    return {EARLY: chunks[0], LATE: chunks[-1]}.get(part, torch.cat(chunks))


@given(RINGS.filter(lambda size: size > 1), st.integers(1, 30))
def test_zigzag_is_balanced(ring_size, units) -> None:
    """Every rank has the same work at every step of the ring, up to the causal diagonal."""
    layout = get_layout(LayoutName.zigzag)
    length = units * layout.multiple(ring_size)
    half = length // (2 * ring_size)
    for rank in range(ring_size):
        for source in range(ring_size):
            block = layout.block(rank, source, ring_size)
            queries = len(_positions(layout, block.queries, length, rank, ring_size))
            keys = len(_positions(layout, block.keys, length, source, ring_size))
            assert queries * keys == (4 if block.causal else 2) * half * half


@given(LAYOUTS, RINGS, LENGTHS, st.booleans())
def test_shards_hold_every_target_of_the_pack(layout, ring_size, lengths, packing) -> None:
    """Targets are shifted before sharding: none is lost at an edge."""
    sequences = [
        (
            torch.arange(length, dtype=torch.int32).numpy() + 7,
            torch.arange(length + 1, dtype=torch.int32).numpy() + 50,
        )
        for length in lengths
    ]
    pack = pack_sequences(sequences, layout.multiple(ring_size), packing=packing)
    shards = [shard_pack(pack, Ring(rank, tuple(range(ring_size))), layout, Plain(), 1000) for rank in range(ring_size)]
    targets = sorted(
        (int(owner), int(position), int(target))
        for shard in shards
        for owner, position, target in zip(shard.sequence_t, shard.positions_t, shard.targets_t, strict=True)
        if owner >= 0
    )
    expected = sorted(
        (number, len(prompt) - 1 + place, int(token))
        for number, (prompt, answer) in enumerate(sequences)
        for place, token in enumerate(answer)
    )
    assert targets == expected
    assert sum(shard.real_tokens for shard in shards) == pack.real_tokens == sum(2 * n + 1 for n in lengths)
