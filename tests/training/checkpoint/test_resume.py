"""A run that stops and goes on draws the same curve anywhere; a change that would move the curve is refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.curves import Curve, differences, excesses
from bench.resume import Where, curve_of, run
from rlexp.run_files import checkpoint_folder as checkpoint
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.sinks.base import Ending
from rlexp.training.sinks.jsonl import JsonlSink
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.programs import TORCHRUN, python
from tests.helpers.runs import descendants, gone, ranks_of, run_json, steps_of, wait_for_steps

QUICK = ("launch.device=cpu", "logger=none", "hydra.run.dir=run", "engine=torch", "checkpoint.export=false",
         "logger.progress=false", "train.batch_size=2", "data.size=24", "data.eval_size=2")  # fmt: skip


ELASTIC = Where("torch", 4, 1, "fp64", elastic=True)
# Still 3 steps an epoch; the loss carries a mean from step to step.
FEWER = ("train.batch_size=4", "data.size=12", "data.eval_size=4", "train.max_steps=5", "loss=bco_pair")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The curve of an undisturbed run in one process, in float64."""
    return curve_of(run(Where("torch", 1, 1, "fp64"), tmp_path_factory.mktemp("straight"), *FEWER))


@pytest.mark.parametrize(
    ("one", "other", "stop"),
    [
        pytest.param(Where("torch", 2, 1, "fp64"), Where("fsdp2", 1, 2, "fp64"), 1, marks=pytest.mark.slow),
        (Where("fsdp2", 2, 2, "fp64"), Where("torch", 1, 1, "fp64"), 3),
        pytest.param(Where("torch", 1, 1, "fp64"), Where("torch", 4, 1, "fp64"), 4, marks=pytest.mark.slow),
        pytest.param(Where("torch", 2, 1, "fp64"), ELASTIC, 2, marks=pytest.mark.slow),
        pytest.param(ELASTIC, Where("fsdp2", 2, 2, "fp64"), 2, marks=pytest.mark.slow),
    ],
    ids=["first step", "edge of an epoch", "before the last", "to elastic", "from elastic"],
)
def test_the_curve_goes_on_in_float64(straight: Curve, tmp_path: Path, one: Where, other: Where, stop: int) -> None:
    begun = run(one, tmp_path / "run", *FEWER, f"train.stop_after={stop}")
    assert steps_of(begun) == list(range(1, stop + 1))
    assert run_json(begun)["reason"] == f"train.stop_after={stop}"
    curve = curve_of(run(other, begun, *FEWER))
    assert [row["step"] for row in curve.rows] == [1, 2, 3, 4, 5]
    assert excesses(straight, curve) == []


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 4], ids=["in an epoch", "in the next one"])
def test_what_a_loss_carries_over_goes_on_in_float64(tmp_path: Path, stop: int) -> None:
    """The mean of all rewards so far of bco_pair, from a ring of 2 to a ring of 4. A mean that starts anew is seen."""
    asked = (*FEWER, "train.eval_every=1")
    straight = curve_of(run(Where("torch", 1, 1, "fp64"), tmp_path / "straight", *asked))
    begun = run(Where("torch", 2, 1, "fp64"), tmp_path / "run", *asked, f"train.stop_after={stop}")
    saved = json.loads((checkpoint.latest_first(begun)[0] / checkpoint.POSITION).read_text())
    assert saved["task"]["carried"]["bco_pair/answers"] == 2 * 4 * stop
    curve = curve_of(run(Where("torch", 4, 1, "fp64"), begun, *asked))
    assert excesses(straight, curve) == []
    shifts = [row["train/bco_pair/shift"] for row in straight.rows]
    assert min(abs(one - other) for one, other in itertools.pairwise(shifts)) > 1e-6


# Each kind of training: 3 steps an epoch, stopped within the first one and within the next.
TASKS = {"kto": ("loss.desirable_weight=3",), "bco": (), "sft": (), "reward": ("loss.center=0.1",)}


