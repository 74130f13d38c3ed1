"""Every unit is dealt once, no pack is over its room, and replicas have equally many packs of about the same work."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlexp.training.dealer import deal
from rlexp.training.dealer.deal import Dealer, Dealt, Room, Size, TooLargeError
from rlexp.training.dealer.forest import Share, shared
from rlexp.training.dealer.packing import listed, pack_sequences

UNITS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3), min_size=0, max_size=14
)

# Also beginnings that are long enough and yet not worth a call: a pack is larger then than its units seem to be.
SHARES = st.none() | st.builds(Share, st.integers(1, 3), st.sampled_from([0, 0.25, 1]))


def arrays(units):
    return [[np.array(sequence, dtype=np.int32) for sequence in unit] for unit in units]


def tokens(units, places, share) -> int:
    sequences = [sequence for place in places for sequence in units[place]]
    tokens = sequences if share is None else [branch.tokens for branch in shared(sequences, share).branches]
    return sum(map(len, tokens))


def random_units(count: int, seed: int, *, skewed: bool = False) -> list[list[np.ndarray]]:
    """Units of one sequence each, of 1 to 100 tokens; or one in ten of 100, and the others of 10."""
    chance = np.random.default_rng(seed)
    lengths = np.where(np.arange(count) % 10 == 0, 100, 10) if skewed else chance.integers(1, 101, count)
    return [[chance.integers(0, 1000, length).astype(np.int32)] for length in lengths]


@given(UNITS, st.integers(1, 4), st.integers(1, 5), SHARES)
def test_by_count_each_unit_is_in_one_pack(units, replicas, count, share) -> None:
    dealt = Dealer(replicas, Room(units=count), share, token=7).deal(arrays(units))
    assert sorted(place for packs in dealt.packs for pack in packs for place in pack) == [*range(len(units))]
    of_replica = math.ceil(len(units) / replicas)
    assert {len(packs) for packs in dealt.packs} == {max(1, math.ceil(of_replica / count))}
    assert max((len(pack) for packs in dealt.packs for pack in packs), default=0) <= count
    for packs, sizes in zip(dealt.packs, dealt.sizes, strict=True):
        assert [tokens(arrays(units), pack, share) for pack in packs] == [size.tokens for size in sizes]


@given(UNITS, st.integers(1, 4), st.integers(1, 60), SHARES)
def test_by_tokens_no_pack_is_over_its_room(units, replicas, room, share) -> None:
    given_units = arrays(units)
    dealer = Dealer(replicas, Room(tokens=room), share, token=7)
    too_large = [place for place in range(len(units)) if tokens(given_units, [place], share) > room]
    if too_large:
        with pytest.raises(TooLargeError) as error:
            dealer.deal(given_units)
        assert (error.value.place, error.value.tokens) == (
            too_large[0], tokens(given_units, too_large[:1], share))  # fmt: skip
        return
    dealt = dealer.deal(given_units)
    assert sorted(place for packs in dealt.packs for pack in packs for place in pack) == [*range(len(units))]
    assert len({len(packs) for packs in dealt.packs}) == 1
    assert all(tokens(given_units, pack, share) <= room for packs in dealt.packs for pack in packs)


@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "one in ten"])
@pytest.mark.parametrize("room", [100, 200, 800])
def test_the_work_of_replicas_is_even(room, skewed) -> None:
    """Train batches of 64 units, of 1 to 100 tokens or one in ten of 100 among others of 10. 1.1 is what is promised;
    measured: at most 1.003 with two replicas, and 1.030 with four."""
    for seed in range(30):
        units = random_units(64, seed, skewed=skewed)
        for replicas in (2, 4):
            work = Dealer(replicas, Room(tokens=room), token=6 * 64).deal(units).work
            assert max(work) <= 1.1 * min(work), (seed, replicas)


@pytest.mark.parametrize("room", [Room(tokens=2000), Room(units=4)], ids=["tokens", "units"])
def test_it_is_the_work_that_is_even_and_not_the_tokens(room: Room) -> None:
    """Lengths are far apart: a query sees all before it, so a long unit is more work than short ones of its tokens.
    Measured: at most 1.03 by tokens, and 1.07 by units."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).lognormal(4, 1, 64).clip(8, 1000).astype(int).tolist()
        units = [[np.zeros(length, dtype=np.int32)] for length in lengths]
        dealt = Dealer(2, room, token=64).deal(units)
        work = [
            sum(64 * lengths[place] + sum(range(1, lengths[place] + 1)) for pack in packs for place in pack)
            for packs in dealt.packs
        ]
        assert dealt.work == tuple(work)
        assert max(work) <= 1.1 * min(work), seed


