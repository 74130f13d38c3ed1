"""`rlexp.status` on real runs while they train, fail and are killed, and on folders made by hand."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlexp.launch.rank_progress import Whereabouts
from rlexp.launch.slurm.queue import Known
from rlexp.launch.sweep import Job
from rlexp.status import draw, view
from rlexp.status.__main__ import main
from rlexp.status.state import Evidence, legible, state_of
from rlexp.status.view import Locks, StatusView
from tests.conftest import Shell
from tests.helpers import warm

QUICK = ("launch.device=cpu", "logger=none", "engine=torch", "checkpoint.export=false", "data.size=40",
         "data.eval_size=0", "model.layers=1", "train.batch_size=2")  # fmt: skip
COMMAND = [sys.executable, "-m", "rlexp.status"]
HERE = socket.gethostname()


@pytest.fixture
def status(tmp_path: Path) -> Shell:
    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return warm.run("rlexp.status", args, tmp_path, timeout=240, env=os.environ | env)

    return run


@contextlib.contextmanager
def started(folder: Path, *args: str) -> Iterator[warm.Process]:
    """Start `python -m rlexp …`, and kill it at the end if it still runs."""
    process = warm.start("rlexp", args, folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=240)


def until(met: Callable[[], Any], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows_of(run: Path) -> list[dict]:
    try:
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def jobs(answer: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    return {job["label"]: job for job in json.loads(answer.stdout)["jobs"]}


def fingerprint(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}


# ---- real runs ----


def test_a_sweep_that_has_ended(rlexp: Shell, status: Shell, tmp_path: Path) -> None:
    """One job finished, one failed, two were skipped. The command shows the folders' facts, and changes no file."""
    rlexp("-m", *QUICK, "hydra.sweep.dir=sw", "launch.nproc=2", "train.max_steps=3", "train.batch_size=3,4",
          "train.micro_batch_size=1", "optim.lr=1e-3,1e30")  # fmt: skip
    before = fingerprint(tmp_path / "sw")
    answer, facts = status("sw"), jobs(status("sw", "--json"))
    assert fingerprint(tmp_path / "sw") == before
    assert answer.returncode == 1
    assert {label: (job["status"], job["step"], job["steps"]) for label, job in facts.items()} == {
        "batch_size=3, lr=0.001": ("skipped", 0, None),
        "batch_size=3, lr=1e+30": ("skipped", 0, None),
        "batch_size=4, lr=0.001": ("finished", 3, 3),
        "batch_size=4, lr=1e+30": ("failed", 1, 3),
    }
    rows, good = rows_of(tmp_path / "sw" / "2"), facts["batch_size=4, lr=0.001"]
    assert good["peak_bytes"] >= max(row["memory/peak_bytes"] for row in rows)
    assert good["reason"] is None
    lines = answer.stdout.splitlines()
    assert lines[0].split("  ")[0] == "run"
    assert re.search(rf"^batch_size=4, lr=0.001 +finished +3/3 \(100%\) +{rows[-1]['train/loss']:.6f} ", lines[4])
    below = answer.stdout.partition("\n\n")[2]
    assert below.startswith("batch_size=3, lr=0.001; batch_size=3, lr=1e+30 are skipped: train.batch_size=3: 2 repl")
    assert "batch_size=4, lr=1e+30 is failed: step 2: the loss is not finite." in below
    assert "last seen: ranks 0–1 in step 2, pack 2 of 2, in their " in below
    assert "\x1b" not in answer.stdout