@pytest.mark.parametrize("loss", [pytest.param(name, marks=[] if name == "reward" else pytest.mark.slow)
                                  for name in TASKS])  # fmt: skip
def test_every_task_goes_on_from_ring_to_ring(loss: str, tmp_path: Path) -> None:
    """From one rank to a ring of 2, and on to a ring of 4, in float64."""
    asked = (*(word for word in FEWER if not word.startswith("loss=")), f"loss={loss}", *TASKS[loss],
             "train.eval_every=1", "eval.buckets=[120]", "eval.before_training=true")  # fmt: skip
    straight = curve_of(run(Where("torch", 1, 1, "fp64"), tmp_path / "straight", *asked))
    for ring, stop in ((1, 2), (2, 2)):
        run(Where("torch", ring, 1, "fp64"), tmp_path / "run", *asked, f"train.stop_after={stop}")
    curve = curve_of(run(Where("torch", 4, 1, "fp64"), tmp_path / "run", *asked))
    assert [row["step"] for row in curve.rows] == [0, 1, 2, 3, 4, 5]
    assert excesses(straight, curve) == []


@pytest.mark.slow
def test_across_engines_twice_stopped_in_float32(straight: Curve, tmp_path: Path) -> None:
    place = tmp_path / "run"
    for where in (Where("zero3", 2, 2, "fp32"), Where("zero1", 4, 1, "fp32")):  # until steps 2 and 4
        run(where, place, *FEWER, "train.stop_after=2")
    curve = curve_of(run(Where("zero3", 1, 1, "fp32"), place, *FEWER))
    apart = differences(straight, curve)
    assert len(curve.rows) == 5
    # 2.4e-7 measured, 4e-7 between undisturbed layouts in float32; a lost moment or a repeated step is 1e-3 and more.
    assert apart["train/loss"] < 4e-6
    assert apart["train/total_tokens"] == apart["train/epoch"] == 0


def test_a_finished_run_has_nothing_to_do_until_it_is_made_longer(rlexp: Shell, tmp_path: Path) -> None:
    first = rlexp(*QUICK, "train.max_steps=3", "train.precision=fp64")
    assert first.returncode == 0, first.stderr
    again = rlexp(*QUICK, "train.max_steps=3", "train.precision=fp64")
    assert again.returncode == 0
    assert "the run is finished. To train on, raise train.max_steps" in again.stderr
    longer = rlexp(*QUICK, "train.max_steps=5", "parallel=ring2", "parallel.layout=ulysses", "train.precision=fp32")
    assert longer.returncode == 0, longer.stderr
    assert "continues from" in longer.stderr
    assert "world_size was 1, and is 2" in longer.stderr
    assert "attention was zigzag, cpu_flash, and is ulysses, cpu_flash" in longer.stderr
    assert "precision was fp64, and is fp32" in longer.stderr
    assert "the run was to end at step 3, and ends at 5: the learning rate, 0.0002 at step 4" in longer.stderr
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[3]["train/learning_rate"] == pytest.approx(5e-4 * 2 / 5)
    assert rows[4]["train/total_tokens"] == sum(row["train/tokens"] for row in rows)
    refused = rlexp(*QUICK, "train.max_steps=6", "resume.mode=never")
    assert refused.returncode == 1
    assert "holds a run already" in refused.stderr


