"""Which answer each prompt of a batch is given for KTO's divergence."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlexp.training.train.whole_batch import mismatched, partners_of
from rlexp.training.types import Example


@pytest.mark.parametrize(
    ("prompts", "partners"),
    [
        ("abc", [2, 0, 1]),  # each the one before it, and the first the last
        ("ab", [1, 0]),
        ("aabbcc", [4, 5, 0, 1, 2, 3]),  # never one with the same prompt, and each answer once
        ("aabbc", [3, 4, 0, 1, 3]),
        ("abca", [2, 0, 1, 1]),  # the last place is before the first
        ("aaba", [2, 2, 1, 2]),  # on back, where it is the same prompt again
        ("aaa", [2, 0, 1]),  # if all are the same, just the one before
    ],
)
def test_a_partner_is_the_nearest_before_with_another_prompt(prompts: str, partners: list[int]) -> None:
    assert partners_of(prompts) == partners


def test_every_partner_has_another_prompt() -> None:
    """And with pairs in any order of theirs, good answers are given good ones."""
    drawn = random.Random(1)
    for _ in range(200):
        prompts = [drawn.randrange(4) for _ in range(drawn.randint(2, 12))]
        found = partners_of(prompts)
        if len(set(prompts)) > 1:
            assert all(prompts[place] != prompts[other] for place, other in enumerate(found))
    pairs = [place // 2 for place in range(20)]
    assert sorted(partners_of(pairs)) == list(range(20))
    assert all(other % 2 == place % 2 for place, other in enumerate(partners_of(pairs)))


def test_a_mismatched_sequence_is_no_longer_than_any_other() -> None:
    long = Example(1, np.arange(10, dtype=np.int32), (np.arange(20, 29, dtype=np.int32),), origin="long", label=False)
    short = Example(0, np.arange(6, dtype=np.int32), (np.array([7, 8], np.int32),), origin="short", label=True)
    made = mismatched([short, long], 12, 0)(0)
    assert made.prompt.tolist() == [0, 4, 5]  # cut at its start, after the begin-of-sequence token
    assert made.answers[0].tolist() == list(range(20, 29))
    assert (made.index, made.label) == (0, True)
