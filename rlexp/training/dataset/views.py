"""The examples of all sources as one sequence, and the few of them that are held out."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlexp.training.dataset.store import View
from rlexp.training.types import Example

DRAW = 20261123  # seeds the draw of held-out rows: the same in every run, whatever its seed


class Joined(View):
    """Examples of several sets, one after the other, numbered by their places. Those of `places` alone, or all."""

    def __init__(self, sets: Sequence[Sequence[Any]], places: Places | None = None) -> None:
        self.sets = sets
        self._bounds = [*itertools.accumulate(map(len, sets), initial=0)]
        self.places = places

    def __len__(self) -> int:
        return self._bounds[-1] if self.places is None else len(self.places)

    def lengths(self, places: np.ndarray) -> np.ndarray:
        places = places if self.places is None else self.places.at(places)
        cuts = np.searchsorted(places, self._bounds)
        return np.concatenate([
            lengths_of(each, places[a:b] - first)
            for each, first, (a, b) in zip(self.sets, self._bounds, itertools.pairwise(cuts), strict=False)
            if b > a
        ])  # fmt: skip

    def at(self, index: int) -> Any:
        place = index if self.places is None else self.places[index]
        number = bisect.bisect_right(self._bounds, place) - 1
        return replace(self.sets[number][place - self._bounds[number]], index=index)

    def sizes(self) -> tuple[int, ...]:
        """Return how many examples there are of each set."""
        bounds = self._bounds if self.places is None else [*map(self.places.before, self._bounds)]
        return tuple(after - before for before, after in itertools.pairwise(bounds))


class Halves(View):
    """Pairs as two answers each: the chosen one, which is good, then the rejected one."""

    def __init__(self, pairs: Sequence[Example]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self.pairs)

    def lengths(self, places: np.ndarray) -> np.ndarray:
        of_pairs = lengths_of(self.pairs, places // 2)
        return np.stack((of_pairs[:, 0], of_pairs[np.arange(len(places)), 1 + places % 2]), axis=1)

    def at(self, index: int) -> Example:
        pair, second = self.pairs[index // 2], index % 2
        answer, mask = pair.masked[second]
        origin = f"{pair.origin} ({'rejected' if second else 'chosen'})"
        return Example(index, pair.prompt, (answer,), (mask,), origin, label=not second)


@dataclass(frozen=True)
class Places:
    """The places of `total` that are held out, or the others. It holds the held-out places alone, in order."""

    total: int
    out: np.ndarray
    held_out: bool

    def __len__(self) -> int:
        return len(self.out) if self.held_out else self.total - len(self.out)

    def __getitem__(self, index: int) -> int:
        return int(self.at(index))

    def at(self, index: Any) -> Any:
        """Return the place of an example, or an array of places."""
        return self.out[index] if self.held_out else index + np.searchsorted(self._others, index, side="right")

    @functools.cached_property
    def _others(self) -> np.ndarray:
        """Return how many of the others come before each held-out one."""
        return self.out - np.arange(len(self.out))

    def before(self, place: int) -> int:
        """Count those before a place."""
        out = int(np.searchsorted(self.out, place, side="left"))
        return out if self.held_out else place - out


def lengths_of(examples: Sequence[Any], places: np.ndarray) -> np.ndarray:
    """Return what `View.lengths` does. What has a store is not read."""
    if isinstance(examples, View):
        return examples.lengths(places)
    taken = [examples[place] for place in places.tolist()]
    return np.array([[len(each.prompt), *map(len, each.answers)] for each in taken])


def drawn(total: int, size: int) -> np.ndarray:
    """Return the places of `size` held-out examples of `total`, by a draw that never changes."""
    return np.sort(np.random.default_rng([DRAW, total]).permutation(total)[:size])