@pytest.mark.slow
def test_what_would_draw_another_curve_is_refused_by_name(rlexp: Shell, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    line = '{"prompt": "prompt ", "chosen": "yes %d", "rejected": "no!!"}\n'
    path.write_text("".join(line % n for n in range(16)), encoding="utf-8")
    own = [part for part in QUICK if not part.startswith("data.")]
    data = (*own, "data=jsonl", "data.path=pairs.jsonl", "train.max_steps=2")
    assert rlexp(*data).returncode == 0
    longer = (*data[:-1], "train.max_steps=3")
    for change, said in (
        ("seed=1", "rlexp: seed=1: the run in "),
        ("loss.beta=0.2", "rlexp: loss.beta=0.2: the run in "),
        ("train.batch_size=4", "rlexp: train.batch_size=4: "),
        ("model.layers=3", "rlexp: model.layers=3: "),
        ("optim.lr=1e-3", "rlexp: optim.lr=0.001: "),
        ("data.max_length=64", "rlexp: data.max_length=64: "),
    ):
        refused = rlexp(*longer, change)
        assert refused.returncode == 1
        assert refused.stderr.startswith(said), refused.stderr
        assert "resume.force=[" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    os.rename(path, tmp_path / "moved.jsonl")  # the same pairs in another file
    moved = (*longer[:-2], "data.path=moved.jsonl", "train.max_steps=3")
    assert rlexp(*moved).returncode == 0
    (tmp_path / "moved.jsonl").write_text("".join(line % n for n in range(1, 17)), encoding="utf-8")
    edited = (*moved[:-1], "train.max_steps=4")
    refused = rlexp(*edited)
    assert refused.stderr.startswith("rlexp: data.path=moved.jsonl (")
    forced = rlexp(*edited, "resume.force=[data]")
    assert forced.returncode == 0, forced.stderr
    assert "data.path was moved.jsonl (" in forced.stderr
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert "Did you mean" in rlexp(*edited, "resume.force=[optim.rl]").stderr


@pytest.mark.slow
def test_a_path_begins_a_run_of_its_own(rlexp: Shell, tmp_path: Path) -> None:
    assert rlexp(*QUICK, "train.max_steps=4", "checkpoint.save_every=2").returncode == 0
    fork = [*QUICK, "train.max_steps=4", "train.stop_after=1", "resume.mode=run/checkpoints/step-00000002"]
    fork[2] = "hydra.run.dir=fork"
    first = rlexp(*fork)
    assert first.returncode == 0, first.stderr
    assert steps_of(tmp_path / "fork") == [1, 2, 3]
    second = rlexp(*fork)  # as a requeued job: it goes on from its own checkpoint, not from the PATH
    assert second.returncode == 0, second.stderr
    assert "fork/checkpoints/step-00000003" in second.stderr
    assert read_rows(tmp_path / "fork" / "metrics.jsonl")[3]["train/loss"] == pytest.approx(
        read_rows(tmp_path / "run" / "metrics.jsonl")[3]["train/loss"], rel=1e-6
    )
    for mode, said in (("nowhere", "no such folder"), (".", "is neither a checkpoint nor a run")):
        refused = rlexp(*QUICK[:2], "hydra.run.dir=third", "train.max_steps=1", f"resume.mode={mode}")
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"rlexp: resume.mode={mode}: ")
        assert said in refused.stderr
        assert not (tmp_path / "third").exists()


