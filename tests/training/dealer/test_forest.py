"""What sequences share: every token stands where its sequence runs through, once for all that share it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.training.dealer.forest import Forest, Share, copied, shared

EVERY = Share(1, 0)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=0, max_size=9)


def arrays(sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(each, dtype=np.int32) for each in sequences]


def tokens_of(forest: Forest) -> int:
    return sum(len(branch.tokens) for branch in forest.branches)


def read(forest: Forest, number: int) -> list[int]:
    """Read a sequence from its root to its end."""
    path = forest.paths[number]
    parents = [forest.branches[each].parent for each in path]
    assert parents == [None, *path[:-1]]
    tokens = np.concatenate([forest.branches[each].tokens for each in path])
    assert len(tokens) - len(forest.branches[path[-1]].tokens) < forest.lengths[number] <= len(tokens)
    return tokens[: forest.lengths[number]].tolist()


def distinct(sequences: Sequence[tuple[int, ...]]) -> int:
    """Count the tokens of a forest that shares all it can: a token and the one that follows it say which place it has;
    the last token of a sequence that no other goes on from has one of its own."""
    beginnings = {each[:end] for each in sequences for end in range(2, len(each) + 1)}
    longest = {each for each in sequences if not any(other[: len(each)] == each != other for other in sequences)}
    return len(beginnings) + len(longest)


@given(SEQUENCES)
def test_each_sequence_is_read_from_its_root_and_nothing_stands_twice(sequences) -> None:
    forest = shared(arrays(sequences), EVERY)
    assert [read(forest, number) for number in range(len(sequences))] == [list(each) for each in sequences]
    assert tokens_of(forest) == distinct(sequences)


@given(SEQUENCES, st.integers(1, 5))
def test_only_long_beginnings_are_shared(sequences, least) -> None:
    forest = shared(arrays(sequences), Share(least, 0))
    assert [read(forest, number) for number in range(len(sequences))] == [list(each) for each in sequences]
    parents = {branch.parent for branch in forest.branches if branch.parent is not None}
    assert all(len(forest.branches[parent].tokens) >= least for parent in parents)
    assert distinct(sequences) <= tokens_of(forest) <= sum(map(len, sequences))


def test_what_a_tree_shares_does_not_depend_on_the_others() -> None:
    other, one, two = arrays([[0] * 50, [1] * 20 + [2] * 15, [1] * 20 + [3] * 15])
    share = Share(16, 19 / 32)  # 19 tokens are saved, and 32 go on from them
    assert tokens_of(shared([one, two], share)) == 51
    assert tokens_of(shared([other, one, two], share)) == 50 + 51


def test_branches_begin_with_the_last_token_that_they_share() -> None:
    """The picture at the head of the module: each place of a forest has one target."""
    a, b, c, d, e, f, g, h = range(8)
    forest = shared(arrays([(a, b, c, d, e), (a, b, c, f, g), (a, b, c, f, h)]), EVERY)
    assert [(branch.tokens.tolist(), branch.parent) for branch in forest.branches] == [
        ([a, b], None),
        ([c, d, e], 0),
        ([c], 0),
        ([f, g], 2),
        ([f, h], 2),
    ]
    assert forest.paths == ((0, 1), (0, 2, 3), (0, 2, 4))


@pytest.mark.parametrize(
    ("sequences", "tokens"),
    [
        ([(1, 2, 3), (1, 2, 3)], 3),  # two equal answers are one
        ([(1, 2, 3), (1, 2, 3, 4)], 4),  # one ends inside the other
        ([(1, 2), (1, 3)], 4),  # a prompt of one token predicts two others: nothing is shared
        ([(1, 2, 3), (1, 2, 4)], 5),
        ([(1, 2, 3), (4, 2, 3)], 6),
        ([(1,), (1,), (1, 2)], 2),
    ],
)
def test_what_is_shared(sequences, tokens) -> None:
    assert tokens_of(shared(arrays(sequences), EVERY)) == tokens


def test_a_copied_sequence_has_a_tree_of_its_own() -> None:
    forest = copied(arrays([(1, 2, 3), (1, 2, 3)]))
    assert tokens_of(forest) == 6
    assert forest.paths == ((0,), (1,))
