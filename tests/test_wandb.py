"""The real W&B client, offline, and a server of the test's own for what would arrive online."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlexp.config.schema import WandbMode
from rlexp.sinks.wandb_account import wandb_mode
from tests.wandb_server import WandbServer

ARGS = ("launch.device=cpu", "hydra.run.dir=run", "engine=torch", "checkpoint.export=false", "parallel=ring2")
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"} | {"NETRC": "/dev/null"}


def inspect_only(folder: Path) -> list[dict]:
    (run,) = (folder / "run" / "wandb").glob("offline-run-*")
    return inspect(run)


def inspect(run: Path) -> list[dict]:
    """The records of an offline run, by W&B's own reader."""
    wandb = Path(sys.executable).parent / "wandb"
    answer = subprocess.run(
        [str(wandb), "leet", "inspect", "--json", str(run)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]


def history(records: list[dict]) -> list[dict]:
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def test_an_offline_run_holds_every_row_and_the_configuration(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rlexp",
        *ARGS,
        "train.max_steps=3",
        "logger.group=sweep",
        "logger.tags=[mine]",
    ]
    answer = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    records = inspect_only(tmp_path)
    rows = history(records)
    expected = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/global_step"] for row in rows] == [1, 2, 3]
    for row, wanted in zip(rows, expected, strict=True):
        assert {name: row[name] for name in wanted if name != "step"} == {
            k: v for k, v in wanted.items() if k != "step"
        }
    text = json.dumps(records)
    for part in ("ring_size", "grad_acc", '"sweep"', '"mine"', '"ring2"', "train/global_step"):
        assert part in text, part


def test_what_arrives_online(tmp_path: Path) -> None:
    """The real client against a server of the tests' own: rows, name, group, tags and configuration."""
    command = [sys.executable, "-m", "rlexp", *ARGS, "train.max_steps=3", "logger.group=sweep", "logger.run_name=mine"]
    with WandbServer() as server:
        online = CLEAN | {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
        }
        answer = subprocess.run(
            command, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=120, check=False
        )
    assert answer.returncode == 0, answer.stderr
    expected = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/global_step"] for row in server.rows] == [1, 2, 3]
    assert [row["train/loss"] for row in server.rows] == [row["train/loss"] for row in expected]
    assert server.exit_codes == [0]
    first = server.runs[0]
    assert (first["displayName"], first["groupName"], first["jobType"]) == ("mine", "sweep", "train")
    assert {"dpo", "ring2"} <= set(first["tags"])
    config = json.loads(first["config"])
    assert (config["ring_size"]["value"], config["grad_acc"]["value"]) == (2, 8)


def test_a_killed_run_keeps_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlexp", *ARGS, "train.max_steps=100000"]
    process = subprocess.Popen(command, cwd=tmp_path, env=CLEAN, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (path.exists() and len(path.read_text().splitlines()) >= 10) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    time.sleep(1)
    # The client writes to disk every second; without that it would be every 15, and nothing would be left.
    assert len(history(inspect_only(tmp_path))) >= 8


GOES_ON = (*ARGS, "checkpoint.save_every=5", "logger.progress=false")


def kill_after(folder: Path, env: dict[str, str], rows: int) -> None:
    """Start a run and kill its launcher, and with it all of it, some rows after its last checkpoint."""
    command = [sys.executable, "-m", "rlexp", *GOES_ON, "train.max_steps=100000"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (path.exists() and len(path.read_text().splitlines()) >= rows) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    time.sleep(2)


def test_a_killed_run_goes_on_in_the_same_offline_run(tmp_path: Path) -> None:
    """Its fragments together hold every step once: neither those computed twice twice, nor those lost not at all."""
    kill_after(tmp_path, CLEAN, rows=33)
    command = [sys.executable, "-m", "rlexp", *GOES_ON, "train.max_steps=60"]
    answer = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "goes on from" in answer.stderr
    fragments = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len({fragment.name.rpartition("-")[2] for fragment in fragments}) == 1  # one id
    steps = [row["train/global_step"] for fragment in fragments for row in history(inspect(fragment))]
    assert sorted(steps) == list(range(1, 61))
    assert all(row["_step"] == row["train/global_step"] for row in history(inspect(fragments[-1])))


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_the_same_online_run(tmp_path: Path) -> None:
    with WandbServer() as server:
        online = CLEAN | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}
        kill_after(tmp_path, online, rows=13)
        arrived = len(server.rows)
        command = [sys.executable, "-m", "rlexp", *GOES_ON, "train.max_steps=20"]
        answer = subprocess.run(
            command, cwd=tmp_path, env=online, capture_output=True, text=True, timeout=120, check=False
        )
    assert answer.returncode == 0, answer.stderr
    assert len({run["name"] for run in server.runs}) == 1
    assert arrived < 20
    assert [row["train/global_step"] for row in server.rows] == list(range(1, 21))


@pytest.mark.parametrize(
    ("asked", "env", "expected"),
    [
        (WandbMode.offline, {"WANDB_API_KEY": "x" * 40}, "offline"),
        (WandbMode.auto, {"WANDB_API_KEY": "x" * 40}, "online"),
        (WandbMode.auto, {"WANDB_MODE": "offline", "WANDB_API_KEY": "x" * 40}, "offline"),
        (WandbMode.auto, {}, "offline"),
    ],
)
def test_online_with_an_account_and_offline_without(monkeypatch, asked, env, expected) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(asked) == expected


def test_a_key_in_netrc_is_an_account(monkeypatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n", encoding="utf-8")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(WandbMode.auto) == "online"
