"""Records and displays of samples, and the comparison of runs up to the first sample that differs."""

from __future__ import annotations

import json
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlexp.compare import comparison as reports
from rlexp.compare.runs import RunReader
from rlexp.config.schema import Best, LoggerConfig
from rlexp.config.schema.models import Precision
from rlexp.run_files import metrics_jsonl
from rlexp.run_files.curve_distance import compared
from rlexp.run_files.rollouts_jsonl import bracket, digests
from rlexp.training.sinks import legible
from rlexp.training.sinks.base import Ending, RolloutFacts, Shown, Sink, Sinks
from rlexp.training.sinks.baseline import excess
from rlexp.training.sinks.console import ConsoleSink
from rlexp.training.sinks.jsonl import RolloutsSink
from rlexp.training.sinks.tensorboard import TensorBoardSink
from rlexp.training.sinks.wandb_access import read_offline
from rlexp.training.sinks.wandb_run import WandbSink
from tests.helpers.curves import a_run, compare, drawn, report_of
from tests.helpers.wandb_runs import records

ids = st.lists(st.integers(0, 3), max_size=40)
SHOWN = Shown("Once\nupon", "a \x1b[31mtime\t", 0.5, {"count": 1.0, "length": 0.0}, 7, False)
FLIP = (9, 1, 0, 6)  # in the third rollout, prompt 31's first sample, token 6


# ---- digests ----


def test_a_digest_is_the_length_and_a_checksum_of_each_beginning() -> None:
    tokens = np.array([3, 1, 4, 1, 5, 9], dtype=np.int32)
    data = b"".join(int(token).to_bytes(4, "little") for token in tokens)
    assert digests(tokens) == [6, *(zlib.crc32(data[: 4 * n]) for n in (1, 2, 4, 6))]
    assert digests(tokens[:4]) == [4, *(zlib.crc32(data[: 4 * n]) for n in (1, 2, 4))]
    assert digests(tokens[:1]) == [1, zlib.crc32(data[:4])]
    assert digests(tokens[:0]) == [0, 0]


@settings(deadline=None, max_examples=300)
@given(ids, ids, ids)
def test_the_bracket_holds_the_first_token_that_differs(start: list[int], one: list[int], other: list[int]) -> None:
    """The bracket is no longer than the tokens that agree before it."""
    ours, theirs = (np.array(start + each, dtype=np.int32) for each in (one, other))
    between = bracket(digests(ours), digests(theirs))
    agree = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if len(ours) == len(theirs) == agree:
        assert between is None
    else:
        assert between is not None
        first, last = between
        assert first <= agree + 1 <= last
        assert last <= 2 * (first - 1) or first == last == 1 or last - first <= 1


# ---- the record ----


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_per_rollout_as_soon_as_it_is_told(tmp_path: Path) -> None:
    path, facts = tmp_path / "rollouts.jsonl", drawn()
    sink = RolloutsSink(path, 0)
    assert not path.exists()  # a run that draws no samples has none
    sink.rollout(facts[0])
    sink.rollout(facts[1])
    (first, second) = lines(path)
    assert list(first) == ["rollout", "step", "n_samples", "prompts", "digests", "spans"]
    assert (second["rollout"], second["step"], second["n_samples"]) == (2, 5, 2)
    assert second["prompts"] == [20, 21, 22, 23]
    assert second["digests"] == facts[1].digests
    sink.close(Ending())


def test_a_run_that_goes_on_keeps_the_rollouts_begun_by_then(tmp_path: Path) -> None:
    path, facts = tmp_path / "rollouts.jsonl", drawn()
    sink = RolloutsSink(path, 0)
    for each in facts[:3]:
        sink.rollout(each)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"rollout":4,"st')  # killed
    sink = RolloutsSink(path, 5)  # in the middle of the second
    assert [line["rollout"] for line in lines(path)] == [1, 2]
    sink.rollout(facts[1])  # reported again
    sink.rollout(facts[2])
    sink.close(Ending())
    assert path.read_bytes() == whole
    sink = RolloutsSink(path, 0)
    assert path.read_bytes() == b""
    sink.rollout(facts[0])
    sink.close(Ending())
    assert [line["rollout"] for line in lines(path)] == [1]


