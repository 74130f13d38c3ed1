"""Jobs that are stopped, requeued or lost go on where they were, and draw the curve of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.curves import within
from rlexp.run_files.curve_distance import compared
from rlexp.training.sinks.wandb_access import read_offline
from tests.helpers.runs import jobs_of, rows_of, run_json, steps_of
from tests.helpers.slurm.jobs import QUICK, Sweep, wait_for
from tests.helpers.slurm.lab import Lab
from tests.helpers.slurm.shape import Shape
from tests.helpers.slurm.table import write_row
from tests.helpers.slurm.watched import Taken, again, apart, paced, starts, taken, waited, wrong_about
from tests.helpers.wandb_server import WandbServer
from tests.slurm.conftest import brought_up

STEPS, SAVE_EVERY, FIRST = 40, 4, 6  # nothing is disturbed before this step
PACE = 0.25
RUN = (*QUICK, "parallel=ring2", "launch.nodes=2", "launch.nproc=1", "launch.rank_cpus=4", "launch.time_limit=30m",
       "launch.grace_seconds=15", "train.batch_size=2", f"train.max_steps={STEPS}", "train.eval_every=8",
       f"checkpoint.save_every={SAVE_EVERY}", "data.eval_size=8", "hydra.launcher.poll_seconds=1")  # fmt: skip


# Three time limits. Two are Slurm's, of 3 minutes, so that a slow machine can begin: the ranks stop after a minute by
# the clock, or at Slurm's signal half a minute later. The third is set in the batch script. The run needs over two
# starts.
LIMIT = ("launch.time_limit=3m", "launch.grace_seconds=90")
BY_THE_CLOCK = (*LIMIT, "+hydra.launcher.additional_parameters.signal=CONT@1")
BY_THE_SIGNAL = (*LIMIT, "hydra.launcher.signal_delay_s=60", "+hydra.launcher.environment.SLURM_JOB_END_TIME=''")
SOON = ("hydra.launcher.setup=['export SLURM_JOB_END_TIME=$(($(date +%s)+85))']",)  # the ranks stop 40 s before it
LIMITS = {
    "clock": "whose end rlexp reads from `SLURM_JOB_END_TIME`; Slurm sends no signal",
    "signal": "whose end rlexp is not told; Slurm sends a signal 60 seconds before it",
}
OFTEN = {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}  # seconds; with the default, 15, a killed run sends nothing
RINGS = ("train.max_steps=4", "train.batch_size=8")
Row = dict[str, object]


@dataclass
class Disturbed:
    """A job of a sweep that is disturbed."""

    lab: Lab
    sweep: Sweep
    number: int

    @property
    def job(self) -> str:
        return str(self.sweep.jobs()[self.number]["job_id"])

    @property
    def run_dir(self) -> Path:
        return self.sweep.run_dir(self.number)

    def taken(self) -> list[Taken]:
        return taken(self.sweep.folder.parent, self.job)

    def nodes(self) -> list[str]:
        """Return the job's nodes. The batch script runs on the first."""
        hosts = self.lab.run("squeue", "--noheader", f"--jobs={self.job}", "--format=%N")
        return self.lab.run("scontrol", "show", "hostnames", hosts).splitlines()

    def wait_for_step(self, step: int, start: int = 0) -> None:
        """Wait until the run has computed this step, in this start or a later one."""
        there = lambda: [each for each in self.taken() if each.step >= step and each.start >= start]  # noqa: E731
        wait_for(there, 180, self.sweep.told)

    def wait_for_more(self, steps: int, start: int) -> None:
        """Wait until the run has computed so many more steps in this start."""
        before = len(self.taken())
        wait_for(lambda: [each for each in self.taken()[before:] if each.start == start][steps:], 180, self.sweep.told)


def warned(run: Disturbed) -> None:
    run.lab.run("scancel", "--signal=USR2", run.job)


def terminated(run: Disturbed) -> None:
    run.lab.run("scancel", "--signal=TERM", run.job)


