"""What sequences share, by their tokens: a forest of segments, in which a beginning of several sequences stands once.

    sequences   A B C D E     A B C F G     A B C F H
    segments    A B   →   C D E             (begins with a copy of C, whose target in this sequence is D)
                      →   C   →   F G       (C's target in these two is F, and F's is G or H)
                              →   F H

Sequences part where their next tokens differ. The last token that they share predicts both, so each branch begins with
a copy of it: every place of a forest has one target. A sequence that is the beginning of another ends inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rlexp.training.types import Ids


@dataclass(frozen=True)
class Share:
    """When a beginning is shared. A row in a further call of attention, whose output is merged, costs about as much as
    a sixteenth of a token's products in a model of 2,000 to 4,000 channels."""

    least: int = 16  # tokens
    worth: float = 1 / 16  # tokens saved, at least, over those of the sequences that go on from it


@dataclass(frozen=True)
class Branch:
    """Consecutive tokens of one or several sequences, and where they follow from: a place in the list of branches."""

    tokens: Ids
    parent: int | None = None


@dataclass(frozen=True)
class Forest:
    """Branches, each after its parent; and by sequence the branches that it runs through, from its root on.

    A sequence runs through whole branches, but for the last one, in which it may end early."""

    branches: tuple[Branch, ...]
    paths: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]  # of the sequences


def copied(sequences: Sequence[Ids]) -> Forest:
    """Give each sequence a tree of its own."""
    paths = tuple((number,) for number in range(len(sequences)))
    return Forest(tuple(map(Branch, sequences)), paths, tuple(map(len, sequences)))


def shared(sequences: Sequence[Ids], share: Share) -> Forest:
    """Let sequences share the beginnings that they have in common, where it is worth it."""
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].tobytes())
    alike = [common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    hosts, apart = _longest(order, alike, [len(each) for each in sequences])
    lengths = np.cumsum([0, *(len(sequences[host]) for host in hosts)])
    branches: list[Branch] = []
    of_host: dict[int, tuple[int, ...]] = {}
    # Groups of hosts next to each other, with what was laid of them so far: the tokens, and through which branches.
    groups: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(hosts), 0, ())] if hosts else []
    while groups:
        first, end, begin, path = groups.pop()
        parent = path[-1] if path else None
        tokens = sequences[hosts[first]]
        if end - first == 1:
            of_host[hosts[first]] = (*path, len(branches))
            branches.append(Branch(tokens[begin:], parent))
            continue
        within = apart[first + 1 : end]
        fewest = int(within.min())
        cuts = [first, *(first + 1 + np.flatnonzero(within == fewest)).tolist(), end]
        alone, beyond = fewest - 1 - begin, int(lengths[end] - lengths[first]) - (end - first) * (fewest - 1)
        if alone >= share.least and alone * (len(cuts) - 2) >= share.worth * beyond:
            path = (*path, len(branches))
            branches.append(Branch(tokens[begin : fewest - 1], parent))
            begin = fewest - 1
        groups += [(a, b, begin, path) for a, b in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return _of(sequences, branches, of_host, _hosted(order, hosts))


def _longest(order: Sequence[int], alike: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """Return the sequences that are no beginning of another, in order, and by each how much it shares with the one
    before it. Of equal ones, the last stands for all."""
    hosts: list[int] = []
    apart: list[int] = []
    least, most = 0, max(lengths, default=0)
    for place, number in enumerate(order):
        least = min(least, alike[place - 1]) if place else 0
        if place < len(alike) and alike[place] == lengths[number]:
            continue
        hosts.append(number)
        apart.append(least)
        least = most
    return hosts, np.array(apart, dtype=np.int64)


def _hosted(order: Sequence[int], hosts: Sequence[int]) -> dict[int, int]:
    """Return by sequence the one in which it ends: itself, or the next one in order that is no beginning of another."""
    host_of, remaining = {}, list(hosts)[::-1]
    for number in order:
        host_of[number] = remaining[-1]
        if number == remaining[-1]:
            remaining.pop()
    return host_of


def _of(
    sequences: Sequence[Ids], branches: list[Branch], of_host: dict[int, tuple[int, ...]], hosted: dict[int, int]
) -> Forest:
    paths = []
    for number, tokens in enumerate(sequences):
        path, length = [], len(tokens)
        for branch in of_host[hosted[number]]:
            path.append(branch)
            length -= len(branches[branch].tokens)
            if length <= 0:
                break
        paths.append(tuple(path))
    return Forest(tuple(branches), tuple(paths), tuple(map(len, sequences)))


def common(one: Ids, other: Ids) -> int:
    """Count the tokens with which both begin."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    first = int(differ.argmax()) if most else 0
    return first if most and differ[first] else most
