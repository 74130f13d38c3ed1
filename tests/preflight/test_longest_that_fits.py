"""The search for the longest sequence finds it with few rehearsals, and for the rank that holds most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rlexp.base.byte_counts import GIB
from rlexp.config.schema import Config
from rlexp.preflight import longest_that_fits as fit
from rlexp.preflight import predict
from rlexp.preflight.children import at_once
from rlexp.preflight.predict import Found, Prediction
from rlexp.preflight.rehearsal.log import ACTIVATIONS, OPTIMIZER, STORAGE_KINDS, TEMPORARIES, Counts, Log, Pass
from rlexp.training.model.loading import load_config
from rlexp.training.model.small import first_layers
from tests.helpers.rehearsals import MODELS, alone, elsewhere

ROOM = 76.6 * GIB  # of an h100
CFG = elsewhere("parallel=ring8", "launch.nproc=8", "engine=zero1")


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a run holds: always, at its optimizer step, and for each token."""

    held: float
    step: float
    token: float

    def at(self, tokens: int) -> Found:
        nothing = dict.fromkeys(STORAGE_KINDS, 0)

        def of(phase: str, **kinds: float) -> Pass:
            return Pass(phase, nothing | {name: int(size) for name, size in kinds.items()}, nothing, Counts())

        backward = of("backward", **{OPTIMIZER: self.held, ACTIVATIONS: self.token * tokens})
        optimizer = of("optimizer", **{OPTIMIZER: self.held, TEMPORARIES: self.step})
        return Found(Prediction([backward, optimizer], 32, 8), None, Log("cuda"))

    @property
    def longest(self) -> float:
        return (ROOM - self.held) / self.token


RUNS = {
    "the peak grows from the start": Memory(40 * GIB, 0, 200_000),
    "and leaves little room": Memory(74 * GIB, 0, 200_000),
    "and has hardly anything before": Memory(2 * GIB, 0, 40_000),
    "the optimizer's step is the peak of short sequences": Memory(40 * GIB, 20 * GIB, 200_000),
    "and of long ones": Memory(20 * GIB, 50 * GIB, 20_000),
    "nearly up to the limit": Memory(30 * GIB, 46 * GIB, 200_000),
}


def test_an_answer_keeps_its_length_where_a_prompt_has_room() -> None:
    cfg = dataclasses.replace(CFG, rollout=dataclasses.replace(CFG.rollout, max_new_tokens=9))
    assert [fit.with_length(cfg, length).rollout.max_new_tokens for length in (5, 10, 100)] == [4, 9, 9]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[fit.Longest, list[int]]]:
    def searched(memory: Memory, start: int, slope: float) -> tuple[fit.Longest, list[int]]:
        tried: list[int] = []

        def again(cfg: Config, *_: Any) -> Any:
            tried.append(cfg.data.max_length)
            yield []
            return memory.at(cfg.data.max_length)

        monkeypatch.setattr(fit, "predict_again", again)
        monkeypatch.setattr("rlexp.preflight.children.gc.collect", lambda: 0)  # before a fork, and here is none
        (longest,) = at_once([fit.fit_from(fit.with_length(CFG, start), None, memory.at(start), slope)], 1)
        return longest, tried

    return searched


@pytest.mark.parametrize("told", [0.0, 0.3, 1.0, 4.0], ids="{:g} of the slope is told".format)
@pytest.mark.parametrize("start", [512, 2048, 131072])
@pytest.mark.parametrize("name", RUNS)
def test_the_longest_is_found(search: Any, name: str, start: int, told: float) -> None:
    memory = RUNS[name]
    longest, tried = search(memory, start, told * memory.token)
    step = fit.STEP * CFG.parallel.ring_size
    assert memory.at(longest.tokens).prediction.peak.bytes <= ROOM
    assert longest.exact, tried
    assert longest.peak >= fit.CLOSE * ROOM or memory.longest - longest.tokens <= step
    assert len(tried) <= fit.TRIES