def test_a_full_disk_costs_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, facts, write = tmp_path / "rollouts.jsonl", drawn(), os.write
    sink = RolloutsSink(path, 0)
    sink.rollout(facts[0])
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:9]))
    for each, said in ((facts[1], 1), (facts[2], 0)):
        sink.rollout(each)
        assert capfd.readouterr().err.count("cannot be written") == said
    assert [line["rollout"] for line in lines(path)] == [1]
    monkeypatch.setattr(os, "write", write)
    sink.rollout(facts[3])
    sink.close(Ending())
    assert [line["rollout"] for line in lines(path)] == [1, 2, 3, 4]


def test_every_sink_is_told_and_may_leave_it() -> None:
    told: list[RolloutFacts] = []

    class Told(Sink):
        def log(self, row: dict) -> None: ...

        def rollout(self, facts: RolloutFacts) -> None:
            told.append(facts)

    class Deaf(Sink):
        def log(self, row: dict) -> None: ...

    facts = drawn()[0]
    Sinks([Deaf(), Told(), Told()]).rollout(facts)
    assert told == [facts, facts]


# ---- samples for people ----


def test_a_sample_is_a_line_that_fits() -> None:
    shown = [SHOWN, Shown("p" * 90, "日本語" * 40, -1.25, {}, 120, True), Shown("", "", 0.0, {}, 0, True)]
    facts = replace(drawn()[2], shown=shown)
    title, *shown_lines = legible.lines(facts, 80)
    assert title == "samples of rollout 3, step 9:"
    assert all(legible.width(line) <= 80 for line in shown_lines)
    assert shown_lines[0].startswith("  score 0.5 (count 1, length 0)  7 tokens, cut off  ")
    assert "upon → a " in shown_lines[0]
    assert shown_lines[1].startswith("  score -1.25  120 tokens")
    assert "…ppp" in shown_lines[1]
    assert shown_lines[1].endswith("…")
    whole = legible.lines(facts, None)
    assert whole[1].endswith("Once\\nupon → a \\x1b[31mtime\\t")
    assert len(legible.lines(facts, 20)) == 4  # a narrow terminal causes no failure


