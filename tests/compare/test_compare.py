"""Comparing runs: what the comparison says and writes, of runs that end, go on, were killed or have odd files."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlexp.compare import comparison as reports
from rlexp.compare.__main__ import parse
from rlexp.compare.families import sort_out
from rlexp.compare.page import HighestPeak
from rlexp.compare.runs import RunReader, merge
from rlexp.run_files import deal_json
from rlexp.run_files.deal_json import RankDeal, SequencePart, StepDeal
from tests.helpers import warm
from tests.helpers.curves import a_job, a_run, compare, report_of, rows


def test_one_curve_is_said_to_be_one(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(two, "--baseline", "one") == 0
    said = capsys.readouterr().out
    assert "The 2 runs draw one curve" in said
    assert f"{two}/report.html" in said
    assert "run " in said
    assert "baseline" in said
    assert {path.name for path in two.iterdir()} == {"one", "four", "report.html", "curves.png", "summary.json"}
    summary = json.loads((two / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"]["status"] == "agree"
    by_label = {run["label"]: run for run in summary["runs"]}
    assert by_label["one"]["baseline"] is True
    assert 0 < by_label["four"]["worst_difference"] < 5e-7
    # 1 rank at 0.1 s a step against 4 ranks at 0.4 s: a sixteenth of the tokens per second and rank.
    assert by_label["four"]["efficiency"] == pytest.approx(1 / 16)
    assert (two / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_half_written_files_and_odd_names_do_not_end_it(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two / "one" / "config.yaml").write_text("train:\n  batch_size: 8\n loss: [", encoding="utf-8")
    (two / "one" / "run.json").write_text("[]", encoding="utf-8")
    (two / "one" / "memory.jsonl").write_text("[1]\n", encoding="utf-8")
    a_run(two / "a$x^$ \u00e9", "parallel=ring2")
    os.rename(two / "four", os.fsencode(two) + b"/\xff\xfe")

    def no_loss(row: dict) -> None:
        del row["train/loss"]

    a_run(two / "other", "parallel=ring8", edit=no_loss)
    assert compare(two) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{two}/one/config.yaml: cannot be read, so the run's settings are not known" in said
    assert f"{two}/one: has no run.json" in said
    json.loads((two / "summary.json").read_text(encoding="utf-8"))


def test_what_a_folder_says_moves_no_cursor(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, reasons and settings of runs are another's texts, and a small file of settings is not read for ever."""
    escapes = "\x1b[2J\x1b]0;PWN\x07\x9b\u202e"
    a_run(two / f"run{escapes}", "parallel=ring8")
    known = json.loads((two / "one" / "run.json").read_text(encoding="utf-8"))
    known |= {"status": "failed", "reason": escapes}
    (two / "one" / "run.json").write_text(json.dumps(known), encoding="utf-8")
    grows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    grows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (two / "four" / "config.yaml").write_text("\n".join(grows), encoding="utf-8")
    compare(two, "--force")
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert all(each.isprintable() or each == "\n" for each in said)
    assert "run\\x1b[2J" in said
    assert "its aliases it has more than 100,000 values" in " ".join(said.split())


def test_what_must_not_differ_is_marked_and_summed_up(two: Path) -> None:
    report = report_of(two)
    rows_ = {row.key: row for row in reports.payload_of(report).config}
    assert rows_["optim.lr"].must_not
    assert rows_["train.batch_size"].must_not
    assert not rows_["train.micro_batch_size"].must_not
    assert rows_["parallel.ring_size"].differs
    assert not any(key.startswith("logger.baseline") for key in rows_)
    (family,) = reports.summary(report, reports.payload_of(report))["families"]
    (apart,) = family["largest_differences"].values()
    assert 0 < apart["train/loss"]["relative"] < 5e-7
    assert "memory/peak_bytes" not in apart


def test_a_sweep_whose_baseline_failed(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        a_job(0, "gone", {"parallel": "ring8"}, status="failed", reason="rank 3 failed"),
        *(a_job(number, name, {"parallel": name}) for number, name in enumerate(("one", "four"), 1)),
    ]
    (two / "sweep.json").write_text(json.dumps({"name": "sw", "axes": ["parallel"], "jobs": jobs}), encoding="utf-8")
    assert compare(two) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the baseline ring8 has no curve (failed: rank 3 failed); one is the baseline instead" in said
    assert "ring8 is failed: rank 3 failed" in said
    assert "The 2 runs draw one curve" in said


