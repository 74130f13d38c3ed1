"""How the log of a model grows when it gets one layer more: what is repeated, and what becomes larger.

Two logs of the same run, of a few layers and of some more, are laid side by side, phase by phase. What only the larger
one has is repeated for every further layer, and must stand twice in it already: then layers are alike. Where both have
a storage of different size (a flat buffer of all weights, say), its size goes on along a straight line. The events of
any number of layers follow, and their peak is where it would be, wherever it was with few layers.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlexp.preflight.rehearsal.log import STORAGE_KINDS, Counts, Log, Pass, Stretch, pass_of, runs

Array = npt.NDArray[np.int64]
SMALL = 1 << 16  # bytes


class NotAlikeError(Exception):
    """The layers that were rehearsed differ, so others cannot be told from them."""


@dataclass(frozen=True)
class GrowingEvents:
    """Events of the larger log that every further layer has once more, or whose sizes it makes larger."""

    start: int
    stop: int
    growth: Array | None = None  # by how many bytes, for each event; None: they are there once more


@dataclass(frozen=True)
class Growth:
    """What further layers change in one phase."""

    run: Stretch  # of the larger log
    pieces: Sequence[GrowingEvents]
    counts: Counts
    ordered: bool = False  # the events are compared, and stand here, in order of size


@dataclass(frozen=True)
class Line:
    """What further layers add to the peak and the end of events that cannot be laid side by side."""

    run: Stretch  # of the larger log; of a phase, the events between those that can
    slope: Pass


def growth_of(smaller: Log, larger: Log, *, lines: bool) -> list[Growth | Line]:
    """Return what the layers add that only the larger log has, phase by phase.

    With `lines`, phases whose events differ go on along a straight line; else they raise.
    """
    one, other = runs(smaller), runs(larger)
    if [run.phase for run in one] != [run.phase for run in other]:
        raise NotAlikeError("the phases differ")
    periods = smaller.layers / (larger.layers - smaller.layers) if lines else None
    return [part for pair in zip(one, other, strict=True) for part in _growth_in_any_order(*pair, periods)]


def grown(growth: Sequence[Growth | Line], times: int) -> list[Pass]:
    """Return the phases of the larger log that was compared after so many repetitions of what grows."""
    return [_grown(each, times) for each in growth]


def grown_like(log: Log, growth: Sequence[Growth | Line], times: int) -> list[Pass]:
    """Return the same of a log of as many layers whose sequences are longer or shorter, or on another ring."""
    phases = runs(log)
    if len(phases) != len(growth):
        raise NotAlikeError("the phases differ")
    return [_grown(_moved(run, each), times) for run, each in zip(phases, growth, strict=True)]


def _growth_in_any_order(smaller: Stretch, larger: Stretch, periods: float | None) -> list[Growth | Line]:
    try:
        return [_growth(smaller, larger)]
    except NotAlikeError:
        try:
            return [dataclasses.replace(_growth(_ordered(smaller), _ordered(larger)), ordered=True)]
        except NotAlikeError:
            if periods is None:
                raise
            return _around_a_line(smaller, larger, periods)


def _around_a_line(smaller: Stretch, larger: Stretch, periods: float) -> list[Growth | Line]:
    """Lay what comes before all layers and what comes after them side by side; between, the peak goes on along a line.

    `periods` is how many times the smaller run has what the larger one has once more.
    """
    a, b = _paired(_tokens(smaller), _tokens(larger))
    others = max(0, len(a) - round(periods * (len(b) - len(a))))  # events of no layer, before or after
    most = min(len(a), len(b))
    before = _alike(a, b, min(others, most))
    behind = _alike(a[::-1], b[::-1], min(others, most - before))
    (one, low, end), (other, high, last) = (_cut(run, before, len(run.sizes) - behind) for run in (smaller, larger))
    return [_growth(one, other), Line(high, pass_of(high).plus(pass_of(low), -1)), _growth(end, last)]


def _cut(run: Stretch, start: int, stop: int) -> tuple[Stretch, Stretch, Stretch]:
    """Cut a phase in three. The one in the middle has its counts."""

    first, middle, last = (Stretch(run.phase, run.sizes[of], run.kinds[of], Counts())
                           for of in (slice(start), slice(start, stop), slice(stop, None)))  # fmt: skip
    return first, dataclasses.replace(middle, counts=run.counts), last


def _ordered(run: Stretch) -> Stretch:
    """Put storages that are freed one after the other in order of size, and those that are made one after the other.

    The sum's highest points are between the two, and DeepSpeed frees the parameters of a layer in any order.
    """
    stretch = np.cumsum(np.diff(np.sign(run.sizes), prepend=0) != 0)
    order = np.lexsort((run.kinds, run.sizes, stretch))
    return dataclasses.replace(run, sizes=run.sizes[order], kinds=run.kinds[order])


def _moved(run: Stretch, growth: Growth | Line) -> Growth:
    """Find the pieces in a phase of another run: where they stood, or behind the events that it has more."""
    if isinstance(growth, Line):
        raise NotAlikeError(f"{run.phase}: known by its peak alone")
    run = _ordered(run) if growth.ordered else run
    more = len(run.sizes) - len(growth.run.sizes)
    tokens, signs, before = _tokens(run), np.sign(run.sizes), np.sign(growth.run.sizes)

    def stands(piece: GrowingEvents, by: int) -> bool:
        start, stop = piece.start + by, piece.stop + by
        around = (signs[:stop], before[:stop]) if by == 0 else (signs[start:], before[piece.start :])
        if start < 0 or not np.array_equal(*around):
            return False
        if piece.growth is None:
            return _stands_twice(tokens, start, stop)
        return np.array_equal(run.sizes[start:stop], growth.run.sizes[piece.start : piece.stop])

    pieces: list[GrowingEvents] = []
    for piece in growth.pieces:
        by = next((by for by in (0, more) if stands(piece, by)), None)
        if by is None:
            raise NotAlikeError(f"{run.phase}: {len(run.sizes)} events for {len(growth.run.sizes)}")
        pieces.append(dataclasses.replace(piece, start=piece.start + by, stop=piece.stop + by))
    return Growth(run, pieces, growth.counts)


def _growth(smaller: Stretch, larger: Stretch) -> Growth:
    a, b = _paired(_tokens(smaller), _tokens(larger))
    pieces: list[GrowingEvents] = []
    for what, (i, k), (j, m) in _differences(a, b):
        if what == "insert":
            blocks = _blocks(b, j, m)
            if not blocks:
                raise NotAlikeError(f"{larger.phase}: {m - j} events stand once")
            pieces.extend(GrowingEvents(*block) for block in blocks)
        elif k - i != m - j:
            raise NotAlikeError(f"{larger.phase}: {k - i} events for {m - j}")
        elif (growth := larger.sizes[j:m] - smaller.sizes[i:k]).any():
            if not np.array_equal(np.sign(larger.sizes[j:m]), np.sign(smaller.sizes[i:k])):
                raise NotAlikeError(f"{larger.phase}: what is made in one is freed in the other")
            pieces.append(GrowingEvents(j, m, growth))
    return Growth(larger, pieces, larger.counts + smaller.counts.times(-1))


def _tokens(run: Stretch) -> Array:
    """Return what is compared: size and kind, or only whether it grows where it is small (lists of numbers, for each
    layer)."""
    signs = np.sign(run.sizes)
    return np.where(np.abs(run.sizes) < SMALL, signs, len(STORAGE_KINDS) * run.sizes + signs * run.kinds)


def _paired(a: Array, b: Array) -> tuple[Array, Array]:
    """Write the same number for sizes that only one of both has, if their order is the same: flat buffers that grow.

    Such a buffer may be made amid the layers, which could not be told apart without it.
    """
    own, other = (np.flatnonzero(~np.isin(each, rest)) for each, rest in ((a, b), (b, a)))
    if len(own) != len(other) or not np.array_equal(np.sign(a[own]), np.sign(b[other])):
        return a, b
    b = b.copy()
    b[other] = a[own]
    return a, b


def _differences(a: Array, b: Array) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Yield the stretches of a and b that belong together, in order: as `equal`, `insert`, `replace` or `delete`."""
    most = min(len(a), len(b))
    before = _alike(a, b, most)
    behind = _alike(a[::-1], b[::-1], most - before)
    a_end, b_end = len(a) - behind, len(b) - behind
    yield "equal", (0, before), (0, before)
    if before == a_end:
        yield "insert" if before < b_end else "equal", (before, before), (before, b_end)
    else:
        inner = difflib.SequenceMatcher(None, a[before:a_end].tolist(), b[before:b_end].tolist(), autojunk=False)
        for what, i, k, j, m in inner.get_opcodes():
            yield what, (before + i, before + k), (before + j, before + m)
    yield "equal", (a_end, len(a)), (b_end, len(b))


