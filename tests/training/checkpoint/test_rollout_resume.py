"""A run that draws its own samples stops, within a rollout or after it, and continues its curve on another layout."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from bench.curves import Curve, excesses
from bench.layouts import ROLLOUT
from bench.resume import FLOAT64, Where, curve_of, run
from rlexp.base.errors import CheckpointError
from rlexp.launch import rank_progress
from rlexp.run_files import checkpoint_folder as checkpoint
from rlexp.run_files.metrics_jsonl import read_rows
from tests.helpers import warm
from tests.helpers.runs import descendants, gone, ranks_of, wait_for

STEPS = 7
EACH = 4  # steps of a rollout: 2 epochs × 2 train batches
RUN = (*ROLLOUT, "loss.kl_target=0.05", "loss.kl_horizon=40")  # the controller's coefficient is part of the state


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """Run to the end in one process, without a stop."""
    curve = curve_of(run(FLOAT64[0], tmp_path_factory.mktemp("straight"), *RUN))
    coefficients = [row["train/objective/kl_coef"] for row in curve.rows if "train/objective/kl_coef" in row]
    assert len(set(coefficients)) == 2  # the coefficient moves
    return curve


ON_TWO = Where("torch", 2, 1, "fp64")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that stopped in its first rollout, after step 3, and saved each step. Do not change it."""
    place = tmp_path_factory.mktemp("stopped") / "run"
    return run(ON_TWO, place, *RUN, "train.stop_after=3", "checkpoint.save_every=1")


def test_a_curve_goes_on_between_mini_batches(straight: Curve, stopped: Path, tmp_path: Path) -> None:
    """The other rank count deals the samples out anew; the second rollout is drawn by the policy that goes on."""
    begun = Path(shutil.copytree(stopped, tmp_path / "run"))
    assert {path.name for path in checkpoint.latest_first(begun)[0].glob("rollout-*")} == {
        f"rollout-now-{rank:05d}-of-00002.npz" for rank in (0, 1)
    }
    curve = curve_of(run(Where("torch", 1, 1, "fp64"), begun, *RUN))
    assert [row["step"] for row in curve.rows] == list(range(1, STEPS + 1))
    assert excesses(straight, curve) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "stop"),
    [(ON_TWO, Where("fsdp2", 2, 2, "fp64"), 3), (Where("fsdp2", 2, 2, "fp64"), Where("torch", 1, 1, "fp64"), 4)],
    ids=["between mini-batches", "after a rollout's last step"],
)
def test_the_curve_goes_on(straight: Curve, tmp_path: Path, one: Where, other: Where, stop: int) -> None:
    begun = run(one, tmp_path / "run", *RUN, f"train.stop_after={stop}")
    last = checkpoint.latest_first(begun)[0]
    kept = sorted(path.name for path in last.glob("rollout-*"))
    ranks = one.ring_size * one.replicas
    expected = [f"rollout-now-{rank:05d}-of-{ranks:05d}.npz" for rank in range(ranks)] if stop % EACH else []
    assert kept == expected
    assert {name for name in checkpoint.check_sizes(last)["files"] if name.startswith("rollout")} == set(expected)
    curve = curve_of(run(other, begun, *RUN))
    assert [row["step"] for row in curve.rows] == list(range(1, STEPS + 1))
    assert excesses(straight, curve) == []


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2, 5, 6])
def test_a_stop_after_the_other_steps(straight: Curve, tmp_path: Path, stop: int) -> None:
    one, other = FLOAT64[stop % len(FLOAT64)], FLOAT64[(2 * stop + 1) % len(FLOAT64)]
    begun = run(one, tmp_path / "run", *RUN, f"train.stop_after={stop}")
    assert excesses(straight, curve_of(run(other, begun, *RUN))) == []


@pytest.mark.slow
def test_a_stop_after_every_step(straight: Curve, tmp_path: Path) -> None:
    """Each step runs on another layout, so samples move between ranks again and again."""
    for where in itertools.islice(itertools.cycle(FLOAT64), STEPS):
        run(where, tmp_path / "run", *RUN, "train.stop_after=1")
    assert excesses(straight, curve_of(tmp_path / "run")) == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "gspo", "reinforce_pp"])
