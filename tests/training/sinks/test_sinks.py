"""Sinks other than W&B: the loss compared with a baseline's, TensorBoard, trackio; and what is refused at the start."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from rlexp.base.errors import ConfigError
from rlexp.config.checks import across_fields
from rlexp.config.load import compose_config
from rlexp.config.schema.models import Precision
from rlexp.launch import run_folder
from rlexp.training.sinks.base import Ending, Sink, Sinks
from rlexp.training.sinks.baseline import Baseline, excess
from rlexp.training.sinks.console import ConsoleSink
from rlexp.training.sinks.tensorboard import TensorBoardSink
from tests.helpers.programs import python
from tests.helpers.wandb_runs import CLEAN, curve_of, kill_after, train, values_of

CPU = ("launch.device=cpu", "engine=torch")
GOES_ON = ("checkpoint.save_every=5", "optim.decay=constant")


class Kept(Sink):
    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.endings: list[Ending] = []

    def log(self, row: dict) -> None:
        self.rows.append(row)

    def close(self, ending: Ending) -> None:
        self.endings.append(ending)


def line(step: int, loss: float) -> str:
    return json.dumps({"step": step, "train/loss": loss}) + "\n"


def beside(baseline: Baseline, step: int, loss: float) -> float | None:
    return baseline.beside({"step": step, "train/loss": loss}).get("parity/loss_abs_diff")


def test_a_baseline_is_read_as_it_grows(tmp_path: Path) -> None:
    path, baseline = tmp_path / "base" / "metrics.jsonl", Baseline(tmp_path / "base")
    assert beside(baseline, 1, 0.5) is None  # no such folder yet
    path.parent.mkdir()
    path.write_text(line(1, 0.25) + line(2, 1.0)[:7], encoding="utf-8")  # it is writing a line
    assert beside(baseline, 1, 0.5) == 0.25
    assert beside(baseline, 2, 0.5) is None
    with path.open("a", encoding="utf-8") as file:
        file.write(line(2, 1.0)[7:] + "{\n" + '["no row"]\n' + line(3, 2.0))
    assert beside(baseline, 2, 0.5) == 0.5
    assert beside(baseline, 3, 0.5) == 1.5
    path.with_name("new").write_text(line(1, 0.25) + line(4, 3.0), encoding="utf-8")  # as a resumed run does
    path.with_name("new").replace(path)
    assert beside(baseline, 4, 0.5) == 2.5
    assert beside(baseline, 2, 0.5) == 0.5
    path.unlink()
    assert beside(baseline, 5, 0.5) is None


def test_every_sink_sees_the_difference(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(line(1, 0.25), encoding="utf-8")
    kept, ending = (Kept(), Kept()), Ending(1, "why")
    sinks = Sinks(kept, Baseline(tmp_path))
    for step in (1, 2):
        sinks.log({"step": step, "train/loss": 0.5})
    sinks.close(ending)
    for sink in kept:
        assert sink.rows == [
            {"step": 1, "train/loss": 0.5, "parity/loss_abs_diff": 0.25}, {"step": 2, "train/loss": 0.5},
        ]  # fmt: skip
        assert sink.endings == [ending]
    assert capfd.readouterr().err == ""


def test_a_baseline_that_never_came_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sinks = Sinks([Kept()], Baseline(tmp_path / "not"))
    sinks.log({"step": 1, "train/loss": 0.5})
    sinks.close(Ending())
    assert "had none of these steps" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("precision", "step", "loss", "apart", "allowed"),
    [
        (Precision.fp64, 300, 0.5, 4e-10, None),
        (Precision.fp64, 300, 0.5, 6e-10, 5e-10),
        (Precision.fp32, 300, 0.5, 1e-5, None),
        (Precision.fp32, 300, 0.0, 1e-4, 3e-5),
        (Precision.bf16, 300, 1.0, 0.2, None),
        (Precision.bf16, 300, 1.0, 0.4, 0.3),
        # In the first steps the limit is that of a comparison: a defect of 1e-5 in the loss is not rounding.
        (Precision.fp32, 1, 0.69, 1e-5, 2.76e-6),
        (Precision.fp32, 1, 0.69, 1e-6, None),
        (Precision.fp64, 1, 0.69, 1e-11, 6.9e-13),
        (Precision.bf16, 1, 0.69, 1e-2, None),
    ],
)
def test_what_a_precision_allows(
    precision: Precision, step: int, loss: float, apart: float, allowed: float | None
) -> None:
    row = {"step": step, "train/loss": loss}
    assert excess(row | {"parity/loss_abs_diff": apart}, precision) == pytest.approx(allowed)
    assert excess(row, precision) is None


def test_a_long_step_is_watched_while_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, one line in half a minute."""
    sink, facts = ConsoleSink(9), {"step": 2, "phase": "backward", "pack": 3, "packs": 8, "tokens": 30_000,
                                   "of_tokens": 80_000, "began": 1000.0, "pace": 0.001}  # fmt: skip
    for now in (1010.0, 1031.0, 1040.0, 1062.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        sink.within_step(facts)
    assert capfd.readouterr().err.splitlines() == [
        "step 2/9  pack 3 of 8, backward, 30,000 of 80,000 tokens, 49 s left of the step",
        "step 2/9  pack 3 of 8, backward, 30,000 of 80,000 tokens, 18 s left of the step",
    ]


def test_the_bar_is_drawn_below_the_header_and_evaluations_above_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each number of the bar is the row's; of a run that goes on, it begins where that stopped."""
    sink, row = ConsoleSink(7, first_step=6), {"train/tokens_per_second": 1234.6, "train/rewards/accuracies": 0.876}
    monkeypatch.setattr(sink, "is_terminal", True)
    assert capfd.readouterr().err == ""  # the run's header comes now
    sink.log({"step": 0, "eval/loss": 0.6931, "eval/rewards/accuracies": 0.5})
    sink.log(row | {"step": 6, "train/loss": 0.5})
    sink.log(row | {"step": 7, "train/loss": 0.41239, "eval/loss": 0.41})
    sink.close(Ending())
    said = capfd.readouterr().err
    assert [line for line in re.split(r"[\r\n]+", said) if "held-out" in line] == [
        "before training  held-out rows: loss 0.6931  acc 0.50",
        "step 7/7  held-out rows: loss 0.4100",
    ]
    assert " 7/7 [" in re.split(r"[\r\n]+", said.strip())[-1]
    assert "loss=0.4124, acc=0.88, tok/s=1,235]" in said


def test_each_number_of_a_step_s_line_is_what_it_tells(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run goes on with step 21 of 25, and its steps take 4, 8, 12, 16 and 20 seconds."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    sink = ConsoleSink(25, first_step=21)
    for step in range(21, 26):
        now += 4 * (step - 20)
        row = {"step": step, "train/loss": 1 / step, "train/rewards/accuracies": 0.5 + step / 100,
               "train/tokens_per_second": 12345.6 + step}  # fmt: skip
        sink.log(row | ({"eval/loss": 0.45678, "eval/rewards/accuracies": 0.746} if step == 23 else {}))
    assert capfd.readouterr().err.splitlines() == [
        "step 21/25  loss 0.0476  acc 0.71  tok/s 12,367  16 s left",
        "step 22/25  loss 0.0455  acc 0.72  tok/s 12,368  18 s left",  # 12 s in 2 steps, and 3 are left
        "step 23/25  held-out rows: loss 0.4568  acc 0.75",
        "step 24/25  loss 0.0417  acc 0.74  tok/s 12,370  10 s left",  # 40 s in 4 steps, and 1 is left
        "step 25/25  loss 0.0400  acc 0.75  tok/s 12,371  0 s left",
    ]


def test_every_sink_is_closed_though_one_fails() -> None:
    closed = []

    class Failing(Sink):
        def close(self, ending: Ending) -> None:
            raise OSError(f"gone, {ending.exit_code}")

    class Closing(Sink):
        def close(self, ending: Ending) -> None:
            closed.append(ending.exit_code)

    with pytest.raises(OSError, match="gone"):
        Sinks([Closing(), Failing(), Closing()]).close(Ending(3))
    assert closed == [3, 3]


def test_how_a_process_ended() -> None:
    assert [Ending(code).failed for code in (0, 1, 3, 130, 143)] == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["logger.baseline=nowhere/base"], "logger.baseline=nowhere/base: no such run folder"),
        (["logger.baseline=file"], "logger.baseline=file: no such run folder"),
        (["logger.artifacts=true", "logger=none"], "logger.artifacts=true: is for W&B"),
    ],
)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=said):
        compose_config([*CPU, *overrides])


