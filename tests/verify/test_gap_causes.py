"""`verify` names why the log-probabilities of generated tokens are not those of training: one planted cause at a time,
in the product's own drawer (tests/helpers/planted_gaps.py). What a real vLLM does is in
tests/training/rollout/test_vllm_itself.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlexp.config.schema import Config
from rlexp.config.schema.rollouts import RolloutMode
from rlexp.verify.gap import CAUSE, GENERATES, NORMAL, TRAINED, UNEXPLAINED, Gap, diagnosed
from rlexp.verify.recording import DrawnSample
from rlexp.verify.report_gap import as_json, failure_of_gap, in_words
from tests.helpers.planted_gaps import PLANTS, STEPS, config_of, model_in, planted_rank
from tests.helpers.ranks import on_ranks

FAST = ("right", "temperature 1", "weights after step 1", "rounding of bf16", "padding in the answer", "no BOS")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PLANTS]


class Run:
    """A run of two steps, and samples of its next rollout by each planted drawer."""

    def __init__(self, place: Path, *more: str) -> None:
        self.cfg, self.weights = config_of(model_in(place / "model"), *more), place / "weights"
        self.samples: dict[str, list[DrawnSample]] = on_ranks(1, planted_rank, self.cfg, self.weights, list(PLANTS))[0]
        self.prompts = {sample.index: sample for sample in self.samples["right"]}
        self.found: dict[str, Gap] = {}

    def gap_of(self, name: str) -> Gap:
        if name not in self.found:
            self.found[name] = self.gap(self.samples[name])
        return self.found[name]

    def gap(self, samples: list[DrawnSample], cfg: Config | None = None) -> Gap:
        return diagnosed(cfg or self.cfg, samples, STEPS, self.weights, self.prompts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="module")
def run_in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("bf16"), "train.precision=bf16")


def report(run: Run, gap: Gap) -> str:
    return "\n".join(in_words(run.cfg, gap))


@pytest.mark.parametrize("name", EACH)
def test_each_cause_is_named(run: Run, name: str) -> None:
    gap = run.gap_of(name)
    generates, trained = gap.sides
    assert (generates.who, trained.who, trained.verdict) == (GENERATES, TRAINED, NORMAL)
    failure = failure_of_gap(run.cfg, gap, 3)
    if name == "right":
        assert (generates.verdict, generates.cause, gap.strayed, gap.normal) == (NORMAL, None, 0, True)
        assert gap.of_generating < 1e-4
        assert failure is None
        assert "each token is the one that its random number chooses" in report(run, gap)
        return
    assert (generates.verdict, generates.cause, gap.normal) == (CAUSE, name, False)
    assert gap.of_generating > 0.01
    assert failure is not None
    assert (failure.got, failure.module) == (name, "rlexp/training/rollout/")
    assert generates.words in report(run, gap)
    assert as_json(gap)["sides"][0]["cause"] == name


def test_words_have_the_numbers(run: Run) -> None:
    words = report(run, run.gap_of("temperature 1"))
    assert "native, cause: its log-probabilities are those of temperature 1, and rollout.temperature=0.7" in words
    assert "ruled out: " in words


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANTS if "bf16" not in name])
def test_each_cause_is_named_in_bf16(run_in_bf16: Run, name: str) -> None:
    generates, trained = run_in_bf16.gap_of(name).sides
    assert trained.verdict == NORMAL
    assert generates.cause == (None if name in ("right", *generates.blind) else name)
    assert len(generates.blind) < 3


def test_a_pipelined_run_draws_by_weights_that_are_one_rollout_old(run: Run) -> None:
    rollout = replace(run.cfg.rollout, mode=RolloutMode.pipelined)
    pipelined = replace(run.cfg, rollout=rollout)
    gap = run.gap(run.samples["weights after step 1"], pipelined)
    assert gap.normal
    assert gap.of_age > 0.1
    ahead = run.gap(run.samples["right"], pipelined).sides[0]
    assert (ahead.verdict, ahead.cause) == (CAUSE, "weights after step 2")
    assert "1 rollout newer than they must be" in ahead.words


def test_the_side_that_is_wrong_is_named(run: Run) -> None:
    """The scoring pass has no temperature, and the tokens are not those that the numbers choose."""
    swapped = [replace(each, old=each.behaviour, behaviour=each.old) for each in run.samples["temperature 1"]]
    gap = run.gap(swapped)
    assert [side.verdict for side in gap.sides] == [NORMAL, CAUSE]
    assert gap.sides[1].cause == "temperature 1"
    assert gap.strayed > 5
    assert f"{gap.strayed} of " in report(run, gap)


def test_what_nothing_explains_is_said_with_its_first_token(run: Run) -> None:
    samples = [replace(each, behaviour=each.behaviour.copy()) for each in run.samples["right"]]
    samples[3].behaviour[2] -= 0.5
    gap = run.gap(samples)
    side = gap.sides[0]
    assert (side.verdict, side.cause, gap.normal) == (UNEXPLAINED, None, False)
    assert side.first is not None
    assert (side.first.place, side.first.at, side.first.parting) == (3, 2, 1)
    assert side.first.expected - side.first.got == pytest.approx(0.5, abs=1e-3)
    assert "token 2 of sample 3" in report(run, gap)
    generator = np.random.default_rng(0)
    noisy = [replace(each, behaviour=each.behaviour + generator.normal(0, 0.3, len(each.behaviour)))
             for each in run.samples["right"]]  # fmt: skip
    assert run.gap(noisy).sides[0].verdict == UNEXPLAINED


@pytest.mark.parametrize("shift", ["before", "after"])
def test_values_of_neighbours_are_named(run: Run, shift: str) -> None:
    moved = [replace(each, behaviour=np.roll(each.behaviour, 1 if shift == "before" else -1))
             for each in run.samples["right"]]  # fmt: skip
    gap = run.gap(moved)
    assert gap.sides[0].cause == f"token {shift}"


def test_other_prompts_are_named(run: Run) -> None:
    """The samples themselves have other prompts than the reference tokenizes."""
    twice = [replace(each, old=each.behaviour, prompt=np.concatenate((each.prompt[:1], each.prompt)))
             for each in run.samples["BOS twice"]]  # fmt: skip
    gap = run.gap(twice)
    assert gap.sides[0].verdict == NORMAL
    assert not gap.normal
    assert "it has a 0 too many at its beginning" in gap.prompts[0]
    failure = failure_of_gap(run.cfg, gap, 1)
    assert failure is not None
    assert failure.module == "rlexp/training/dataset/"
    less = [replace(each, prompt=each.prompt[1:]) for each in run.samples["no BOS"]]
    assert "it lacks the first, 0" in run.gap(less).prompts[0]


def test_the_values_are_those_of_the_rows(run: Run) -> None:
    samples = run.samples["temperature 1"]
    gaps = [abs(float(a) - float(b)) for each in samples for a, b in zip(each.old, each.behaviour, strict=True)]  # type: ignore[arg-type]
    gap = run.gap_of("temperature 1")
    assert gap.values["sampling/sampling_logp_difference/mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
    assert gap.values["sampling/sampling_logp_difference/max"] == max(gaps)
    assert (gap.tokens, gap.compared, gap.samples, gap.rollout) == (len(gaps), len(gaps), 8, STEPS + 1)