def test_other_algorithms_go_on_too(tmp_path: Path, loss: str) -> None:
    """Algorithms without a critic; samples that do not count still do not count afterwards."""
    args = (*RUN, f"loss={loss}", "loss.filter=true", "rollout.overlong=mask", "train.max_steps=4")
    straight = curve_of(run(FLOAT64[0], tmp_path / "straight", *args))
    begun = run(Where("torch", 2, 1, "fp64"), tmp_path / "run", *args, "train.stop_after=1")
    assert excesses(straight, curve_of(run(Where("torch", 1, 2, "fp64"), begun, *args))) == []


def test_damage_to_the_samples_is_refused(stopped: Path, tmp_path: Path) -> None:
    begun = Path(shutil.copytree(stopped, tmp_path / "run"))
    last, before, _ = checkpoint.latest_first(begun)
    samples = last / "rollout-now-00001-of-00002.npz"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    manifest = checkpoint.check_sizes(last)
    with pytest.raises(CheckpointError, match=samples.name):
        checkpoint.check_contents(last, [samples.name], manifest)
    samples.unlink()
    with pytest.raises(CheckpointError, match=samples.name):
        checkpoint.check_sizes(last)
    run(ON_TWO, begun, *RUN, "train.max_steps=3")  # from the previous checkpoint, whose samples are intact
    assert [row["step"] for row in read_rows(begun / "metrics.jsonl")] == [1, 2, 3]
    assert checkpoint.step_of(before) == 2


def test_samples_are_no_pickle_and_stand_in_the_position(stopped: Path) -> None:
    first = checkpoint.latest_first(stopped)[-1]
    position = json.loads((first / "position.json").read_text())["task"]
    assert position["number"] == 0
    assert position["kl_coef"] != position["beta"]  # the coefficient of this rollout, and of the next one
    places: list[int] = []
    for path in sorted(first.glob("rollout-now-*-of-00002.npz")):
        with np.load(path, allow_pickle=False) as file:
            places += file["place"].tolist()
            assert {"advantages", "returns", "old", "values", "reference", "behaviour"} <= set(file.files)
            assert file["old"].dtype == np.float64
    assert sorted(places) == list(range(16))


# ---- killed while it samples ----


def overrides(*args: str) -> list[str]:
    quick = ("hydra.run.dir=run", "launch.device=cpu", "logger=none", "engine=torch", "train.precision=fp64")
    saving = ("checkpoint.save_every=1", "checkpoint.export=false", "train.max_steps=5", "data.max_length=280")
    return [*RUN, *quick, *saving, *LONG, *args]


LONG = ("rollout.max_new_tokens=80", "rollout.stop=[]", "train.eval_every=null")  # a rollout takes a while


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_kill_while_sampling_loses_nothing(tmp_path: Path, victim: str) -> None:
    """The kill comes in the second rollout, after four steps; the same command continues on another layout."""
    process = warm.start("rlexp", overrides("parallel=ring2", "launch.nproc=4"), tmp_path)
    told = functools.partial(rank_progress.read, tmp_path / "run")
    wait_for(lambda: any(line["phase"] == "rollout" and line["step"] == 5 for line in told()), process)
    everyone = [process.pid, *descendants(process.pid)]
    os.kill(process.pid if victim == "launcher" else ranks_of(process.pid)[1], signal.SIGKILL)
    process.wait(timeout=240)
    assert gone(everyone, within=240)
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 4
    for folder, layout in (("run", ("parallel=ring1", "launch.nproc=2")), ("straight", ())):
        answer = warm.run("rlexp", overrides(*layout, f"hydra.run.dir={folder}"), tmp_path, timeout=300)
        assert answer.returncode == 0, answer.stderr
        assert ("continues from" in answer.stderr) == (folder == "run")
    assert excesses(curve_of(tmp_path / "straight"), curve_of(tmp_path / "run")) == []