@pytest.mark.slow
def test_another_models_checkpoint_is_refused_even_by_force(rlexp: Shell, tmp_path: Path) -> None:
    assert rlexp(*QUICK, "train.max_steps=1").returncode == 0
    refused = rlexp(*QUICK, "train.max_steps=2", "model.hidden_size=32", "resume.force=[model]")
    assert refused.returncode == 1
    assert "is of another model: model.embed_tokens.weight is [259, 64] in it, and is [259, 32] here" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_last_and_the_best_are_kept(rlexp: Shell, tmp_path: Path) -> None:
    """The loss of single batches is not monotonous, so the best are not simply the last."""
    best = ("checkpoint.keep_best=2", "checkpoint.best_metric=train/loss")
    answer = rlexp(*QUICK, "train.max_steps=12", "checkpoint.save_every=3", "checkpoint.keep_last=2", *best)
    assert answer.returncode == 0, answer.stderr
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    two = sorted(range(12), key=lambda n: rows[n]["train/loss"])[:2]
    there = {checkpoint.step_of(path) for path in checkpoint.latest_first(tmp_path / "run")}
    assert there >= {12} | {n + 1 for n in two}
    assert len(there) <= 4  # the last two and the best two; 3, 6 and former best ones are gone
    assert any(n + 1 < 10 for n in two)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_metric_that_is_not_there_is_refused(rlexp: Shell) -> None:
    answer = rlexp(*QUICK, "train.max_steps=3", "checkpoint.keep_best=1", "checkpoint.best_metric=train/los")
    assert answer.returncode == 1
    assert "rlexp: checkpoint.best_metric=train/los: there is no such metric. There are train/loss, " in answer.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_does_not_outlive_the_whole_ones(rlexp: Shell, tmp_path: Path) -> None:
    """If it counted as the newest, the whole ones would be removed as old."""
    assert rlexp(*QUICK, "train.max_steps=8", "train.stop_after=6", "checkpoint.save_every=2").returncode == 0
    state = next((tmp_path / "run" / "checkpoints" / "step-00000006").glob("state-*"))
    state.write_bytes(state.read_bytes()[:-1] + b"\x55")
    one = rlexp(*QUICK, "train.max_steps=8", "train.stop_after=1", "checkpoint.keep_last=1")
    assert one.returncode == 0, one.stderr
    assert "skipped a checkpoint:" in one.stderr
    assert [path.name for path in checkpoint.latest_first(tmp_path / "run")] == ["step-00000005"]
    other = rlexp(*QUICK, "train.max_steps=8")
    assert other.returncode == 0, other.stderr
    assert "continues from" in other.stderr
    assert steps_of(tmp_path / "run") == list(range(1, 9))


@pytest.mark.slow
def test_a_curve_that_is_removed_costs_no_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, "checkpoint.save_every=3")
    wait_for_steps(tmp_path, process)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    wait_for_steps(tmp_path, process, steps=8)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "could not be saved" not in stderr
    last = steps_of(tmp_path / "run")[-1]
    assert steps_of(tmp_path / "run") == list(range(1, last + 1))


def test_a_finished_run_without_a_checkpoint_is_not_written_over(rlexp: Shell) -> None:
    assert rlexp(*QUICK, "train.max_steps=2", "checkpoint.on_exit=false").returncode == 0
    refused = rlexp(*QUICK, "train.max_steps=3")
    assert refused.returncode == 1
    assert "holds a finished run without a checkpoint to continue from" in refused.stderr


@pytest.mark.slow
def test_time_is_a_cadence_too(rlexp: Shell, tmp_path: Path) -> None:
    began = time.monotonic()
    often = ("checkpoint.save_every=0.3s", "checkpoint.on_exit=false", "checkpoint.keep_last=99")
    answer = rlexp(*QUICK, "parallel=ring2", "train.max_steps=60", *often)
    assert answer.returncode == 0, answer.stderr
    there = [checkpoint.step_of(path) for path in checkpoint.latest_first(tmp_path / "run")]
    seconds = time.monotonic() - began  # on a slow machine every step may be due
    assert 1 <= len(there) <= seconds / 0.3 + 1, (there, seconds)


# ---- how it is asked to stop ----


ENDLESS = (*QUICK, "parallel=ring2", "train.max_steps=100000")