def put_back(run: Disturbed) -> None:
    run.lab.run("scontrol", "requeue", run.job)


def preempted(run: Disturbed) -> None:
    run.lab.run("sbatch", "--partition=high", f"--nodelist={','.join(run.nodes())}", "--nodes=2", "--exclusive",
                "--output=/dev/null", "--time=1", "--wrap=sleep 2")  # fmt: skip


def slurmd_restarted(run: Disturbed) -> None:
    nodes = run.nodes()
    for node in nodes:
        run.lab.stop_slurmd(node)
    time.sleep(3)
    for node in nodes:
        run.lab.start_node(node)


def first_node_lost(run: Disturbed) -> None:
    run.lab.lose_node(run.nodes()[0])


def second_node_lost(run: Disturbed) -> None:
    run.lab.lose_node(run.nodes()[1])


@dataclass(frozen=True)
class Way:
    """A way to disturb a job, and what must follow."""

    does: Callable[[Disturbed], None]
    why: tuple[str, ...]  # allowed reasons in run.json's requeues
    lost: int  # steps that may be computed again


WAYS = {
    "slurmd killed and back": Way(slurmd_restarted, (), 0),
    "second node lost": Way(second_node_lost, ("slurm", "lost"), SAVE_EVERY),
    "SIGTERM, sent with `scancel`": Way(terminated, ("stop",), 0),
    "pre-emption": Way(preempted, ("stop",), 0),
    "first node lost": Way(first_node_lost, ("slurm", "lost"), SAVE_EVERY),
    "scontrol requeue": Way(put_back, ("slurm", "stop"), SAVE_EVERY),
    # Must be last: an array's last task has the array's number, and requeueing it must not requeue the whole array.
    "SIGUSR2, sent with `scancel`": Way(warned, ("stop",), 0),
}
LATER = [*WAYS][:5]  # in the longer tier, since the others cover much of the same code


@pytest.fixture(scope="module")
def pairs() -> Iterator[Lab]:
    """A pair of nodes for every job, and spare nodes to restart on."""
    with brought_up(Shape(nodes=2 * len(WAYS) + 6, cpus=4, gpus=0, grace=25, name="pair")) as lab:
        yield lab