@pytest.mark.usefixtures("unpainted")
def test_the_report_is_where_it_is_asked_for(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, place in (([two / "one", two / "four"], "comparison"), ([two, "--out", "there"], "there")):
        assert compare(*words) == 0
        assert {path.name for path in Path(place).iterdir()} == {"report.html", "curves.png", "summary.json"}
    assert {path.name for path in two.iterdir()} == {"one", "four"}
    assert [parse([str(two), *words]).watch for words in ([], ["--watch"], ["--watch", "2"])] == [None, 5.0, 2.0]


# ---- sweeps, and runs that are not running any more ----


def test_sweeps_of_one_name_keep_their_own_baselines(tmp_path: Path) -> None:
    for parent in ("p", "q"):
        for number, ring in enumerate((1, 2)):
            a_run(tmp_path / parent / "sw" / str(number), f"parallel=ring{ring}", noise=1e-7 * number)
        jobs = [a_job(number, str(number), {"parallel": f"ring{ring}"}) for number, ring in enumerate((1, 2))]
        (tmp_path / parent / "sw" / "sweep.json").write_text(
            json.dumps({"name": "sw", "axes": ["parallel"], "jobs": jobs}), encoding="utf-8"
        )
    group = merge([g for parent in "pq" if (g := RunReader().group(tmp_path / parent / "sw"))])
    assert len({run.name for run in group.runs}) == len({run.label for run in group.runs}) == 4
    families = sort_out(group, baseline=None, force=False)
    assert not families.notes
    assert families.families[0].baseline.path == tmp_path / "p" / "sw" / "0"
    again = merge([g for _ in range(2) if (g := RunReader().group(tmp_path / "p" / "sw"))])
    assert len(again.runs) == 2


def test_a_run_whose_process_is_gone_is_not_called_running(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=240)
    a_run(tmp_path / "runs" / "a", status="running", pid=dead.pid)
    a_run(tmp_path / "runs" / "b", status="running", pid=os.getpid())
    runs = {run.name: run for run in report_of(tmp_path / "runs").group.runs}
    assert (runs["a"].status, runs["b"].status) == ("stopped", "running")


def test_a_sweep_that_was_stopped_has_nothing_waiting(tmp_path: Path) -> None:
    """Otherwise `--watch` would wait for ever."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=240)
    a_run(tmp_path / "sw" / "0")
    jobs = [a_job(0, "0", {"parallel": "ring1"}), a_job(1, "1", {"parallel": "ring2"}, status="waiting")]
    for pid, status in ((dead.pid, "stopped"), (os.getpid(), "waiting")):
        ledger = {"name": "sw", "axes": ["parallel"], "jobs": jobs, "host": socket.gethostname(), "pid": pid}
        (tmp_path / "sw" / "sweep.json").write_text(json.dumps(ledger), encoding="utf-8")
        group = RunReader().group(tmp_path / "sw")
        assert [run.status for run in group.runs] == ["finished", status]


def test_a_reader_sees_that_a_run_was_killed(tmp_path: Path) -> None:
    """A killed run's files stay as they were."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    a_run(tmp_path / "a", status="running", pid=process.pid)
    reader = RunReader()
    assert reader.group(tmp_path / "a").runs[0].status == "running"
    process.kill()
    process.communicate(timeout=240)
    assert reader.group(tmp_path / "a").runs[0].status == "stopped"


def test_a_job_that_was_repaired_by_itself_is_finished(tmp_path: Path) -> None:
    a_run(tmp_path / "sw" / "0")
    a_run(tmp_path / "sw" / "1", "parallel=ring2", status="failed", reason="rank 1 failed")
    jobs = [a_job(n, str(n), {"parallel": f"ring{n + 1}"}, status="failed", reason="killed") for n in range(2)]
    (tmp_path / "sw" / "sweep.json").write_text(json.dumps({"jobs": jobs, "axes": ["parallel"]}), encoding="utf-8")
    assert [(run.status, run.reason) for run in RunReader().group(tmp_path / "sw").runs] == [
        ("finished", "all steps are done"),
        ("failed", "killed"),
    ]


# ---- what a run cost ----


def test_what_each_rank_computes_is_read_as_soon_as_it_is_there(tmp_path: Path) -> None:
    reader, file = RunReader(), a_run(tmp_path / "a") / "deal.json"
    deals = [StepDeal(step, [RankDeal(5e8, 0.0, None, [SequencePart(2, 10, 1e8)])]) for step in (2, 3)]

    def shown() -> tuple[StepDeal | None, list[str]]:
        group = reader.group(tmp_path / "a")
        assert group is not None
        payload = reports.payload_of(reports.make(group, sort_out(group, baseline=None, force=False)))
        return payload.runs[0].deal, payload.notes

    assert shown() == (None, [])
    for deal in deals:
        deal_json.write(file, deal)
        assert shown() == (deal, [])
    file.write_text("{", encoding="utf-8")
    broken, notes = shown()
    assert broken is None
    assert len(notes) == 1
    assert notes[0].startswith(
        f"{file}: cannot be read, so the report does not show what each rank computes (Expecting"
    )


def test_speed_and_time_leave_out_the_first_step(tmp_path: Path) -> None:
    def slow_start(row: dict) -> None:
        row["train/step_seconds"] = {1: 60.0, 2: 0.1, 3: 0.1, 4: 0.4}[row["step"]]

    a_run(tmp_path / "runs" / "a", steps=4, edit=slow_start)
    card = reports.payload_of(report_of(tmp_path / "runs")).runs[0]
    assert card.step_seconds == pytest.approx(0.1)  # the median
    assert card.tokens_per_second == pytest.approx((1002 + 1003 + 1004) / 0.6)
    assert card.last_loss == pytest.approx(rows(4)[-1]["train/loss"])
    assert card.clock.seconds.tolist() == pytest.approx([60.0, 60.1, 60.2, 60.6])
    assert card.clock.tokens.tolist() == [1001, 2003, 3006, 4010]


def test_the_peak_is_of_one_row(tmp_path: Path) -> None:
    """Phase and rank are those of the step with the peak, even if an earlier process took that step."""

    def peaks(row: dict) -> None:
        forward, backward = (9e9, 8e9) if row["step"] == 2 else (1e9, 2e9)
        row |= {"memory/forward_peak_bytes": forward, "memory/backward_peak_bytes": backward}
        row |= {"memory/peak_bytes": max(forward, backward), "memory/peak_rank": 1 if row["step"] == 2 else 0}

    a_run(tmp_path / "runs" / "a", steps=4, edit=peaks)
    card = reports.payload_of(report_of(tmp_path / "runs")).runs[0]
    assert (card.peak_bytes, card.peak_phase, card.peak_rank) == (9_000_000_000, "forward", 1)


def test_live_tensors_come_before_the_resident_peak_where_they_were_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def counted(row: dict) -> None:
        row |= {"memory/peak_bytes": int(3.8e8), "memory/peak_rank": 0, "memory/forward_peak_bytes": int(3.8e8)}
        if row["step"] == 3:  # not every step is counted
            row |= {"memory/forward_tensors_peak_bytes": 4e6, "memory/backward_tensors_peak_bytes": 5.25e6}
            row |= {"memory/tensors_peak_bytes": 5.25e6, "memory/tensors_peak_rank": 1}

    a_run(tmp_path / "runs" / "a", steps=4, edit=counted)
    a_run(tmp_path / "runs" / "b", steps=4)
    report = report_of(tmp_path / "runs")
    cards = {card.name: card for card in reports.payload_of(report).runs}
    assert cards["a"].tensors == HighestPeak(5_250_000, 1, "backward")
    assert (cards["a"].peak_bytes, cards["a"].peak_phase) == (380_000_000, "forward")
    assert cards["b"].tensors is None
    assert compare(tmp_path / "runs") == 0
    head, _, *lines = capsys.readouterr().out.strip().splitlines()
    assert re.search(r"peak tensors +peak resident$", head)
    assert re.search(r"5\.25 MB \(backward, r1\) +0\.38 GB$", lines[0])
    assert re.search(r"– +4 MB$", lines[1])
    first, second = json.loads((tmp_path / "runs" / "summary.json").read_text(encoding="utf-8"))["runs"]
    assert first["tensors"] == {"bytes": 5_250_000, "rank": 1, "phase": "backward"}
    assert second["tensors"] is None


# ---- live ----


def test_watching_redraws_until_the_runs_have_ended(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "a")
    growing = a_run(runs / "b", "parallel=ring2", steps=10, status="running")
    watcher = warm.start("rlexp.compare", [str(runs), "--watch", "0.2"], tmp_path)
    try:
        steps = wait_for(runs / "summary.json", lambda summary: summary["runs"][1]["steps"] == 10)
        page = (runs / "report.html").read_text(encoding="utf-8")
        assert '"watch":0.2' in page
        more = a_run(tmp_path / "more", "parallel=ring2", steps=14)
        (growing / "metrics.jsonl").write_bytes((more / "metrics.jsonl").read_bytes())
        steps = wait_for(runs / "summary.json", lambda summary: summary["runs"][1]["steps"] == 14)
        assert steps
        known = json.loads((growing / "run.json").read_text(encoding="utf-8"))
        (growing / "run.json").write_text(json.dumps(known | {"status": "finished"}), encoding="utf-8")
        assert watcher.wait(timeout=240) == 0
    finally:
        watcher.kill()
        watcher.communicate(timeout=240)
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert '"watch":null' in page


def wait_for(path: Path, true_of) -> bool:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            if true_of(json.loads(path.read_text(encoding="utf-8"))):
                return True
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"{path} never came to say so")


def test_comparing_imports_no_torch() -> None:
    code = "import sys, rlexp.compare.__main__, rlexp.compare.picture; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


def test_two_runs_that_are_given_by_themselves_have_their_own_names(tmp_path: Path) -> None:
    groups = [group for name in ("one", "other") if (group := RunReader().group(a_run(tmp_path / name))) is not None]
    for group in groups:
        group.runs[0].label = "alike"
    assert [run.label for run in merge(groups).runs] == ["one", "other"]
