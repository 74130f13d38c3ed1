"""`python -m rlexp.dashboard`: the workspace that reaches W&B's server, and the output without an account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlexp.dashboard import __main__ as command
from tests.helpers.wandb_runs import CLEAN
from tests.helpers.wandb_server import StoredRun, WandbServer

METRICS = {
    "Loss": ["train/loss", "eval/loss", "train/loss", "train/rewards/margins"],
    "Samples": [
        *("train/objective/scores", "train/objective/scores", "train/objective/kl", "train/policy/entropy_avg"),
        *("train/val/ratio", "train/sampling/sampling_logp_difference/mean"),
        *("train/response/length", "train/response/stopped"),
    ],
    "Difference to the baseline": ["parity/loss_abs_diff"],
    "Memory": [
        *("max/memory/peak_bytes", "max/memory/tensors_peak_bytes"),
        *(f"memory/{each}_peak_bytes" for each in ["collect", "data", "reference", "forward", "backward", "optimizer"]),
    ],
    "Throughput": ["train/tokens_per_second", "train/step_seconds", "train/tflops"],
}


def run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlexp.dashboard", *args],
        cwd=folder, env=CLEAN | env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("sampled", [False, True])
def test_the_workspace_that_is_sent(tmp_path: Path, sampled: bool) -> None:
    """The workspace has panels of samples if a run draws them."""
    with WandbServer() as server:
        server.stored["a"] = StoredRun("a", summary={"train/loss": 0.5})
        if sampled:
            server.stored["b"] = StoredRun("b", summary={"train/loss": 0.5, "train/policy/entropy_avg": 1.0})
        answer = run(tmp_path, "--group", "sweep", **server.environment)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == f"made: {server.url}/someone/rlexp?nw={server.views[0]['name'][3:-2]}\n"
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["type"]) == ("someone", "rlexp", "project-view")
    assert view["displayName"] == "rlexp ring sizes, sweep"
    section = json.loads(view["spec"])["section"]
    panels = {each["name"]: each["panels"] for each in section["panelBankConfig"]["sections"]}
    assert {name: [p["config"]["metrics"][0] for p in each] for name, each in panels.items()} == {
        name: metrics for name, metrics in METRICS.items() if sampled or name != "Samples"
    }
    lines = [p["config"] for each in panels.values() for p in each if p["viewType"] == "Run History Line Plot"]
    assert {line["xAxis"] for line in lines} == {"train/global_step"}
    assert [p["config"]["chartTitle"] for each in panels.values() for p in each if p["viewType"] == "Bar Chart"] == [
        "Highest peak by ring size",
        "Highest peak of tensors by ring size",
    ]
    loss = panels["Loss"][0]["config"]
    assert (loss["groupBy"], loss["groupAgg"]) == ("ring_size.value", "mean")
    assert "groupBy" not in panels["Loss"][2]["config"]
    assert panels["Difference to the baseline"][0]["config"]["yLogScale"]
    (filtered,) = section["runSets"][0]["filters"]["filters"]
    assert (filtered["key"], filtered["op"], filtered["value"]) == ({"section": "run", "name": "group"}, "=", "sweep")


@pytest.mark.parametrize(
    ("args", "refused", "said"),
    [
        (["nothing"], None, "rlexp: someone/nothing: no such project, or this account may not see it."),
        (["--entity", "else"], "permission denied", "permission denied"),
    ],
)
def test_what_the_server_refuses_is_one_message(tmp_path: Path, args: list[str], refused: str, said: str) -> None:
    with WandbServer() as server:
        server.refused = refused
        answer = run(tmp_path, *args, **server.environment)
    assert answer.returncode == 1
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert server.views == []


def fragment(run_dir: Path, name: str) -> None:
    place = run_dir / "wandb" / f"offline-run-20261121_000000-{name}"
    place.mkdir(parents=True)
    (place / f"run-{name}.wandb").touch()


def test_without_an_account_it_says_what_and_where(tmp_path: Path) -> None:
    fragment(tmp_path / "runs" / "one", "one-000000")
    fragment(tmp_path / "runs" / "sweep" / "0", "sweep-0-000000")
    old, new = tmp_path / "runs" / "old" / "report.html", tmp_path / "runs" / "sweep" / "report.html"
    for path, when in ((old, 1), (new, 2)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (when, when))
    for _ in range(2):  # a second call changes nothing
        answer = run(tmp_path, "mine", DISPLAY="", WAYLAND_DISPLAY="")
        assert answer.returncode == 0, answer.stderr
    assert "There is no W&B account here" in answer.stdout
    assert "in the W&B project mine, for all runs" in answer.stdout
    for name, metrics in METRICS.items():
        assert name in answer.stdout
        assert all(metric in answer.stdout for metric in metrics)
    assert "The newest report: runs/sweep/report.html" in answer.stdout
    assert "wandb leet runs/wandb\n" in answer.stdout
    together = sorted((tmp_path / "runs" / "wandb").iterdir())
    assert [link.name.partition("-run-")[2] for link in together] == [
        "20261121_000000-one-000000", "20261121_000000-sweep-0-000000",
    ]  # fmt: skip
    assert all((link / f"run-{link.name[28:]}.wandb").exists() for link in together)


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    with WandbServer() as server:
        answer = run(tmp_path, "--dry-run", "--entity", "team", **server.environment)
    assert answer.returncode == 0
    assert "would make the workspace “rlexp ring sizes” in the W&B project team/rlexp" in answer.stdout
    assert server.views == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("display", "opened"), [(":0", True), ("", False)])
def test_the_report_opens_where_there_is_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, display: str, opened: bool
) -> None:
    (tmp_path / "report.html").touch()
    asked: list[str] = []
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(command.sys, "platform", "linux")
    monkeypatch.setattr(command.webbrowser, "open", lambda url: asked.append(url) or True)
    command.look_here(tmp_path)
    assert asked == ([(tmp_path / "report.html").as_uri()] if opened else [])
    assert ("Opened " if opened else "The newest report: ") in capsys.readouterr().out
