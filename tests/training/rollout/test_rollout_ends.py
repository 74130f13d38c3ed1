"""Runs that draw their own samples: how they stop, what they save, and what they do not hold."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlexp.base.errors import DrawError, NonFiniteError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch import watch
from rlexp.launch.joining import RankSpec, join, launch_on
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.run_files import checkpoint_folder as checkpoint
from rlexp.training.rollout import saved
from rlexp.training.train.build import build
from rlexp.training.train.rollout_supply import NEXT, NOW
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.types import CreditedSample, Example, Sample
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.ranks import on_ranks
from tests.helpers.rollout_runs import PIPELINED
from tests.helpers.runs import run_json, wait_for_steps


def test_a_pipelined_run_that_is_asked_to_stop_saves_what_is_being_drawn(tmp_path: Path) -> None:
    """The sampling ranks receive the signal too, and the checkpoint waits for them."""
    args = [
        *PIPELINED,
        "hydra.run.dir=run",
        "train.max_steps=100000",
        "checkpoint.save_every=null",
        "train.eval_every=null",
    ]
    process = warm.start("rlexp", args, tmp_path)
    wait_for_steps(tmp_path, process, 3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 143, said
    assert run_json(tmp_path / "run")["reason"] == "stopped by SIGTERM"
    [last] = checkpoint.latest_first(tmp_path / "run")
    assert (last / "rollout-next-00000-of-00001.npz").exists()


def sample(place: int) -> Sample:
    prompt = Example(place, np.array([1, 2], dtype=np.int32), origin="test", text="p")
    answer = np.array([3, 4, 5], dtype=np.int32)
    return Sample(place=place, example=prompt, number=0, answer=answer, stopped=True, text="a", behaviour=np.zeros(3))


def test_texts_take_what_they_take(tmp_path: Path) -> None:
    """One long answer does not pad all others to its length, and every text that a tokenizer decodes is restored."""
    texts = ["x" * 10_000, "", "\0 a\0", "é\ud800", *["short"] * 996]
    drawn = [dataclasses.replace(sample(place), text=text) for place, text in enumerate(texts)]
    known: Any = {"terms": {}, "counts": True, "old": np.zeros(3), "advantages": np.ones(3)}
    samples = [CreditedSample(**vars(each), **known, score=each.place / 3) for each in drawn]
    path = saved.write(tmp_path, NOW, 0, 1, samples)
    assert path.stat().st_size < 250_000
    again = saved.credited(tmp_path, NOW, [each.example for each in drawn], 0, 1)
    assert [each.text for each in again] == texts
    assert [each.score for each in again] == [place / 3 for place in range(len(texts))]
    assert again[5].advantages.tolist() == [1.0, 1.0, 1.0]
    saved.write(tmp_path, NEXT, 0, 1, drawn)
    assert [each.text for each in saved.drawn(tmp_path, NEXT, [each.example for each in drawn], 0, 1)] == texts


def test_a_rank_that_cannot_draw_is_not_taken_for_all() -> None:
    """A NonFiniteError leads to a collective call that completes the checkpoint; a DrawError may hit one rank only."""
    assert not issubclass(DrawError, NonFiniteError)


def has_reference(spec: RankSpec, cfg: Config) -> bool:
    task = build(cfg, around=UNPROBED)
    task.close()
    return task.rollouts.scorer.reference is not None


@pytest.mark.parametrize(("beta", "there"), [(0.0, False), (0.05, True)])
def test_no_reference_is_held_that_nothing_asks(beta: float, there: bool) -> None:
    cfg = compose_config(["launch.device=cpu", "logger=none", "engine=torch", "loss=grpo", f"loss.beta={beta}",
                          "reward.rule=length", "data.size=16", "rollout.max_new_tokens=4"])  # fmt: skip
    assert on_ranks(1, has_reference, cfg) == [there]


def test_too_few_prompts_are_refused(rlexp: Shell) -> None:
    answer = rlexp(*PIPELINED, "rollout=default", "data.size=2")
    assert answer.returncode == 1
    said = "the data set has 2 prompts, less than one batch. Use rollout.batch_size=2 or less, or more data."
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_rollout_that_has_begun_keeps_its_size(rlexp: Shell) -> None:
    """resume.force cannot change the size: the checkpoint holds the samples and the steps they serve."""
    run = (*PIPELINED, "rollout=default", "hydra.run.dir=run")
    begun = rlexp(*run, "train.stop_after=1")
    assert begun.returncode == 0, begun.stderr
    again = rlexp(*run, "rollout.n_samples=4", "resume.force=[rollout]")
    assert again.returncode == 1
    assert "has samples of a rollout of 8 for 4 optimizer steps, and a rollout is now of 16 for 8." in again.stderr
    assert "Traceback" not in again.stderr


def patient_rank(spec: RankSpec, cfg: Config, seconds: float) -> float:
    """Return the first step's score, where one rank draws its share longer than a collective may take."""
    task = build(cfg, around=UNPROBED)
    drawn = task.rollouts.source.draw

    def slowly(*args: Any) -> list[Sample]:
        for _ in range(int(seconds) * spec.rank):
            time.sleep(1.0)
            watch.note()  # as each layer does
        return drawn(*args)

    task.rollouts.source.draw = slowly  # type: ignore[method-assign]
    score = train_step(task, 1)["train/objective/scores"]
    task.close()
    return score


def impatient(spec: RankSpec, cfg: Config, seconds: float) -> float:
    join(spec, launch_on("cpu", 15.0))
    return patient_rank(spec, cfg, seconds)


@pytest.mark.slow
def test_a_rank_that_takes_longer_to_draw_is_waited_for() -> None:
    cfg = compose_config(["launch.device=cpu", "logger=none", "engine=torch", "loss=rloo", "parallel=ring2",
                          "reward.rule=length", "data.size=16", "rollout.max_new_tokens=4"])  # fmt: skip
    scores = run_ranks(impatient, 2, (cfg, 20.0), preload=PRELOAD, timeout=240)
    assert scores[0] == scores[1] > 0