def _alike(a: Array, b: Array, most: int) -> int:
    """Return how many leading values are equal, of so many."""
    apart = np.flatnonzero(a[:most] != b[:most])
    return int(apart[0]) if len(apart) else most


def _blocks(tokens: Array, start: int, stop: int) -> list[tuple[int, int]]:
    """Cut events into blocks, two at most, that each stand twice in a row; return none where that is not possible.

    Two loops over all layers that follow each other grow side by side, where one ends and the other begins.
    """
    if _stands_twice(tokens, start, stop):
        return [(start, stop)]
    for cut in range(start + 1, stop):
        if _stands_twice(tokens, start, cut) and _stands_twice(tokens, cut, stop):
            return [(start, cut), (cut, stop)]
    return []


def _stands_twice(tokens: Array, start: int, stop: int) -> bool:
    """Say whether events stand twice in a row, wherever the row is cut."""
    length = stop - start
    ahead = _alike(tokens[start:], tokens[stop:], len(tokens) - stop)
    back = _alike(tokens[:start][::-1], tokens[:stop][::-1], start)
    return ahead + back >= length


def _grown(growth: Growth | Line, times: int) -> Pass:
    run = growth.run
    if isinstance(growth, Line):
        return pass_of(run).plus(growth.slope, times)
    parts: list[tuple[Array, Array]] = []
    done = 0
    for piece in growth.pieces:
        parts.append((run.sizes[done : piece.start], run.kinds[done : piece.start]))
        sizes, kinds = run.sizes[piece.start : piece.stop], run.kinds[piece.start : piece.stop]
        if piece.growth is None:
            parts.append((np.tile(sizes, times + 1), np.tile(kinds, times + 1)))
        else:
            parts.append((sizes + times * piece.growth, kinds))
        done = piece.stop
    parts.append((run.sizes[done:], run.kinds[done:]))
    sizes, kinds = (np.concatenate(each) for each in zip(*parts, strict=True))
    return pass_of(Stretch(run.phase, sizes, kinds, run.counts + growth.counts.times(times)))