def start(folder: Path, *args: str) -> warm.Process:
    return warm.start("rlexp", [*ENDLESS, *args], folder)


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", "SIGUSR1", *(pytest.param(n, marks=pytest.mark.slow) for n in ("SIGUSR2", "SIGHUP"))]
)
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "rlexp", *ENDLESS]
    process = (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if name == "SIGTERM"  # once as a shell starts it
        else start(tmp_path)
    )
    wait_for_steps(tmp_path, process)
    everyone = descendants(process.pid)
    process.send_signal(signal.Signals[name])
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.Signals[name]
    assert "Traceback" not in stderr
    assert f"\nstopped by {name}; {tmp_path}/run continues from step-" in stderr
    answered = re.search(
        rf"^rlexp: {name}: finishing step \d+, then saving, in at most 120 s\.(.*)$", stderr, re.MULTILINE
    )
    assert answered is not None
    assert answered[1] == (" Ctrl-C again ends it now." if name == "SIGINT" else "")
    assert f"\nto continue: python -m rlexp {shlex.join(ENDLESS[:1])} " in stderr
    assert gone(everyone, within=240)
    last = checkpoint.latest_first(tmp_path / "run")[0]
    manifest = checkpoint.check_sizes(last)
    checkpoint.check_contents(last, manifest["files"], manifest)
    assert checkpoint.step_of(last) == steps_of(tmp_path / "run")[-1]
    run = run_json(tmp_path / "run")
    assert (run["status"], run["reason"]) == ("stopped", f"stopped by {name}")


def test_one_rank_alone_may_be_asked(tmp_path: Path) -> None:
    """Slurm signals the processes of a step and not their launcher."""
    process = start(tmp_path)
    wait_for_steps(tmp_path, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGUSR1)
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGUSR1
    assert checkpoint.step_of(checkpoint.latest_first(tmp_path / "run")[0]) == steps_of(tmp_path / "run")[-1]


@pytest.mark.parametrize(
    "name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow), pytest.param("SIGHUP", marks=pytest.mark.slow)]
)
def test_a_signal_to_the_whole_process_group_is_one_request(tmp_path: Path, name: str) -> None:
    """Slurm, systemd and a closed terminal signal launcher, fork server and ranks at once."""
    process = start(tmp_path)
    wait_for_steps(tmp_path, process)
    os.killpg(process.pid, signal.Signals[name])
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.Signals[name]
    assert run_json(tmp_path / "run")["reason"] == f"stopped by {name}"
    assert checkpoint.step_of(checkpoint.latest_first(tmp_path / "run")[0]) == steps_of(tmp_path / "run")[-1]


