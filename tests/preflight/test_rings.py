"""Each ring that the ranks could make is predicted as if it had been asked for, and none of them twice."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rlexp.config.checks.micro_batches import at_once as held_at_once
from rlexp.config.schema import Config
from rlexp.config.sizes import OF_A_WORLD
from rlexp.preflight import rings
from rlexp.preflight.children import at_once
from rlexp.preflight.longest_that_fits import with_length
from rlexp.preflight.predict import Found, Prediction, predict
from rlexp.preflight.rehearsal.log import ACTIVATIONS, STORAGE_KINDS, Counts, Log, Pass
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan
from rlexp.training.model.loading import load_config
from tests.helpers.rehearsals import GPU, alone, elsewhere

SMALL = ("engine=torch", "launch.nproc=2", "parallel.cut=auto", "hardware.memory_gib=0.3", "hardware.reserve_gib=0",
         "train.batch_size=4")  # fmt: skip
ELASTIC = ("parallel=elastic", *SMALL)


def shown(words: tuple[str, ...]) -> tuple[list[rings.OnRing], dict[str, Prediction], set[tuple[int, int]]]:
    """Return the rings of a run, what is predicted of a fixed ring that is asked for itself, and the rings and lengths
    that were rehearsed for the first."""
    for name in OF_A_WORLD:  # this process has been a rank
        os.environ.pop(name, None)
    cfg = elsewhere(*words)
    model = load_config(cfg.model, cfg.data.max_length)
    fixed = [elsewhere(*words, f"parallel.ring_size={size}") for size in (1, 2)]
    asked, *direct = at_once([predict(each, model) for each in (cfg, *fixed)], 2)
    rehearsed = set[tuple[int, int]]()

    def watch(running: Any, _done: int) -> None:
        plans = [plan for _, (plan, *_) in running if isinstance(plan, RehearsalPlan)]
        rehearsed.update((plan.cfg.parallel.ring_size, plan.cfg.data.max_length) for plan in plans)

    (found,) = at_once([rings.rings_of(cfg, model, [*GPU, *words], asked, wanted=True)], 2, watch)
    return [*found], dict(zip("12", (each.prediction for each in direct), strict=True)), rehearsed


def test_each_ring_is_predicted_as_if_it_were_asked_for() -> None:
    found, direct, rehearsed = alone(shown, ELASTIC)
    assert [(ring.name, ring.own, ring.refused) for ring in found] == [
        ("1", False, None), ("2", False, None), ("elastic", True, None),
    ]  # fmt: skip
    one, two, elastic = found
    for ring in (one, two):
        assert ring.asked.peak.bytes == direct[ring.name].peak.bytes
        assert ring.asked.seconds == pytest.approx(direct[ring.name].seconds)
    assert one.asked.peak.bytes != two.asked.peak.bytes
    assert elastic.asked.peak.bytes == two.asked.peak.bytes  # widths belong to a fixed ring too
    assert elastic.longest == two.longest
    assert elastic.longest.tokens > 1.5 * one.longest.tokens
    assert (1, 512) in rehearsed
    assert (2, 512) not in rehearsed  # the run's own prediction is that of both rows


def test_rings_that_differ_in_more_than_their_name_are_no_copies() -> None:
    fixed = ("parallel=ring2", *SMALL)
    assert rings.alike(elsewhere(*ELASTIC), elsewhere(*fixed))
    assert not rings.alike(elsewhere(*ELASTIC), elsewhere(*fixed, "parallel.cut=all"))
    assert not rings.alike(elsewhere(*ELASTIC), elsewhere(*fixed, "train.max_tokens_per_micro_batch=2048"))
    assert not rings.alike(elsewhere("parallel=ring1", *SMALL), elsewhere(*fixed))


def test_a_ring_of_one_is_not_elastic() -> None:
    assert rings.names_of(1) == ["1"]
    assert rings.names_of(6) == ["1", "2", "elastic"]


@pytest.mark.parametrize(("room", "tokens"), [(20_000, 16_384), (9_000, 8_192), (100, 1_024)])
def test_a_ring_takes_fewer_tokens_at_once_where_the_usual_ones_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, room: int, tokens: int
) -> None:
    """As a run does that asks for that ring."""
    nothing = dict.fromkeys(STORAGE_KINDS, 0)

    def predicted(cfg: Config, *_: Any) -> Any:
        yield []
        held = nothing | {ACTIVATIONS: held_at_once(cfg).tokens or 0}
        return Found(Prediction([Pass("backward", held, nothing, Counts())], 2, 1), None, Log("cuda"))

    monkeypatch.setattr(rings, "predict_fuller", predicted)
    monkeypatch.setattr("rlexp.preflight.children.gc.collect", lambda: 0)  # before a fork, and here is none
    cfg = elsewhere("parallel=ring1", "launch.nproc=1", "train.batch_size=64")
    start = rings._Start(cfg, with_length(cfg, 4096))
    near: Any = Found(Prediction([], 2, 1), None, Log("cuda"))
    (here,) = at_once([rings._at_asked(start, None, near, room)], 1)
    assert here.peak.bytes == tokens