class Terminal:
    def __init__(self, real: object) -> None:
        self.real = real

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_terminal_shows_samples_and_the_score(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    if terminal:
        monkeypatch.setattr(sys, "stderr", Terminal(sys.stderr))
    monkeypatch.setenv("COLUMNS", "100")
    sink, row = ConsoleSink(2), {"step": 1, "train/loss": 0.25, "train/tokens_per_second": 9.0}
    sink.rollout(drawn()[0])  # no table is due
    sink.rollout(replace(drawn()[0], shown=[SHOWN]))
    sink.log(row | {"train/objective/scores": 0.125})
    sink.log(row | {"step": 2})  # the second step on the rollout
    if sink.bar is not None:
        sink.bar.refresh()
    sink.close(Ending())
    said = capsys.readouterr().err
    assert said.count("samples of rollout") == 1
    line = next(line for line in said.replace("\r", "\n").splitlines() if "score 0.5" in line)
    assert line.startswith("  score 0.5 (count 1, length 0)  7 tokens, cut off  ")
    if terminal:
        assert "loss=0.2500, score=0.125" in said
    else:
        assert said.count("loss 0.2500  score 0.125  tok/s 9") == 2


def test_tensorboard_has_the_table(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.rollout(drawn()[0])
    sink.rollout(replace(drawn()[2], shown=[SHOWN]))
    sink.close(Ending())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    assert event.step == 9
    assert b"Once\\nupon" in event.tensor_proto.string_val[0]


def test_wandb_has_the_table_with_the_row_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real client. A table may come early, when the next rollout is drawn during a step; no row is lost."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", "/dev/null")
    facts = {"best": {"train/loss": Best.min}, "precision": Precision.fp32}
    sink = WandbSink(LoggerConfig(), tmp_path, {}, [], **facts, run_id="run-000000")
    sink.rollout(replace(drawn()[0], shown=[SHOWN, SHOWN]))
    sink.rollout(replace(drawn(each=2)[1], shown=[SHOWN]))  # for step 3
    for step in range(1, 5):
        sink.log({"step": step, "train/global_step": step, "train/loss": 1.0 / step})
    sink.close(Ending())
    (fragment,) = (tmp_path / "wandb").glob("offline-run-*")
    items = [record["item"] for record in records(fragment, "history")]
    assert [item["train/loss"] for item in items] == [1.0, 0.5, 1 / 3, 0.25]
    tables = {item["_step"]: item for item in items if item.get("samples._type") == "table-file"}
    assert {step: item["samples.nrows"] for step, item in tables.items()} == {1: 2, 3: 1}
    table = json.loads((fragment / "files" / tables[1]["samples.path"]).read_text(encoding="utf-8"))
    assert table["columns"] == [
        *("rollout", "prompt", "answer", "score", "score/count", "score/length", "length", "stopped"),
    ]  # fmt: skip
    assert table["data"][0] == [1, SHOWN.prompt, SHOWN.answer, 0.5, 1.0, 0.0, 7, False]
    (run,) = read_offline(tmp_path)  # which does not take a table for a metric
    assert run.rows == [{"step": n, "train/global_step": n, "train/loss": 1.0 / n} for n in range(1, 5)]
    assert not any(name.startswith("samples") for name in run.summary)


# ---- comparing ----


def later(step: int, by: float = 0.3):
    def edit(row: dict) -> None:
        row["train/loss"] += by if row["step"] >= step else 0.0

    return edit


SAID = "in step 9 sample 0 of prompt 31 differs between token 5 and 8 (1 of 8 samples)"


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_curves_are_compared_up_to_the_first_sample_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    runs, said = tmp_path / "runs", f"train.precision={precision}"
    a_run(runs / "a", said, drawn=drawn())
    a_run(runs / "b", said, "parallel=ring2", noise=1e-7, edit=later(9), drawn=drawn(flips=[FLIP]))
    assert compare(runs, "--fail-above", "1e-6") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "The 2 runs draw one curve up to the first sample that differs: their losses are at most " in told
    assert f"b has the same samples up to step 8; {SAID}: rounding may flip a token" in told
    assert " to step 8 " in told  # in the table
    passed = told[told.index("passed: ") :]
    assert f"b (b) and a (a): the same samples up to step 8; {SAID}" in passed
    summary = json.loads((runs / "summary.json").read_text(encoding="utf-8"))
    (family,) = summary["families"]
    assert family["largest_differences"]["b"]["train/loss"]["step"] <= 8
    assert family["first_differing_samples"]["b"]["token"] == {
        "prompt": 31, "sample": 0, "first": 5, "last": 8, "differing": 1, "samples": 8,
    }  # fmt: skip
    assert summary["runs"][1]["compared_upto"] == 8
    assert summary["runs"][1]["last_score"] == pytest.approx(17 / 20)
    payload = reports.payload_of(report_of(runs))
    assert any(SAID in each for each in payload.verdict.details)
    loss, scores = payload.metrics[:2]
    assert np.isnan(loss.differences[1]).tolist() == [step > 8 for step in range(1, 21)]
    assert (scores.name, scores.steps.tolist()) == ("train/objective/scores", [1, 5, 9, 13, 17])


@pytest.mark.usefixtures("unpainted")
def test_a_defect_before_the_sample_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "runs" / "a", drawn=drawn())
    a_run(tmp_path / "runs" / "b", "parallel=ring2", edit=later(8, 1e-4), drawn=drawn(flips=[FLIP]))
    assert compare(tmp_path / "runs", "--fail-above", "1e-6") == 1
    told = capsys.readouterr().out
    assert "The curves diverge. b diverges from a at step 8: train/loss is " in told
    assert "FAILED: step 8: train/loss is " in told
    assert SAID in " ".join(told.split())


@pytest.mark.usefixtures("unpainted")
def test_the_first_rollout_differs_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "a", drawn=drawn())
    a_run(runs / "b", "parallel=ring2", drawn=drawn(flips=[(1, 0, 1, 1)]))
    assert compare(runs, "--fail-above", "1e-6") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "b and a have nothing left to compare: in step 1 sample 1 of prompt 10 differs at token 1 (1 of 8" in told
    assert "FAILED: step 1: a (a) has nothing left to compare: in step 1 sample 1 of prompt 10" in told
    a_run(runs / "c", "parallel=ring4", drawn=drawn())  # the third is a failure although two agree
    assert compare(runs, "--fail-above", "1e-6") == 1
    assert "b (b) has nothing left to compare" in capsys.readouterr().out