@pytest.mark.slow
def test_under_torchrun_a_stop_is_a_request_and_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, *QUICK, "parallel=ring2", "train.max_steps=100000"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_steps(tmp_path, process)
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGUSR1)  # torchrun does not handle the signal, and dies
    process.communicate(timeout=240)
    assert gone(everyone, within=240)
    run = run_json(tmp_path / "run")
    assert (run["status"], run["reason"]) == ("stopped", "stopped by SIGTERM")
    done = steps_of(tmp_path / "run")[-1]
    assert checkpoint.step_of(checkpoint.latest_first(tmp_path / "run")[0]) == done
    for said in ("continues from", "the run is finished. To train on"):
        answer = python(*TORCHRUN, *QUICK, "parallel=ring2", f"train.max_steps={done + 1}", cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        assert said in answer.stderr
        assert steps_of(tmp_path / "run") == list(range(1, done + 2))
    leaves_its_world(tmp_path, "parallel=ring1", f"train.max_steps={done + 1}")


def leaves_its_world(place: Path, *overrides: str) -> None:
    """Run a finished run's command. A rank that exits with an open process group aborts about once in forty times."""
    code = "import rlexp.__main__ as it, torch.distributed as dist; print(it.run(), dist.is_initialized())"
    joined = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    answer = python("-c", code, *QUICK, *overrides, cwd=place, **joined)
    assert answer.stdout.split() == ["0", "False"], answer.stderr
    assert "the run is finished" in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a second Ctrl-C", "the end of the grace"])
def test_a_step_that_takes_too_long_is_abandoned_whole(tmp_path: Path, how: str) -> None:
    """A step takes some five seconds; a mere request would wait for its end."""
    slow = ("train.batch_size=120", "data.size=120", "model.layers=6", "checkpoint.save_every=1",
            "train.micro_batch_size=2")  # fmt: skip
    process = start(tmp_path, *slow, f"launch.grace_seconds={600 if how.startswith('a') else 1}")
    wait_for_steps(tmp_path, process, steps=1)
    everyone = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    if how == "a second Ctrl-C":
        time.sleep(0.6)
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert gone(everyone, within=240)
    assert steps_of(tmp_path / "run") == [1]
    assert run_json(tmp_path / "run")["status"] == "stopped"


@pytest.mark.parametrize("second", ["pass", "os.kill(os.getpid(), stops.PEER_FAILED)"])
def test_a_stop_that_comes_while_an_object_is_freed_is_not_lost(second: str) -> None:
    """Python drops what is raised there, and goes on; so also of a second stop that comes while it tells of the loss,
    and it prints that one's traceback."""
    code = f"""
import os, signal, sys, time, weakref
from rlexp.launch import stops

class Freed:
    pass

def while_it_tells(raise_again=stops._raise_again):
    stops._raise_again = raise_again
    {second}
    raise_again()

stops.hear_stops(under_launcher=True)
stops._raise_again = while_it_tells
held = Freed()
gone = weakref.ref(held, lambda _: os.kill(os.getpid(), stops.END_NOW))
try:
    del held
    time.sleep(200)
    print("the stop was lost")
except stops.Terminated as ended:
    print(ended, ended.exit_code)
"""
    answer = python("-c", code)
    assert answer.stdout.splitlines() == ["stopped by SIGINT 130"]
    assert not answer.stderr


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(rlexp: Shell, tmp_path: Path) -> None:
    process = start(tmp_path, "checkpoint.save_every=null")
    wait_for_steps(tmp_path, process)
    process.kill()
    process.wait(timeout=240)  # its ranks may outlive it for a moment: the next process waits for them
    answer = rlexp(*QUICK, "parallel=ring2", "train.max_steps=2", "resume.force=[seed]", "seed=3")
    assert answer.returncode == 0, answer.stderr
    assert "no checkpoint here yet: begins at step 1" in answer.stderr
    assert steps_of(tmp_path / "run") == [1, 2]


def test_rows_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The write is made to fail half-way, since a full disk would need a mount."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log({"step": 1})
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:3]))
    sink.log({"step": 2})
    sink.log({"step": 3})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
    monkeypatch.setattr(os, "write", real)
    sink.log({"step": 4})
    sink.close(Ending())
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert capfd.readouterr().err.count("its rows wait") == 1


def test_rows_go_into_no_other_file_after_theirs_is_removed(tmp_path: Path, capfd) -> None:
    """Until its folder is back, the sink keeps its descriptor: another file would get the number, and then the rows."""
    folder, other = tmp_path / "run", tmp_path / "weights"
    folder.mkdir()
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.log({"step": 1})
    shutil.rmtree(folder)
    sink.log({"step": 2})
    with other.open("wb") as file:
        sink.log({"step": 3})
        file.write(b"W")
    assert other.read_bytes() == b"W"
    folder.mkdir()
    sink.close(Ending())
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3]
    assert capfd.readouterr().err.count("its rows wait") == 1


def test_what_draws_numbers_draws_the_same_after_a_stop() -> None:
    import random

    import numpy as np
    import torch

    from rlexp.training.train.step import seed_everything

    def drawn(step: int) -> tuple[float, float, float]:
        seed_everything(0, step)
        return float(torch.rand(1)), float(np.random.rand()), random.random()

    one = drawn(7)
    assert drawn(8) != one
    assert drawn(7) == one


def test_nothing_that_a_run_writes_is_a_pickle(rlexp: Shell, tmp_path: Path) -> None:
    assert rlexp(*QUICK, "train.max_steps=1").returncode == 0
    names = {path.suffix for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert names == {".json", ".jsonl", ".safetensors"}
    position = json.loads(next((tmp_path / "run" / "checkpoints").glob("*/position.json")).read_text())
    assert (position["step"], position["seed"], position["optimizer_steps"]) == (1, 0, 1)