@pytest.mark.table
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ways", [[*WAYS][len(LATER) :], pytest.param(LATER, marks=pytest.mark.prove)], ids=["some", "rest"]
)
def test_every_way_back_into_the_queue(pairs: Lab, tmp_path: Path, ways: list[str]) -> None:
    """One sweep whose jobs are equal runs. The first is left alone, each other one is disturbed in its own way. The
    longer tier adds a job whose time is up again and again."""
    keeps = ",".join(str(2 + number) for number in range(len(ways) + 1))  # tells the jobs apart
    limited = tmp_path / "limited"
    limited.mkdir()
    with WandbServer() as server, ExitStack() as sweeps:
        shared = (*RUN, "logger=wandb")
        sent = server.environment | OFTEN
        sweep = sweeps.enter_context(
            Sweep(pairs, tmp_path, *shared, f"checkpoint.keep_last={keeps}", **paced(PACE, tmp_path), **sent)
        )
        by_the_clock = None
        if ways == LATER:
            by_the_clock = sweeps.enter_context(Sweep(pairs, limited, *shared, *SOON, **paced(2.2, limited), **sent))
        wait_for(lambda: len(ids(sweep)) > len(ways), 60, sweep.told)
        runs = {name: Disturbed(pairs, sweep, number) for number, name in enumerate(ways, 1)}
        with ThreadPoolExecutor(len(runs)) as together:
            struck = dict(zip(runs, together.map(disturb, runs.values(), (WAYS[name] for name in ways)), strict=True))
        assert sweep.wait(300) == 0, sweep.told()
        undisturbed = Disturbed(pairs, sweep, 0)
        expect_undisturbed(undisturbed)
        rows = [expect(name, runs[name], struck[name], undisturbed.run_dir, server) for name in ways]
        if by_the_clock is not None:
            assert by_the_clock.wait(300) == 0, by_the_clock.told()
            again_and_again = Disturbed(pairs, by_the_clock, 0)
            path = "`SLURM_JOB_END_TIME` is set to 85 seconds after each start"
            rows.append(expect_limits(path, again_and_again, undisturbed.run_dir))
            expect_history(server, again_and_again.run_dir)
    hand_over(rows)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_time_limits_of_slurm(pairs: Lab, tmp_path: Path) -> None:
    """One job knows its end time and gets no signal; the other gets a signal and does not know its end time."""
    for name in ("alone", "clock", "signal"):
        (tmp_path / name).mkdir()
    with (
        Sweep(pairs, tmp_path / "alone", *RUN) as straight,
        Sweep(pairs, tmp_path / "clock", *RUN, *BY_THE_CLOCK, **paced(3.2, tmp_path / "clock")) as clock,
        Sweep(pairs, tmp_path / "signal", *RUN, *BY_THE_SIGNAL, **paced(6.0, tmp_path / "signal")) as signalled,
    ):
        assert straight.wait(200) == 0, straight.told()
        assert clock.wait(800) == 0, clock.told()
        assert signalled.wait(800) == 0, signalled.told()
    undisturbed, expected = straight.run_dir(0), {"clock": "stopped as its time", "signal": "stopped by SIGUSR2"}
    hand_over([
        expect_limits(f"time limit of 3 minutes, {LIMITS[name]}", Disturbed(pairs, sweep, 0), undisturbed,
                      expected[name])
        for name, sweep in {"clock": clock, "signal": signalled}.items()
    ])  # fmt: skip


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_one_after_the_other_in_one_run(pairs: Lab, tmp_path: Path) -> None:
    alone, longer = tmp_path / "alone", (*RUN, f"train.max_steps={12 * len(WAYS)}")
    alone.mkdir()
    own = paced(PACE, tmp_path) | {"WANDB_MODE": "offline"}
    with Sweep(pairs, alone, *longer) as straight, Sweep(pairs, tmp_path, *longer, "logger=wandb", **own) as sweep:
        wait_for(lambda: ids(sweep), 60, sweep.told)
        run, start, lost = Disturbed(pairs, sweep, 0), 0, 0
        for way in WAYS.values():
            run.wait_for_more(4, start)
            way.does(run)
            start, lost = start + bool(way.why), lost + way.lost
            for node in pairs.shape.node_names:
                if not pairs.is_running(node):
                    pairs.start_node(node)
        assert sweep.wait(300) == 0, sweep.told()
        assert straight.wait(10) == 0
    assert wrong_about(straight.run_dir(0), run.run_dir) == []
    assert again(run.taken()) <= lost
    assert starts(run.taken()) == [*range(start + 1)]
    (kept,) = read_offline(run.run_dir)
    assert [row["step"] for row in kept.rows] == steps_of(run.run_dir)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("ranks", [pytest.param(4, marks=pytest.mark.short), pytest.param(8, marks=pytest.mark.prove)])