def test_the_longest_fits_on_the_rank_that_is_fuller_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-1 the last rank holds most of short sequences here, and the last but one of long ones."""
    ranks = {7: Memory(50 * GIB, 0, 20_000), 6: Memory(49 * GIB, 0, 25_000), 0: Memory(40 * GIB, 0, 20_000)}

    def predicted(cfg: Config, _model: Any, rank: int, *_: Any, **__: Any) -> Any:
        yield []
        found = ranks[rank].at(cfg.data.max_length)
        return dataclasses.replace(found, prediction=dataclasses.replace(found.prediction, rank=rank))

    monkeypatch.setattr(predict, "predict", predicted)
    start = fit.with_length(CFG, 8192)
    asked = dataclasses.replace(ranks[7].at(8192), prediction=dataclasses.replace(ranks[7].at(8192).prediction, rank=7))
    (longest,) = at_once([fit.fit_from(start, None, asked)], 1)
    least = min(memory.longest for memory in ranks.values())
    assert least == ranks[6].longest
    assert longest.tokens <= least
    assert ranks[6].at(longest.tokens).prediction.peak.bytes >= fit.CLOSE * ROOM


def by_rank(cfg: Config) -> tuple[list[int], int, int]:
    """Return each rank's peak for two layers of a model, and the peak that is predicted of a run, with its rank."""
    model = first_layers(load_config(cfg.model, cfg.data.max_length), 2)
    *each, shown = at_once([predict.predict(cfg, model, rank) for rank in (*range(cfg.parallel.world_size), None)], 2)
    return [found.prediction.peak.bytes for found in each], shown.prediction.peak.bytes, shown.prediction.rank


def test_the_rank_that_holds_most_is_shown() -> None:
    """With ZeRO-2 each has other parameters. Here the last but one holds most: 8 % more than rank 0."""
    shape = ("model=hf", f"model.path={MODELS / 'llama_8b'}", "memory.checkpointing=true", "data.max_length=4096")
    held, peak, rank = alone(by_rank, elsewhere(*shape, "engine=zero2", "parallel=ring2", "launch.nproc=4"))
    assert max(held) > 1.07 * held[0]
    assert (peak, rank) == (max(held), held.index(max(held))) == (held[2], 2)


def test_no_length_fits_where_none_does(search: Any) -> None:
    longest, _ = search(Memory(80 * GIB, 0, 100_000), 4096, 0.0)
    assert (longest.tokens, longest.exact) == (0, True)


def test_no_length_is_tried_that_is_far_longer_than_what_is_known() -> None:
    """While the peak is elsewhere than where sequences count, a line through what is known leads to any length."""
    step, longest = fit.STEP, fit.LONGEST

    def after(*known: int) -> int:
        return fit.Search(1 << 40, step, {length: {"step": 1000 + n} for n, length in enumerate(known)}).guess(0.0)

    assert after(step, 2 * step) == 2 * fit.LEAP * step
    assert after(step // 2) == fit.LEAP * step // 2
    assert after(longest // 4, longest // 2) == longest


@pytest.mark.parametrize("granule", [512, 4096])
def test_no_pair_is_tried_that_has_no_room_for_its_answers(granule: int) -> None:
    """Where not even the shortest pair fits that shares a prompt, whose answers have 1,024 tokens."""
    search = fit.Search(1000, granule, shorter=fit.ANSWERS)
    length = 4 * granule + fit.ANSWERS // granule * granule
    for _ in range(20):
        search.peaks[length] = {"backward": 2000 + length}
        if search.done:
            break
        length = search.guess(1.0)
    assert search.done
    assert search.best == 0
    assert fit.ANSWERS < min(search.peaks) <= fit.ANSWERS + granule


def both(cfg: Config) -> tuple[fit.Longest, fit.Longest]:
    """Find the longest sequence, and the longest pair that shares its prompt."""
    model = load_config(cfg.model, cfg.data.max_length)
    (asked,) = at_once([predict.predict(cfg, model)], 2)
    (longest,) = at_once([fit.fit_from(cfg, model, asked)], 2)
    (sharing,) = at_once([fit.fit_sharing(cfg, model, longest, asked)], 2)
    return longest, sharing


@pytest.mark.slow
def test_a_pair_that_shares_its_prompt_may_be_nearly_twice_as_long() -> None:
    """Where a sequence is, it is there twice. A shared prompt is there once, with two answers."""
    sizes = ("engine=torch", "parallel=ring2", "launch.nproc=2", "hardware.memory_gib=1", "hardware.reserve_gib=0",
             "data.max_length=8192")  # fmt: skip
    longest, sharing = alone(both, elsewhere(*sizes, "model.layers=2"))
    assert sharing.exact
    assert fit.CLOSE * fit.GIB < sharing.peak <= fit.GIB
    assert 1.8 * longest.tokens < sharing.tokens < 2.6 * longest.tokens