@pytest.mark.parametrize(("beginning", "own", "most"), [(24, 200, 1.1), (1000, 200, 1.0), (2000, 20, 1.0)])
def test_no_replica_takes_all_that_begins_alike(beginning: int, own: int, most: float) -> None:
    """Eight samples to a prompt, or pairs after a template's first words: all fit into one pack, and replicas wait."""
    chance = np.random.default_rng(0)
    prompt = chance.integers(0, 1000, beginning).astype(np.int32)
    units = [[np.concatenate((prompt, chance.integers(0, 1000, own).astype(np.int32)))] for _ in range(8)]
    dealt = Dealer(8, Room(tokens=16384), Share(), token=12288).deal(units)
    assert dealt.skew <= most
    assert [len(packs) for packs in dealt.packs] == [1] * 8
    one = Dealer(1, Room(tokens=16384), Share(), token=12288).deal(units)
    assert (len(one.packs[0]), one.size.tokens) == (1, beginning - 1 + 8 * (own + 1))


def test_units_that_begin_alike_are_computed_together() -> None:
    """Four prompts with four answers each, in any order."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, 1000, 40).astype(np.int32) for _ in range(4)]
    units = [[np.concatenate((prompts[n % 4], chance.integers(0, 1000, 5).astype(np.int32)))] for n in range(16)]
    dealt = Dealer(2, Room(units=4), share=Share()).deal(units)
    assert all(len({place % 4 for place in pack}) == 1 for packs in dealt.packs for pack in packs)


def test_units_that_begin_alike_and_share_less_are_parted() -> None:
    """A beginning of three tokens is long enough, and saves too little: a pack of both has 15 tokens, and not 12."""
    units = arrays([[[0, 1, 1, 1, 0], [0, 1, 1]], [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 1, 1, 1]]])
    dealt = Dealer(1, Room(tokens=14), Share(3, 1.0), token=7).deal(units)
    assert [len(pack) for pack in dealt.packs[0]] == [1, 1]


def test_as_few_packs_as_there_can_be() -> None:
    """Six tokens and four fit into ten, though each replica would have room for less with two of them apart."""
    units = [[np.zeros(length, dtype=np.int32)] for length in (6, 6, 6, 6, 4, 4, 4, 4)]
    assert [len(packs) for packs in Dealer(2, Room(tokens=10)).deal(units).packs] == [2, 2]
    units = [[np.zeros(length, dtype=np.int32)] for length in (7, 3, 3, 3, 3)]  # the last has room where more is to do
    assert [len(packs) for packs in Dealer(1, Room(tokens=10)).deal(units).packs] == [2]


def test_what_one_rank_deals_all_deal() -> None:
    units = random_units(100, 3)
    once, again = (Dealer(4, Room(tokens=300), Share(), 400).deal(units) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("at_once", [1, 150, 1000, 10**6])
@pytest.mark.parametrize("room", [Room(tokens=300), Room(units=3)], ids=["tokens", "units"])
def test_parts_of_many_units_make_one_deal(at_once: int, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit is read once, in order, and stands in one pack, whose size is that of its units."""
    monkeypatch.setattr(deal, "AT_ONCE", at_once)
    units, read = random_units(60, 5), list[int]()

    def unit(place: int) -> list[np.ndarray]:
        read.append(place)
        return units[place]

    dealt = Dealer(2, room, token=7).deal_all(len(units), unit)
    assert read == [*range(60)]
    assert sorted(place for packs in dealt.packs for pack in packs for place in pack) == read
    for packs, sizes, work in zip(dealt.packs, dealt.sizes, dealt.work, strict=True):
        lengths = [[len(units[place][0]) for place in pack] for pack in packs]
        assert [*sizes] == [sum((Size.of(range(each)) for each in pack), Size()) for pack in lengths]
        assert work == sum(7 * size.tokens + size.pairs for size in sizes)


@pytest.mark.parametrize("at_once", [1, 150, 10**6])
def test_a_unit_that_is_too_large_is_named_by_its_place_among_all(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deal, "AT_ONCE", at_once)
    units = [*random_units(30, 5), [np.zeros(101, dtype=np.int32)]]
    with pytest.raises(TooLargeError) as error:
        Dealer(2, Room(tokens=100)).deal_all(len(units), units.__getitem__)
    assert (error.value.place, error.value.tokens) == (30, 101)


@pytest.mark.parametrize(
    ("work", "skew"), [((5,), 1.0), ((6, 3), 4 / 3), ((5, 5, 5, 5), 1.0), ((6, 3, 0), 2.0), ((0, 8), 2.0)]
)
def test_skew_is_the_work_of_the_busiest_replica_over_the_mean(work: tuple[int, ...], skew: float) -> None:
    nothing = ((),) * len(work)
    assert Dealt(nothing, nothing, work).skew == pytest.approx(skew)


def test_a_dealer_s_packs_become_larger_and_never_smaller() -> None:
    for room, tokens, becomes in ((Room(tokens=10), 5, 10), (Room(tokens=10), 11, 11), (Room(units=2), 99, None)):
        assert Dealer(2, room).with_room_for(tokens).room.tokens == becomes


def test_nothing_to_deal() -> None:
    assert Dealer(2, Room(tokens=10)).deal([]) == Dealt((((),), ((),)), ((Size(),), (Size(),)), (0, 0))
    assert Dealer(2, Room(tokens=10)).deal([]).skew == 1.0
    assert pack_sequences([], 4).end_S.dtype == torch.int64
    for dtype, values in itertools.product((torch.float32, torch.float64), ([], [np.ones(2)])):
        assert listed(values, dtype).dtype == dtype