@pytest.mark.usefixtures("unpainted")
def test_a_metric_with_no_value_before_the_sample_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "runs" / "a", drawn=drawn())
    a_run(tmp_path / "runs" / "b", "parallel=ring2", drawn=drawn(flips=[FLIP]))
    assert compare(tmp_path / "runs", "--fail-above", "1e-6", "--metrics", "eval/loss") == 1  # in steps 10 and 20
    assert "a (a) has nothing left to compare" in capsys.readouterr().out


@pytest.mark.usefixtures("unpainted")
def test_in_float64_a_sample_that_differs_is_a_defect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, fp64 = tmp_path / "runs", "train.precision=fp64"
    a_run(runs / "a", fp64, drawn=drawn())
    a_run(runs / "b", fp64, "parallel=ring2", drawn=drawn(flips=[FLIP]))
    assert compare(runs, "--fail-above", "1e-6") == 1
    told = " ".join(capsys.readouterr().out.split())
    flipped = f"{SAID}, and in float64 rounding hardly ever flips a token"
    assert f"The curves diverge. b diverges from a at step 9: {flipped}" in told
    assert f"FAILED: step 9: a (a) and b (b) have different samples: {SAID}" in told
    a_run(runs / "c", fp64, "parallel=ring4", edit=later(11), drawn=drawn(flips=[FLIP]))  # all steps are compared
    payload = reports.payload_of(report_of(runs))
    assert payload.metrics[0].worst.run == 2
    assert payload.metrics[0].worst.step >= 11
    a_run(runs / "d", fp64, "parallel=ring8", edit=later(3), drawn=drawn(flips=[FLIP]))
    words = report_of(runs).outcome.agreements[2].words
    assert "d diverges from a at step 3: train/loss is " in words
    assert SAID in words


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": [30, 99, 32, 33]}, "other prompts"),
        ({"step": 10}, "another first step"),
        ({"n_samples": 4, "prompts": [30, 31]}, "more samples"),
    ],
)
def test_what_rounding_does_not_choose_is_no_excuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict, said: str
) -> None:
    facts = drawn()
    a_run(tmp_path / "runs" / "a", drawn=facts)
    a_run(tmp_path / "runs" / "b", "parallel=ring2", drawn=[*facts[:2], replace(facts[2], **change), *facts[3:]])
    assert compare(tmp_path / "runs", "--fail-above", "1e-6") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert f"b diverges from a at step 9: in step 9 rollout 3 has {said} in one of them, which rounding" in told
    assert "FAILED: step 9: a (a) and b (b) have different samples" in told


@pytest.mark.usefixtures("unpainted")
def test_each_pair_is_held_as_far_as_its_own_samples_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs with the same flip are compared beyond the step where the third run's samples differ."""
    runs = tmp_path / "runs"
    a_run(runs / "a", drawn=drawn())
    a_run(runs / "b", "parallel=ring2", edit=later(9), drawn=drawn(flips=[FLIP]))
    a_run(runs / "c", "parallel=ring4", edit=later(9), drawn=drawn(flips=[FLIP]))
    assert compare(runs, "--fail-above", "1e-6") == 0
    assert "1 more differ" in " ".join(capsys.readouterr().out.split())
    a_run(runs / "d", "parallel=ring8", edit=later(9, 0.31), drawn=drawn(flips=[FLIP]))
    assert compare(runs, "--fail-above", "1e-6") == 1
    failed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED"))
    assert failed.startswith("FAILED: step 9: train/loss is ")
    assert " in d (d)" in failed
    assert " in a (a)" not in failed


def test_noise_after_a_sample_that_differs_is_no_floor(tmp_path: Path) -> None:
    """Another micro-batch may flip a token too. Its measured floor ends there, and the estimate takes over."""
    runs = tmp_path / "runs"
    a_run(runs / "a", drawn=drawn())
    a_run(runs / "b", "train.micro_batch_size=2", noise=1e-7, edit=later(9), drawn=drawn(flips=[FLIP]))
    a_run(runs / "c", "parallel=ring2", edit=later(12, 1e-3), drawn=drawn())
    report = report_of(runs)
    assert {each.run.label: each.status for each in report.outcome.agreements} == {"b": "agree", "c": "apart"}
    floor = reports.payload_of(report).metrics[0].floor
    assert floor[:8].max() < 3e-7
    assert floor[8:] == pytest.approx(4e-7 * np.maximum(1.0, np.arange(9, 21) / 10))