def test_while_training_and_when_killed(status: Shell, tmp_path: Path) -> None:
    """The launcher and its ranks are killed: the running job is lost, and the waiting job will not run."""
    sweep = ("-m", *QUICK, "hydra.sweep.dir=sw", "launch.nproc=2", "train.max_steps=100000", "parallel=ring1,ring2")
    with started(tmp_path, *sweep) as process:
        until(lambda: len(rows_of(tmp_path / "sw" / "0")) > 3)
        answer = status("sw", "--json")
        facts = jobs(answer)
        assert answer.returncode == 0
        running, waiting = facts["ring1"], facts["ring2"]
        assert (running["status"], waiting["status"]) == ("running", "waiting")
        assert 3 < running["step"] <= len(rows_of(tmp_path / "sw" / "0"))
        left = (100000 - running["step"]) * running["step_seconds"]
        assert running["seconds_left"] == pytest.approx(left)
        assert {rank["rank"] for rank in running["ranks"]} == {0, 1}
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=240)
    locked = [tmp_path / "sw" / "0" / name for name in (".lock", ".ranks")]
    until(lambda: not any(Locks().held(path) for path in locked), 20)
    answer = status("sw")
    assert answer.returncode == 1
    assert "ring1 is lost: its process (" in answer.stdout
    assert f" on {HERE}) is gone; the same command resumes it.\n  last seen: rank" in answer.stdout
    assert "ring2 is stopped: its sweep was stopped before this job; the same command resumes it" in answer.stdout
    assert "running" not in answer.stdout
    assert status("sw/0").stdout.startswith("run  status")
    assert jobs(status(".", "--json"))["sw ring1"]["status"] == "lost"
    followed = status("sw", "--watch")  # nothing to wait for
    assert (followed.returncode, followed.stdout) == (1, answer.stdout)


