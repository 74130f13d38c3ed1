"""Many layers follow from a few: events are laid side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from rlexp.preflight.align import Line, NotAlikeError, grown, grown_like, growth_of
from rlexp.preflight.predict import Prediction
from rlexp.preflight.rehearsal.layers import Cycle, cycle
from rlexp.preflight.rehearsal.log import Log, Pass, passes

MIB = 1 << 20


def log_of(*phases: tuple[str, Sequence[int]], layers: int = 0) -> Log:
    """Write a log of events in MiB; each event is a storage of its own."""
    log, numbers = Log("cpu", layers=layers), itertools.count()
    for phase, sizes in phases:
        log.enter(phase)
        for size in sizes:
            log.changed(next(numbers), "cpu", size * MIB)
    return log


def model(layers: int, tokens: int = 1) -> Log:
    """A flat buffer for all, work that keeps something of each layer, and an end whose need grows with the layers."""
    forward = [7 * tokens, *[30 * tokens, -25 * tokens] * layers, 9 * tokens]
    end = [100, -100, *[-5 * tokens] * layers, *[11, 13] * layers, *[-11, -13] * layers]
    return log_of(("build", [3, 4 * layers, 2]), ("forward", forward), ("backward", end))


def peaks(found: Sequence[Pass]) -> list[int]:
    return [sum(each.highest.values()) // MIB for each in found]


def test_the_peak_is_found_where_it_moves_to() -> None:
    """With 4 layers the end's peak is its first event, with 40 it is the loop over all layers."""
    growth = growth_of(model(3), model(4), lines=False)
    assert peaks(grown(growth, 36)) == peaks(passes(model(40)))
    assert peaks(passes(model(40)))[3] > 100 > peaks(passes(model(4)))[3] - 1


def test_another_length_follows_from_one_log() -> None:
    growth = growth_of(model(3), model(4), lines=False)
    assert peaks(grown_like(model(4, tokens=6), growth, 36)) == peaks(passes(model(40, tokens=6)))


def test_layers_that_differ_are_refused_or_go_on_along_a_line() -> None:
    one = log_of(("forward", [1, 20, -19, 5]), layers=1)
    other = log_of(("forward", [1, 20, -19, 33, -31, 5]), layers=2)
    with pytest.raises(NotAlikeError):
        growth_of(one, other, lines=False)
    _, begin, line, end = growth_of(one, other, lines=True)
    assert isinstance(line, Line)
    assert [len(each.run.sizes) for each in (begin, line, end)] == [2, 3, 1]
    with pytest.raises(NotAlikeError):
        grown_like(other, [line, line], 1)


def uneven(layers: int) -> Log:
    """Layers whose sizes are others in each model, and which need a lot for a moment; an end that needs more."""
    each = [size for place in range(layers) for size in (layers + place, 40, -40, 4 - layers - place)]
    return log_of(("backward", [60, -60, *each, 70]), layers=layers)


def test_peaks_behind_and_between_layers_that_differ_are_found() -> None:
    """What each layer keeps lifts the end, which is no peak with few layers; and no layer's moment is counted twice."""
    growth = growth_of(uneven(3), uneven(4), lines=True)
    assert [type(each).__name__ for each in growth] == ["Growth", "Growth", "Line", "Growth"]
    found = grown(growth, 36)
    (whole,) = passes(uneven(40))[1:]
    assert sum(sum(each.net.values()) for each in found) == sum(uneven(40).sizes)
    assert Prediction(found, 40, 1).peak.bytes == sum(whole.highest.values())
    few = grown(growth_of(uneven(3), uneven(4), lines=True), 0)
    assert Prediction(few, 4, 1).peak.bytes == sum(passes(uneven(4))[1].highest.values())


@pytest.mark.parametrize(
    ("kinds", "expected", "few"),
    [
        ("aaaaaaaa", Cycle(0, 1), 2),
        ("sssssfsssssfss", Cycle(0, 6), 8),
        ("ddmmmmmmmm", Cycle(2, 1), 4),
        ("sfsfsfsfsf", Cycle(0, 2), 2),
    ],
)
def test_the_period_of_layers(kinds: str, expected: Cycle, few: int) -> None:
    assert cycle(list(kinds)) == expected
    found = list(expected.few(len(kinds), 2))
    assert all((len(kinds) - each) % expected.period == 0 for each in found)
    assert found == [] or found[0] == few