def test_records_that_are_not_whole(tmp_path: Path) -> None:
    """A torn last line, missing rollouts or no record at all: runs are compared as far as the records reach."""
    runs = tmp_path / "runs"
    a_run(runs / "a", drawn=drawn())
    path = a_run(runs / "b", "parallel=ring2", drawn=drawn(flips=[FLIP])) / "rollouts.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    for kept, upto in ((whole[:2], None), ([*whole[:3], whole[3][:40]], 8), ([*whole[:2], *whole[3:]], 12), ([], None)):
        path.write_bytes(b"".join(kept))
        assert report_of(runs).outcome.status == "agree"
        assert reports.payload_of(report_of(runs)).runs[1].compared_upto == upto
    path.unlink()
    assert report_of(runs).outcome.status == "agree"


def test_a_live_report_sees_new_rollouts(tmp_path: Path) -> None:
    facts = drawn(flips=[FLIP])
    a_run(tmp_path / "a", drawn=drawn())
    path, reader = a_run(tmp_path / "b", "parallel=ring2", drawn=facts[:2]) / "rollouts.jsonl", RunReader()
    runs = [reader.group(tmp_path / name).runs[0] for name in "ab"]
    assert runs[0].record.apart(runs[1].record) is None
    sink = RolloutsSink(path, 20)
    sink.rollout(facts[2])
    sink.close(Ending())
    difference = runs[0].record.apart(reader.group(tmp_path / "b").runs[0].record)
    assert difference is not None
    assert difference.step == 9


# ---- what differences of such runs are relative to ----


@pytest.mark.usefixtures("unpainted")
def test_a_loss_of_advantages_that_cancel_is_no_difference(tmp_path: Path) -> None:
    """In the first step on a rollout the loss is only rounding."""

    def cancelled(size: float):
        def edit(row: dict) -> None:
            row["train/loss"] = size * np.sin(row["step"])
            row["train/policy/approxkl_avg"] = abs(size * np.cos(row["step"]))

        return edit

    for precision, size in (("fp32", 3e-8), ("fp64", 1e-17)):
        runs, said = tmp_path / precision, f"train.precision={precision}"
        a_run(runs / "a", said, edit=cancelled(size), drawn=drawn())
        a_run(runs / "b", said, "parallel=ring2", edit=cancelled(-size), drawn=drawn())
        assert report_of(runs).outcome.status == "agree"
        assert compare(runs, "--fail-above", "1e-6") == 0
        a_run(runs / "c", said, "parallel=ring4", edit=cancelled(1e3 * size + 1e-9), drawn=drawn())
        assert report_of(runs).outcome.status == "apart"


def test_an_alert_of_a_policys_loss_is_not_of_rounding() -> None:
    row = {"step": 1, "train/loss": 1e-9, "parity/loss_abs_diff": 2e-9}
    assert excess(row, Precision.fp32) is not None
    assert excess(row | {"train/policy/approxkl_avg": 0.0}, Precision.fp32) is None
    assert excess(row | {"train/policy/approxkl_avg": 0.0, "parity/loss_abs_diff": 1e-4}, Precision.fp32) is not None


def test_a_layout_may_move_its_times_and_nothing_else() -> None:
    own = ("train/time/rollout", "train/samples_per_second", "train/ring_balance")
    assert not any(map(compared, own))
    assert all(map(compared, ("train/objective/scores", "train/response/length", "train/val/behaviour_ratio")))


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    """A stranger's checkpoint may hold any lines; a run that goes on from it takes its rows alone."""
    file = tmp_path / "lines.jsonl"
    odd = b'keep\n{}\n[1]\n{"step": "x"}\n' + b"[" * 5000
    file.write_bytes(b'{"step": 1, "rollout": 1}\n' + odd + b'\n{"step": 2, "rollout": "x"}\n')
    assert [row["step"] for row in metrics_jsonl.read_rows(file)] == [1, 2]
    RolloutsSink(file, 2).close(Ending(0))
    assert [json.loads(line)["step"] for line in file.read_bytes().splitlines()] == [1, 2]