@pytest.mark.slow
def test_the_live_view_on_a_terminal_and_on_a_pipe(tmp_path: Path) -> None:
    """Three commands watch one run: on a terminal, on a pipe, and on a terminal until Ctrl-C."""
    slower = ("train.batch_size=8", "train.max_steps=40")  # three new Pythons must start while it runs
    with started(tmp_path, *QUICK, "hydra.run.dir=r", *slower):
        until((tmp_path / "r" / "run.json").exists)
        watching = [*COMMAND, "r", "--watch", "--every", "0.2"]
        pipe = subprocess.Popen(watching, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        whole, interrupted = on_terminal(watching, tmp_path), on_terminal(watching, tmp_path, after="━")
        (code, seen), (stopped, said) = whole(), interrupted()
        told = pipe.communicate(timeout=240)[0].decode()
    assert code == pipe.returncode == 0
    assert stopped == 130
    assert "Traceback" not in seen + said + told
    for text in (seen, said):
        assert text.index("━") < text.rindex("\x1b[1A")  # bars that are drawn over
        assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is shown again
    last = re.sub(r"\x1b\[[0-9;?]*\w", "", seen.rpartition("\x1b[1A")[2])
    assert re.search(r"r +finished +40/40 \(100%\)", last)
    assert "\x1b" not in told
    tables = told.split("\n\n")
    assert len(tables) > 2
    assert all(one != other for one, other in itertools.pairwise(tables))
    assert "running" in tables[0]
    assert re.search(r"r +finished +40/40 \(100%\)", tables[-1])


def on_terminal(command: list[str], folder: Path, after: str | None = None) -> Callable[[], tuple[int, str]]:
    """Start a command on a terminal of its own, to be interrupted from the keyboard when it has said `after`; what it
    ended with and said."""
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a process that a script started in the background ignores it
        os.chdir(folder)
        os.execve(command[0], command, os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"})
    said: list[bytes] = []

    def read() -> None:
        pressed = False
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                said.append(os.read(terminal, 65536))
            except OSError:  # the other end is closed
                return
            if after and not pressed and after.encode() in b"".join(said) and b"\x1b[1A" in b"".join(said):
                os.write(terminal, b"\x03")
                pressed = True

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def ended() -> tuple[int, str]:
        reader.join(timeout=240)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.close(terminal)
        return code, b"".join(said).decode()

    return ended


def test_looking_takes_no_lock(tmp_path: Path) -> None:
    """A run claims its folder again and again while others look as fast as they can."""
    by_hand(tmp_path, status="running")
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            StatusView(tmp_path).look()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for each in lookers:
        each.start()
    try:
        for _ in range(300):
            with (tmp_path / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                time.sleep(0.001)
    finally:
        done.set()
        for each in lookers:
            each.join()


def test_whose_lock_is_held(tmp_path: Path) -> None:
    """A rank that outlives its launcher counts as alive; another process with the same id does not."""
    by_hand(tmp_path, status="running", pid=os.getpid())
    assert StatusView(tmp_path).look().rows[0].state == "lost"
    with (tmp_path / ".ranks").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert StatusView(tmp_path).look().rows[0].state == "running"
    with (tmp_path / ".lock").open("w"):  # open, although its lock is not listed, as on some file systems
        assert StatusView(tmp_path).look().rows[0].state == "running"
    assert StatusView(tmp_path).look().rows[0].state == "lost"
    by_hand(tmp_path, status="running", host="elsewhere")
    assert StatusView(tmp_path).look().rows[0].state == "running"


# ---- by hand: what cannot be made quickly ----


def by_hand(folder: Path, rows: int = 0, **known: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"status": "finished", "host": HERE, "pid": 2**22 + 1, "steps": 100} | known
    (folder / "run.json").write_text(json.dumps(known), encoding="utf-8")
    lines = [
        {"step": n, "train/loss": 1 / n, "train/tokens": 10, "train/step_seconds": 0.5} for n in range(1, rows + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def ledger(folder: Path, *entries: dict, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    told = [
        {"number": n, "folder": str(n), "overrides": [], "axes": {"seed": str(n)}, "status": "running"} | entry
        for n, entry in enumerate(entries)
    ]
    sweep = {"name": "sw", "host": HERE, "pid": 2**22 + 1, "axes": ["seed"], "jobs": told} | more
    (folder / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    return folder


def stand_in(folder: Path, **answers: str) -> dict[str, str]:
    """Write scripts that replace squeue and sacct on the path and note each call."""
    folder.mkdir()
    for name, answer in answers.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\necho {name} $* >> {folder}/asked\n{answer}\n", encoding="utf-8")
        script.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_what_slurm_says(status: Shell, tmp_path: Path) -> None:
    """With scripts in place of Slurm's commands: all states of a job, with one call of each command."""
    sweep = tmp_path / "sw"
    by_hand(sweep / "0", 40, status="running", host="n1")
    by_hand(
        sweep / "1", 40, status="stopped", reason="stopped by SIGUSR2", requeues=[{"at": "x", "why": "y", "step": 9}]
    )
    by_hand(sweep / "3", 40, status="running", host="n2")
    by_hand(sweep / "4", 40, status="running", host="n2")
    by_hand(sweep / "6", 40, status="failed", reason="rank 3 failed: the process was killed by SIGKILL", host="n2")
    ledger(sweep, *({"job_id": f"12_{n}", "token": f"x.{n}"} for n in range(8)))
    env = stand_in(
        tmp_path / "bin",
        squeue="cat <<E\n12_0|RUNNING|None|1:02:03|n[1-2]\n12_1|PENDING|BeginTime|4:00:00|\n"
        "12_2|PENDING|PartitionTimeLimit|4:00:00|\n12_6|OUT_OF_MEMORY|OutOfMemory|0:00|n2\n"
        "12_7|RUNNING|None|UNLIMITED|n3\n99|RUNNING|None|1:00|n4\nE",
        sacct="cat <<E\n12_3|TIMEOUT|None|n2|0:0\n12_5|CANCELLED by 0|None|None assigned|0:0\nE",
    )
    answer, facts = status("sw", **env), jobs(status("sw", "--json", **env))
    assert answer.returncode == 1
    assert (tmp_path / "bin" / "asked").read_text(encoding="utf-8").count("squeue") == 2  # once per view
    states = {label: job["status"] for label, job in facts.items()}
    assert states == {"seed=0": "running", "seed=1": "waiting", "seed=2": "waiting", "seed=3": "lost", "seed=4": "lost",
                      "seed=5": "lost", "seed=6": "failed", "seed=7": "running"}  # fmt: skip
    lines = answer.stdout.splitlines()
    assert re.search(r"^seed=0 .* 40/100 \(40%\) .* 30 s .* 1 h 02 min +12_0 +n\[1-2\]$", lines[2])
    assert re.search(r"^seed=1 +waiting \(BeginTime\) .* 1 × ", lines[3])
    below = answer.stdout.partition("\n\n")[2]
    assert "seed=2 is waiting: Slurm will not start it (PartitionTimeLimit)" in below
    assert "`scancel 12_2` removes it from the queue." in below
    assert "seed=3 is lost: Slurm says TIMEOUT: its time limit was reached." in below
    assert "seed=4 is lost: Slurm no longer knows job 12_4, and the run did not say how it ended." in below
    assert "seed=5 is lost: Slurm says CANCELLED: it was cancelled." in below
    assert (
        "seed=6 is failed: rank 3 failed: the process was killed by SIGKILL. Slurm says OUT_OF_MEMORY: it took more "
        "memory than it was given." in below
    )
    assert facts["seed=0"]["slurm"]["seconds_left"] == 3723


def test_slurm_that_gives_no_answer(status: Shell, tmp_path: Path) -> None:
    """With a squeue that fails: one line says so, and the table shows what the folders say."""
    by_hand(tmp_path / "sw" / "0", 3, status="running", host="n1")
    ledger(tmp_path / "sw", *({"job_id": f"12_{n}", "token": f"x.{n}"} for n in range(2)))
    env = stand_in(
        tmp_path / "bin", squeue="echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    )
    answer = status("sw", **env)
    assert answer.returncode == 0
    found = json.loads(status("sw", "--json", **env).stdout)
    assert [job["status"] for job in found["jobs"]] == ["running", "running"]
    assert "Unable to contact slurm controller" in found["slurm_gave_no_answer"]
    said = [line for line in answer.stdout.splitlines() if "Slurm" in line and "limit" not in line]
    assert len(said) == 1
    assert said[0].startswith("Slurm gave no answer, so this is what the folders say (squeue ")
    assert said[0].endswith("Unable to contact slurm controller)")


def test_jobs_without_a_cluster_are_not_asked_of_one(status: Shell, tmp_path: Path) -> None:
    """The ids of such jobs are process ids."""
    by_hand(tmp_path / "sw" / "0", 3)
    ledger(tmp_path / "sw", {"job_id": "4711"})
    env = stand_in(tmp_path / "bin", squeue="echo '4711|FAILED|None|0:00|n1'")
    assert jobs(status("sw", "--json", **env))["seed=0"]["status"] == "finished"
    assert not (tmp_path / "bin" / "asked").exists()


HERE_JOB = Job(0, "0", [], status="running", job_id="7")
DEAD, WORKS, QUEUED = Known("7", "NODE_FAIL"), Known("7", "RUNNING"), Known("7", "PENDING", "Resources")
RUNNING = {"status": "running", "host": HERE, "pid": 1}


@pytest.mark.parametrize(
    ("evidence", "state"),
    [
        ({"known": {"status": "finished"}, "slurm": WORKS}, "finished"),
        ({"known": RUNNING, "lives": True, "slurm": DEAD}, "running"),  # its ranks are still ending
        ({"known": RUNNING, "lives": False, "slurm": WORKS, "job": HERE_JOB}, "running"),  # it begins again
        ({"known": RUNNING, "lives": False, "slurm": WORKS}, "lost"),  # one of several in an allocation
        ({"known": {"status": "failed"}, "slurm": WORKS}, "failed"),
        ({"known": {"status": "stopped"}, "slurm": WORKS, "job": HERE_JOB}, "running"),  # about to be requeued
        ({"known": {"status": "failed"}, "slurm": Known("7", "COMPLETING"), "job": HERE_JOB}, "failed"),
        ({"known": {"status": "stopped"}, "slurm": QUEUED, "job": HERE_JOB}, "waiting"),
        ({"known": RUNNING, "slurm": DEAD, "job": HERE_JOB}, "lost"),
        ({"known": RUNNING}, "running"),  # on another machine, where nothing can be seen
        ({"known": RUNNING, "answered": True}, "lost"),
        ({"known": RUNNING, "lives": False, "job": Job(0, "0", [], status="waiting"), "sweeps": True}, "waiting"),
        ({"known": {"status": "failed"}, "job": Job(0, "0", [], status="waiting"), "sweeps": False}, "failed"),
        ({"job": Job(0, "0", [], status="skipped")}, "skipped"),
        ({"job": HERE_JOB, "answered": True}, "lost"),
        ({"job": HERE_JOB, "slurm": DEAD}, "lost"),
        ({"job": HERE_JOB, "sweeps": False}, "running"),  # Slurm gave no answer
        ({"known": {}}, "stopped"),
    ],
)
def test_the_state_of_a_job(evidence: dict[str, Any], state: str) -> None:
    assert state_of(Evidence(Path("0"), **({"job_id": "7"} | evidence)))[0] == state


def test_a_reason_is_read_without_its_traceback() -> None:
    text = (
        "rank 2 failed: Traceback (most recent call last):\n  File x\nZeroDivisionError: on purpose\n"
        "Its log: sw/0/logs/rank2.log\nIt was last seen in step 3, in its forward phase."
    )
    assert legible(text) == "rank 2 failed: ZeroDivisionError: on purpose Its log: sw/0/logs/rank2.log."


def test_the_end_of_a_curve(tmp_path: Path) -> None:
    """Read a curve while it is written: half a line, lines that are not rows, and a score many rows before the end."""
    path = tmp_path / "metrics.jsonl"
    assert view.read_curve(path) == view.Curve()
    row = {
        "train/loss": 0.5,
        "train/tokens": 8,
        "train/step_seconds": 0.25,
        "train/policy/x": 0.0,
        "padding": "x" * 900,
    }
    lines = [json.dumps({"step": n} | row) for n in range(1, 1001)]
    lines[9] = json.dumps({"step": 10, "train/objective/scores": 0.75} | row)
    path.write_text("\n".join(lines) + "\nnot a row\n" + '{"step": 1001, "train/lo', encoding="utf-8")
    assert view.read_curve(path) == view.Curve(1000, 0.5, 0.75, 32.0, 0.25)
    path.write_text(json.dumps({"step": 1, "train/step_seconds": 2.0}) + "\n", encoding="utf-8")
    assert view.read_curve(path) == view.Curve(1, None, None, None, 2.0)


def test_a_hundred_long_runs_are_read_at_once(tmp_path: Path) -> None:
    """Each has 100,000 steps; 0.2 s were measured."""
    rest = ', "train/loss": 0.5, "x": "' + "x" * 700 + '"}\n'
    rows = "".join(f'{{"step": {n}{rest}' for n in range(1, 100_001))
    (tmp_path / "long").write_text(rows, encoding="utf-8")
    sweep = ledger(tmp_path / "sw", *({} for _ in range(100)))
    for n in range(100):
        by_hand(sweep / str(n), steps=100_000)
        (sweep / str(n) / "metrics.jsonl").unlink()
        (sweep / str(n) / "metrics.jsonl").hardlink_to(tmp_path / "long")
    began = time.process_time()
    look = StatusView(sweep).look()
    assert time.process_time() - began < 2
    assert {row.curve.step for row in look.rows} == {100_000}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("bars", [False, True])
def test_a_narrow_terminal_stays_readable(tmp_path: Path, width: int, bars: bool) -> None:
    """No line is longer than the terminal, and labels with the same beginning stay different."""
    axes = [{"data.path": "a/very/long/folder/of/data", "seed": str(n)} for n in range(30)]
    sweep = ledger(tmp_path, *({"axes": each, "status": "waiting"} for each in axes))
    for n in range(30):
        by_hand(sweep / str(n), 40, status="failed" if n == 29 else "finished", reason="[/x] it fell")
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(draw.page(StatusView(sweep).look(), width, lines=16 if bars else None, bars=bars))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = [line for line in lines if "finished" in line and "more" not in line]
    assert len({line.split("  ")[0] for line in shown}) == len(shown) == (11 if bars else 29)
    assert any(line.split()[-4:] and "failed" in line for line in lines)  # a failed job is not left out
    assert ("steps" in lines[0]) == (width > 20)
    assert any("━" in line for line in lines[2:]) == (bars and width >= 80)
    if not bars:
        assert "[/x] it fell" in " ".join("".join(f"{line} " for line in lines[32:]).split())


def test_names_that_would_move_the_cursor(tmp_path: Path) -> None:
    by_hand(tmp_path / "a\x1b[2Jb\udcff")
    assert "a\\x1b[2Jb" in draw.text(StatusView(tmp_path).look())


def test_who_has_not_written_for_long_is_named(tmp_path: Path) -> None:
    by_hand(tmp_path / "r", 20, status="running", host="n7")
    for path in (tmp_path / "r").iterdir():
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert "r is running: no sign of life for 2 h 00 min" in draw.text(StatusView(tmp_path / "r").look())


def test_a_long_step_is_watched_while_it_goes_on(tmp_path: Path) -> None:
    for label, since in (("short", 3.0), ("long", 60.0)):
        by_hand(tmp_path / label, 20, status="running", host="n7")
        Whereabouts(tmp_path / label, 0).tell(step=21, phase="backward", peaks={}, pack=3, packs=8, tokens=3000,
                                              of_tokens=8000, began=time.time() - since, pace=0.025)  # fmt: skip
    shown = draw.text(StatusView(tmp_path).look())
    assert "long is in step 21: pack 3 of 8, backward, 3,000 of 8,000 tokens, 140 s left of the step" in shown
    assert "short is in" not in shown


def test_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake gives one message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text('{"jobs": [', encoding="utf-8")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "sweep.json").write_text('{"jobs": [{"number": 1}]}', encoding="utf-8")
    ledger(tmp_path / "none")
    ledger(tmp_path / "number", {"folder": 7})
    by_hand(tmp_path / "r")
    for args, said in {
        ("nowhere",): "nowhere: no such folder.",
        ("empty",): "empty: holds no run: no sweep.json, no run.json",
        ("broken",): "broken/sweep.json: is not a sweep's ledger (",
        ("odd",): "odd/sweep.json: is not a sweep's ledger (",
        ("number",): "number/sweep.json: is not a sweep's ledger (job 0).",
        ("none",): "none/sweep.json: names no job.",
        ("r/run.json",): "r/run.json: no such folder.",
        ("r", "--watch", "--every", "0"): "--every 0: must be greater than 0.",
        ("r", "--watch", "--every", "nan"): "--every nan: must be greater than 0.",
        ("r", "--every", "3"): "--every 3: sets how often --watch looks.",
        ("r", "--json", "--watch"): "--json: prints one answer,",
    }.items():
        assert main(args) == 1, args
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith(f"rlexp: {said}"), told.err
        assert told.err.count("\n") == 1
    (tmp_path / "r" / "run.json").write_text("{", encoding="utf-8")
    assert main(["r"]) == 0
    assert "r is stopped: r/run.json: is missing or cannot be read" in capsys.readouterr().out


def test_looking_imports_no_torch() -> None:
    code = "import sys, rlexp.status.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0