def test_the_ring_sweep_draws_one_curve_with_the_local_one(pairs: Lab, tmp_path: Path, ranks: int) -> None:
    """Rings of 1, 2, 4 and 8, and one of all ranks, on two nodes, two jobs at a time; a ring that the ranks do not fill
    is skipped. The local launcher runs the smallest and the largest ring too."""
    here = subprocess.Popen(
        [sys.executable, "-m", "rlexp", "-m", f"parallel=ring1,ring{ranks}", "hydra.sweep.dir=local", *QUICK, *RINGS],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    nodes = ("launch.nodes=2", f"launch.nproc={ranks // 2}", "launch.rank_cpus=1", "hydra.launcher.array_parallelism=2")
    with Sweep(pairs, tmp_path, "+sweep=ring_sizes", *QUICK, *RINGS, *nodes) as sweep:
        assert sweep.wait(400) == 0, sweep.told()
    assert here.communicate(timeout=200)[1] is not None
    assert here.returncode == 0
    sizes = {"ring1": 1, "ring2": 2, "ring4": 4, "ring8": 8, "elastic": ranks}
    for job, (name, size) in zip(sweep.jobs(), sizes.items(), strict=True):
        assert (job["label"], job["status"]) == (name, "finished" if size <= ranks else "skipped")
        if size > ranks:
            continue
        for local in jobs_of(tmp_path / "local"):
            assert wrong_about(tmp_path / "local" / local["folder"], sweep.folder / job["folder"]) == []
        assert run_json(sweep.folder / job["folder"])["sizes"]["world_size"] == ranks
    assert (sweep.folder / "report.html").exists()
    summary = json.loads((sweep.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"]["status"] == "agree", summary["verdict"]


def ids(sweep: Sweep) -> list[str]:
    return [job["job_id"] for job in sweep.jobs() if job["job_id"]]


def disturb(run: Disturbed, way: Way) -> float:
    """Disturb the run after its first steps. Return when, in seconds since 1970."""
    run.wait_for_step(FIRST)
    at = time.time()
    way.does(run)
    return at


def expect_undisturbed(run: Disturbed) -> None:
    assert [each.step for each in run.taken()] == [*range(1, STEPS + 1)]
    assert starts(run.taken()) == [0]
    assert "requeues" not in run_json(run.run_dir)


def expect(name: str, run: Disturbed, at: float, undisturbed: Path, server: WandbServer) -> Row:
    """Check that what followed is what the way promises. Return the row of the table."""
    way, steps, told = WAYS[name], run.taken(), run_json(run.run_dir).get("requeues", [])
    assert wrong_about(undisturbed, run.run_dir) == [], name
    assert starts(steps) == ([0, 1] if way.why else [0]), name
    assert len(told) == bool(way.why), (name, told)
    assert all(each["why"] in way.why and each["step"] >= FIRST - SAVE_EVERY for each in told), (name, told)
    assert again(steps) <= way.lost, name
    expect_history(server, run.run_dir)
    return {"path": name, "lost": again(steps), "most": way.lost, "restarts": len(told),
            "why": [each["why"] for each in told], "seconds": round(waited(steps, at, len(told)), 1),
            "apart": apart(undisturbed, run.run_dir)}  # fmt: skip


def expect_limits(name: str, run: Disturbed, undisturbed: Path, said: str = "stopped as its time") -> Row:
    """Check that the time was up at least twice, and that the run stopped in good order each time."""
    logs = [path.read_text() for path in (run.sweep.folder / ".submitit").glob("*_0_log.err")]
    assert sum(text.count(f"rlexp: stopped: {said}") for text in logs) == len(run_json(run.run_dir)["requeues"])
    steps, told = run.taken(), run_json(run.run_dir)["requeues"]
    assert wrong_about(undisturbed, run.run_dir) == [], name
    assert [each.step for each in steps] == [*range(1, STEPS + 1)], name
    assert starts(steps) == [*range(len(told) + 1)], name
    assert len(told) >= 2, told
    assert {each["why"] for each in told} == {"stop"}
    seen = sorted({each.start: each.at for each in steps}.items())
    gaps = [min(each.at for each in steps if each.start == start + 1) - last for start, last in seen[:-1]]
    return {"path": name, "lost": again(steps), "most": 0, "restarts": len(told), "why": ["stop"] * len(told),
            "seconds": round(max(gaps), 1), "apart": apart(undisturbed, run.run_dir)}  # fmt: skip


def expect_history(server: WandbServer, run_dir: Path) -> None:
    """Check that W&B received every step once, in order, with the values of the curve."""
    sent, rows = server.stored[run_json(run_dir)["wandb_id"]].rows, rows_of(run_dir)
    assert [row["train/global_step"] for row in sent] == [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for one, other in zip(sent, rows, strict=True):
        for name in filter(compared, other):
            assert within(name, one[name], other[name], samples=False), (other["step"], name)


def hand_over(rows: list[Row]) -> None:
    for row in rows:
        write_row(f"requeue: {row['path']}", **row)
