"""A run under Slurm whose ranks are killed again and again, at any moment, ends like an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench import kills
from bench.kills import Kill, look, moment, most_steps, phase_of, plan
from tests.helpers.runs import run_json, steps_of
from tests.helpers.slurm.jobs import QUICK, Sweep, rank_pids, wait_for
from tests.helpers.slurm.lab import Lab
from tests.helpers.slurm.shape import Shape
from tests.helpers.slurm.watched import again, apart, paced, taken, wrong_about
from tests.slurm.conftest import brought_up

RANKS, SAVE_EVERY, SEED = 4, 2, 6
RUN = (*QUICK, "parallel=ring2", "launch.nodes=2", "launch.nproc=2", "launch.rank_cpus=1", "train.batch_size=4",
       f"checkpoint.save_every={SAVE_EVERY}", "checkpoint.keep_last=2", "hydra.launcher.poll_seconds=1",
       "hydra.launcher.retries=1000")  # fmt: skip


@dataclass
class Series:
    """A run that is killed repeatedly, and what each kill hit."""

    lab: Lab
    sweep: Sweep
    steps: int
    whole: set[int] = field(default_factory=set)  # steps of the whole checkpoints
    phases: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # from each kill to the next start
    wrong: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.sweep.run_dir(0)

    def said(self, start: int) -> str:
        """Return the log of rank 0 and the batch script since that start of the job."""
        logs = list((self.sweep.folder / ".submitit").glob("*_0_log.err"))
        text = logs[0].read_text(encoding="utf-8", errors="replace") if logs else ""
        return text.partition(f"rlexp: start {start} of job")[2]

    def trains(self, start: int) -> bool:
        return " on cpu\n" in self.said(start)

    def strike(self, number: int, kill: Kill) -> None:
        """Wait for the moment, kill the rank, and wait until Slurm has started the job again."""
        ranks = wait_for(lambda: pids if len(pids := rank_pids(lab=self.lab)) == RANKS else {}, 180, self.sweep.told)
        if kill.aim == "start":
            time.sleep(kill.delay)
        else:
            wait_for(lambda: self.trains(number), 120, self.sweep.told)
            come = moment(self.run_dir, kill, lambda: self.sweep.process.poll() is not None)
            assert kills.wait_for(come, 60), self.sweep.told()  # looks a thousand times a second
            time.sleep(kill.delay)
        os.kill(ranks[kill.rank or 0], signal.SIGKILL)
        at = time.monotonic()
        trained = self.trains(number)
        wait_for(lambda: self.said(number + 1), 90, self.sweep.told)
        self.seconds.append(time.monotonic() - at)
        phase = phase_of(self.run_dir, trained)
        self.phases[phase] += 1
        self.whole, wrong = look(self.run_dir, self.whole)
        self.wrong += [f"kill {number} ({kill}): {each}" for each in wrong]
        sys.stderr.write(
            f"kill {number + 1}: rank {kill.rank}, {phase} (aim {kill.aim}), whole: {sorted(self.whole)}\n"
        )


def kill_often(lab: Lab, folder: Path, *, times: int, steps: int, seed: int) -> None:
    print(f"{times} kills, seed {seed}")
    draw = random.Random(seed)
    (folder / "killed").mkdir()
    (folder / "alone").mkdir()
    shape = (*RUN, f"train.max_steps={steps}")
    with Sweep(lab, folder / "alone", *shape) as alone:
        assert alone.wait(400) == 0, alone.told()
    with Sweep(lab, folder / "killed", *shape, **paced(0.1, folder / "killed")) as sweep:
        wait_for(lambda: sweep.jobs() and sweep.jobs()[0]["job_id"], 60, sweep.told)
        series = Series(lab, sweep, steps)
        for number in range(times):
            left = steps - max(series.whole, default=0)
            series.strike(number, plan(draw, 0, RANKS, most_steps(left, times - number), launcher=0.0))
        assert sweep.wait(300) == 0, sweep.told()
    assert series.wrong == []
    told = run_json(series.run_dir)
    assert [each["why"] for each in told["requeues"]] == ["retry"] * times
    assert wrong_about(alone.run_dir(0), series.run_dir) == []
    assert steps_of(series.run_dir) == list(range(1, steps + 1))
    repeated = again(taken(folder / "killed"))
    assert repeated <= times * (2 * SAVE_EVERY + 1)
    print(
        f"{dict(series.phases)}; steps taken again: {repeated}; loss and weights apart: "
        f"{apart(alone.run_dir(0), series.run_dir):.1e}; until the next start: at most {max(series.seconds):.0f} s"
    )


@pytest.fixture(scope="module")
def steady() -> Iterator[Lab]:
    """A lab with enough patience for a node to end a step. With less, the controller repeats the order half a minute
    later, and then hits the next start's step, which has the same number."""
    with brought_up(Shape(patience=10, name="steady")) as lab:
        yield lab


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_few_kills(steady: Lab, tmp_path: Path) -> None:
    kill_often(steady, tmp_path, times=3, steps=24, seed=SEED)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_twenty_kills(steady: Lab, tmp_path: Path) -> None:
    kill_often(steady, tmp_path, times=20, steps=120, seed=SEED)