def test_a_run_is_not_its_own_baseline_and_one_to_come_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = compose_config([*CPU, "logger.baseline=run"])  # there are no events yet
    with pytest.raises(ConfigError, match="is this run itself"):
        run_folder.enter(cfg, tmp_path / "run")


@pytest.mark.parametrize("package", ["tensorboard", "trackio"])
def test_a_package_that_is_not_there_is_named_before_a_start(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(across_fields, "installed", lambda name: name != package)
    with pytest.raises(ConfigError, match=rf"logger={package}: .*pip install -e '\.\[{package}\]'"):
        compose_config([*CPU, f"logger={package}"])


def tensorboard_rows(run_dir: Path) -> list[dict[str, float]]:
    """Read rows with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag}: a step came twice"
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return [rows[step] for step in sorted(rows)]


def in_float32(row: dict[str, float]) -> dict[str, float]:
    return {name: float(np.float32(value)) for name, value in values_of(row).items()}


needs_tensorboard = pytest.mark.skipif(
    not importlib.util.find_spec("tensorboard"), reason="pip install -e '.[tensorboard]'"
)


@needs_tensorboard
@pytest.mark.slow
def test_tensorboard_has_the_curve_after_a_kill(tmp_path: Path) -> None:
    kill_after(9, tmp_path, "logger=tensorboard", *GOES_ON)
    answer = train(tmp_path, "logger=tensorboard", "train.max_steps=16", "train.eval_every=8", *GOES_ON)
    assert answer.returncode == 0, answer.stderr
    assert "continues from" in answer.stderr
    rows = curve_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert tensorboard_rows(tmp_path / "run") == list(map(in_float32, rows))


@needs_tensorboard
def test_tensorboard_is_given_the_rows_of_a_run_begun_elsewhere(tmp_path: Path) -> None:
    rows = [{"step": step, "train/loss": 1 / step} for step in (1, 2, 3)]
    sink = TensorBoardSink(tmp_path, rows[:2])
    sink.log(rows[2])
    sink.close(Ending())
    assert tensorboard_rows(tmp_path) == list(map(in_float32, rows))


@needs_tensorboard
def test_tensorboard_has_each_step_once_after_a_start_without_a_checkpoint(tmp_path: Path) -> None:
    rows = [{"step": 0, "eval/loss": 0.7}, {"step": 1, "train/loss": 0.6}]
    for _ in range(2):
        sink = TensorBoardSink(tmp_path)
        for row in rows:
            sink.log(row)
        sink.close(Ending())
    assert tensorboard_rows(tmp_path) == list(map(in_float32, rows))


TRACKIO_ROWS = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_run_records("rlexp")
print(json.dumps({"name": run["name"], "rows": SQLiteStorage.get_logs("rlexp", run["name"], max_points=None)}))
"""


@pytest.mark.skipif(not importlib.util.find_spec("trackio"), reason="pip install -e '.[trackio]'")
def test_trackio_has_the_curve_after_a_kill(tmp_path: Path) -> None:
    env = CLEAN | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    kill_after(9, tmp_path, "logger=trackio", *GOES_ON, env=env)
    answer = train(tmp_path, "logger=trackio", "train.max_steps=16", *GOES_ON, env=env)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ""
    read = python("-c", TRACKIO_ROWS, **env)
    reread = json.loads(read.stdout.splitlines()[-1])
    assert reread["name"] == json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["wandb_id"]
    rows = curve_of(tmp_path / "run")
    assert [row["train/global_step"] for row in reread["rows"]] == list(range(1, 17))
    for one, other in zip(reread["rows"], rows, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-6)
        assert set(values_of(other)) <= set(one)


def test_who_reads_does_without_torch() -> None:
    """Without torch, a comparison, a dashboard or a report starts quickly."""
    modules = ["training.sinks.wandb_access", "training.sinks.jsonl", "training.sinks.baseline", "dashboard.__main__"]
    read = "import sys, " + ", ".join(f"rlexp.{module}" for module in modules)
    answer = python("-c", f"{read}; assert not {{'torch', 'wandb'}} & set(sys.modules)")
    assert answer.returncode == 0, answer.stderr
