"""Shares of the data, of an epoch and of a run come to the same on every layout, and a run that goes on keeps them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.curves import excesses
from bench.resume import Where, curve_of, run
from rlexp.config.load import compose_config, to_plain
from rlexp.config.schema import Config
from rlexp.run_files import checkpoint_folder as checkpoint
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.training.train.build import build_schedule
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.resume import keep_warm_up
from tests.conftest import Shell
from tests.helpers.runs import run_json

QUICK = ("launch.device=cpu", "logger=none", "hydra.run.dir=run", "engine=torch", "checkpoint.export=false",
         "logger.progress=false", "train.batch_size=2", "data.size=24", "data.eval_size=2")  # fmt: skip


FEW = ([(2, 5)], Where("torch", 1, 2, "fp64"))
MANY = ([(2, 2), (4, 5)], Where("torch", 2, 2, "fp64"))


@pytest.mark.parametrize(("stops", "end"), [FEW, pytest.param(*MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_shares_of_the_data_and_of_the_run_are_the_same_on_every_layout(
    tmp_path: Path, stops: list[tuple[int, int]], end: Where
) -> None:
    """The first 25 of 30 rows are read, and a fifth of them is held out: five steps an epoch, so that shares of it fall
    between two steps, and one between two epochs. Rings of 1, 2 and 4, in other micro-batches, stopped in the warm-up
    and behind a save."""
    rows = [{"prompt": f"say {n}", "chosen": f"yes {n} " * (n % 5 + 1), "rejected": f"no {n}"} for n in range(30)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*map(json.dumps, rows[:9]), "", *map(json.dumps, rows[9:])]) + "\n")
    base = ("launch.device=cpu", "logger=none", "logger.progress=false", "checkpoint.keep_last=99",
            "checkpoint.export=false", "data=jsonl", f"data.path={file}", "data.max_samples=25", "data.eval_size=0.2",
            "train.batch_size=4", "optim.warmup_ratio=0.3", "optim.warmup_start=0", "optim.decay=cosine",
            "optim.min_lr_ratio=0.1", "train.eval_every=0.3 epoch", "checkpoint.save_every=0.7 epoch",
            "train.max_steps=9")  # fmt: skip
    straight = curve_of(run(Where("torch", 1, 1, "fp64"), tmp_path / "straight", base=base))
    assert run_json(tmp_path / "straight")["data"]["pairs"] == 20
    assert run_json(tmp_path / "straight")["data"]["eval_pairs"] == 5
    assert [row["step"] for row in straight.rows if "eval/loss" in row] == [2, 3, 5, 6, 8, 9]
    saved = [checkpoint.step_of(path) for path in checkpoint.latest_first(tmp_path / "straight")]
    assert sorted(saved) == [4, 7, 9]
    rates = [row["train/learning_rate"] for row in straight.rows]
    assert rates[:4] == pytest.approx([0.0, 5e-4 / 3, 1e-3 / 3, 5e-4])
    for ring, stop in stops:
        run(Where("torch", ring, 1, "fp64"), tmp_path / "run", f"train.stop_after={stop}", base=base)
    curve = curve_of(run(end, tmp_path / "run", base=base))
    assert excesses(straight, curve) == []
    assert [row["step"] for row in curve.rows if "eval/loss" in row] == [2, 3, 5, 6, 8, 9]


@pytest.fixture(scope="module")
def composed() -> Config:
    return compose_config(["launch.device=cpu"])


@pytest.mark.parametrize(
    ("before", "now", "steps"),
    [
        ({"warmup_ratio": 0.5}, {"warmup_ratio": 0.5}, 2),  # of the 4 steps of then
        ({"warmup_ratio": 0.5}, {"warmup_ratio": 0.25}, 3),  # of the 12 steps of now
        ({"warmup_ratio": 0.5}, {"warmup_steps": 7}, 7),
        ({"warmup_steps": 1}, {"warmup_ratio": 0.5}, 6),
        ({"warmup_steps": 1}, {"warmup_steps": 7}, 7),
        ({"warmup_ratio": 0.0}, {"warmup_ratio": 0.5}, 6),
        ({"warmup_ratio": 0.5}, {"warmup_ratio": 0.0}, 0),
    ],
)
def test_a_warm_up_is_kept_only_by_the_share_that_it_had(
    composed: Config, before: dict[str, Any], now: dict[str, Any], steps: int
) -> None:
    """Another one comes by force, and is then that of the longer run."""
    then, here = (
        dataclasses.replace(
            composed,
            optim=dataclasses.replace(composed.optim, **warm),
            train=dataclasses.replace(composed.train, max_steps=length),
        )
        for length, warm in ((4, before), (12, now))
    )
    saved = {"schedule": dataclasses.asdict(build_schedule(then, 9)), "config": to_plain(then)}
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(TrainingRun))
    task: Any = SimpleNamespace(run=TrainingRun(**{**nothing, "cfg": here, "schedule": build_schedule(here, 9)}))
    keep_warm_up(task, saved)
    assert task.run.schedule == dataclasses.replace(build_schedule(here, 9), warmup_steps=steps)


def test_a_longer_run_keeps_its_warm_up(rlexp: Shell, tmp_path: Path) -> None:
    asked = (*QUICK, "optim.warmup_ratio=0.5", "optim.decay=constant")
    first = rlexp(*asked, "train.max_steps=4", "train.stop_after=1")
    assert "learning rate 0.0005 (default for random weights), warm-up 2 steps, then constant" in first.stderr
    longer = rlexp(*asked, "train.max_steps=6")
    assert longer.returncode == 0, longer.stderr
    assert "the warm-up keeps its 2 steps; of a run of 6 steps from the start it would be 3" in longer.stderr
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/learning_rate"] for row in rows[:3]] == pytest.approx([5e-4 / 3, 1e-3 / 3, 5e-4])
    other = rlexp(*QUICK, "optim.warmup_ratio=0.4", "optim.decay=constant", "train.max_steps=8")
    assert "optim.warmup_ratio=0.4: the run in" in other.stderr
