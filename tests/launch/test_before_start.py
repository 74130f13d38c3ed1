"""`launch.preflight`: a run that cannot fit does not start, and says what would fit; `engine=auto` takes what fits."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlexp.base import waiting
from rlexp.config.gpu_descriptions import gpu_of
from rlexp.config.hardware import memory_here
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, HardwareConfig
from rlexp.launch import preflight_check
from rlexp.launch.planning import Planned, refusal
from rlexp.launch.preflight_check import Decision, DoesNotFitError, prepared
from rlexp.launch.rank_reports import read_verdict
from rlexp.launch.slurm.launcher import SlurmLauncher
from rlexp.launch.submitting import handed
from rlexp.launch.sweep import Sweep
from tests.conftest import Shell
from tests.helpers.runs import jobs_of

MIB = 1 << 20
TWO_GPUS = """#!/bin/sh
case "$*" in
  *memory.total*) echo {memory}; echo {memory};;
  *query-gpu=name*) echo "{name}"; echo "{name}";;
  *compute_cap*) echo 9.0; echo 9.0;;
  *) echo 'GPU 0: a (UUID: x)'; echo 'GPU 1: b (UUID: y)';;
esac
"""
# A tiny model on two GPUs of 3.6 MiB. With 3.8 MiB at its peak it does not fit.
TINY = ("launch.device=cuda", "parallel=ring2", "logger=none", "hardware.memory_gib=0.0035")


def gpus(folder: Path, name: str = "NVIDIA H100 80GB HBM3", memory: str = "81559") -> str:
    """Return a PATH on which nvidia-smi plays two GPUs: there are none here."""
    fake = folder / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(TWO_GPUS.format(name=name, memory=memory), encoding="utf-8")
    fake.chmod(0o755)
    return f"{fake.parent}:/usr/bin:/bin"


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", gpus(tmp_path))
    monkeypatch.setattr(preflight_check, "_known", {})
    monkeypatch.setattr(preflight_check, "_told", set())
    for bound in ("PREDICTING", "HELPING"):
        monkeypatch.setattr(preflight_check, bound, 600.0)  # a busy machine is no defect


# ---- the device ----


def test_auto_is_what_the_gpus_say_of_themselves(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    here = gpu_of(HardwareConfig())
    assert here is not None
    assert (here.name, here.memory_gib, here.reserve_gib) == ("h100", 79.1, 2.5)
    # What the user gives comes first; with the memory, the reserve is the user's too.
    less = gpu_of(HardwareConfig(memory_gib=40.0, link_gb_s=1.0))
    assert less is not None
    assert (less.memory_gib, less.reserve_gib, less.link_gb_s, less.bf16_tflops) == (40.0, 0.0, 1.0, 989)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-1")  # a part of a GPU
    assert memory_here() is None


def test_a_gpu_that_nobody_knows_has_memory_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", gpus(tmp_path, "NVIDIA New", "102400"))
    here = gpu_of(HardwareConfig())
    assert here is not None
    assert (here.name, here.memory_gib) == ("auto", 99.3)


def test_gpus_whose_memory_cannot_be_told_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", gpus(tmp_path, memory="[N/A]"))
    cfg = compose_config(["launch.device=cuda", "parallel=ring2"])
    assert preflight_check.device_of(cfg) == (None, preflight_check.UNKNOWN)


def test_the_gpus_of_a_login_node_are_not_those_of_its_jobs(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = judged(monkeypatch, Decision(fits=True))
    assert prepared(compose_config(TINY[:-1]), here=False)[1].fits is None
    assert asked == []
    assert capsys.readouterr().err == f"rlexp: {preflight_check.ELSEWHERE}\n"
    for words in (("hardware=a100",), ("hardware.memory_gib=40",)):
        _, decision = prepared(compose_config([*TINY[:-1], *words]), here=False)
        assert decision.fits
    assert [each.hardware.bf16_tflops for each in asked] == [312, 989]


@pytest.mark.parametrize(
    ("words", "limited"),
    [
        (("launch.device=cpu",), False),
        (("launch.device=cpu", "hardware=h100"), False),  # a CPU is no GPU, whatever is predicted elsewhere
        (("launch.device=cpu", "hardware.memory_gib=1"), True),
        (("launch.device=cuda", "hardware=a100"), True),
        (("launch.device=cuda",), True),
        (("launch.device=cuda", "launch.preflight=off"), False),
    ],
)
def test_what_limits_a_run(two_gpus: None, words: tuple[str, ...], limited: bool) -> None:
    hardware, why = preflight_check.device_of(compose_config([*words, "parallel=ring2"]))
    assert (hardware is not None) is limited
    assert why == ""


# ---- a run ----


def test_a_run_that_cannot_fit_names_a_change_that_does(
    rlexp: Shell, tmp_path: Path, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped before any process starts; the change, typed, fits."""
    asked = (*TINY, "engine=zero2")  # of which fewer changes are tried than of zero1
    told = rlexp(*asked, "hydra.run.dir=run", PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert told.returncode == 1
    assert told.stdout == ""
    assert "Traceback" not in told.stderr
    assert re.search(r"^rlexp: the run does not fit: it needs 3\.\d MiB at its peak \(\w+\), and ", told.stderr, re.M)
    assert "and a rank may take 3.6 MiB on h100. " in told.stderr
    assert "To start it all the same: launch.preflight=off." in told.stderr
    assert re.search(r"\npeak memory of rank \d by phase, MiB\n", told.stderr)
    assert re.search(r"\n  engine=zero3 +\d\.\d MiB ", told.stderr), "the other changes are listed with what they need"
    assert not (tmp_path / "run").exists(), "a refused run leaves no folder"
    change = re.search(r"The cheapest change that fits: (.*) \((\d\.\d) MiB\)\.", told.stderr)
    assert change is not None
    cfg, decision = prepared(compose_config([*asked, *change.group(1).split()]))
    assert decision.fits is True
    assert f"{decision.peak / MIB:.1f}" == change.group(2)
    assert cfg.hardware.name == "h100"


@pytest.mark.slow
def test_engine_auto_takes_the_first_that_fits(two_gpus: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of 8 million parameters each, and short sequences: what the engines hold decides."""
    sizes = ("launch.device=cuda", "parallel=ring2", "logger=none", "model.hidden_size=512", "model.layers=4",
             "model.intermediate_size=4096", "data.max_length=64", "train.batch_size=2",
             "memory.checkpointing=true")  # fmt: skip
    peaks = {}
    for engine in ("zero1", "zero2", "fsdp2", "zero3"):
        with pytest.raises(DoesNotFitError) as refused:
            prepared(compose_config([*sizes, f"engine={engine}", "hardware.memory_gib=0.001"]), helping=False)
        peaks[engine] = refused.value.decision.peak
    assert peaks["zero2"] < peaks["zero1"]
    room = (peaks["zero1"] + peaks["zero2"]) / 2 / (1 << 30)
    cfg, decision = prepared(compose_config([*sizes, f"hardware.memory_gib={room}"]))
    assert cfg.engine.name.value == decision.engine == "zero2"
    assert f"; zero1 needs {preflight_check.size(peaks['zero1'])}" in (cfg.engine.chosen or "")
    assert f"engine=auto takes zero2: {cfg.engine.chosen}" in capsys.readouterr().err
    with pytest.raises(DoesNotFitError, match=r"no engine fits \(zero1 needs .*, zero2 needs .*, fsdp2 .*, zero3 .*\)"):
        prepared(compose_config([*sizes, f"hardware.memory_gib={min(peaks.values()) / 2 / (1 << 30)}"]), helping=False)


@pytest.mark.slow
def test_micro_batches_are_smaller_where_the_usual_ones_do_not_fit(
    two_gpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 pairs of up to 1,024 tokens fill 16,384 on each of two ranks. One pair has 512 there."""
    words = ("launch.device=cuda", "parallel=ring2", "logger=none", "train.batch_size=64", "engine=torch")
    peaks = {}
    for tokens in (16384, 4096):
        given = (*words, f"train.max_tokens_per_micro_batch={tokens}", "hardware.memory_gib=1")
        peaks[tokens] = prepared(compose_config([*given]))[1].peak
    assert peaks[4096] < 0.4 * peaks[16384]
    room = f"hardware.memory_gib={1.02 * peaks[4096] / (1 << 30)}"
    cfg, decision = prepared(compose_config([*words, room]))
    assert (cfg.train.max_tokens_per_micro_batch, decision.peak) == (4096, peaks[4096])
    assert "train.micro_batch_size=auto takes up to 4,096 tokens a rank: more do not fit" in capsys.readouterr().err
    with pytest.raises(DoesNotFitError, match=r"train\.max_tokens_per_micro_batch="):  # said, and so not changed
        prepared(compose_config([*words, room, "train.max_tokens_per_micro_batch=16384"]))


@pytest.mark.slow
def test_two_changes_are_tried_where_one_is_not_enough(two_gpus: None) -> None:
    words = [*TINY, "train.micro_batch_size=2"]
    with pytest.raises(DoesNotFitError) as refused:
        prepared(compose_config([*words, "engine=zero2"]))
    change = re.search(r"The cheapest change that fits: (\S+ \S+) \(", refused.value.reason)
    assert change is not None, refused.value.reason
    assert prepared(compose_config([*words, "engine=zero2", *change.group(1).split()]))[1].fits
    little = [*words[:3], "hardware.memory_gib=0.0005", "engine=zero3", "memory.checkpointing=true"]
    with pytest.raises(DoesNotFitError, match="None of the changes below makes it fit, nor do two of them together"):
        prepared(compose_config(little))


@pytest.mark.slow
def test_ranks_that_share_a_gpu_share_its_memory(two_gpus: None) -> None:
    """What fits once on a GPU fits four times on one that is four times as large, and not on a smaller one."""
    words = ("launch.device=cuda", "parallel=ring2", "logger=none", "engine=torch", "train.batch_size=8",
             "train.max_tokens_per_micro_batch=2048", "hardware.host_memory_gib=1000")  # fmt: skip
    peak = prepared(compose_config([*words, "hardware.memory_gib=1"]))[1].peak / (1 << 30)
    four = (*words, "launch.ranks_per_gpu=4", "train.batch_size=32")  # on four times as many replicas
    assert prepared(compose_config([*four, f"hardware.memory_gib={4.1 * peak}"]))[1].fits
    said = r"a rank may take .* on h100, of which launch\.ranks_per_gpu=4 gives it 1/4"
    with pytest.raises(DoesNotFitError, match=said):
        prepared(compose_config([*four, f"hardware.memory_gib={3.9 * peak}"]), helping=False)


# ---- a rehearsal that fails stops nothing ----


def judged(monkeypatch: pytest.MonkeyPatch, decision: Decision) -> list[Config]:
    """Let a rehearsal answer this; return the configurations that it was asked about."""
    asked: list[Config] = []

    def rehearsed(cfg: Config, key: str, **_: Any) -> Decision:
        asked.append(cfg)
        return dataclasses.replace(decision, of=key)

    monkeypatch.setattr(preflight_check, "rehearsed", rehearsed)
    return asked


def test_who_waits_for_a_rehearsal_is_told_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process answers once something was told."""
    told, go = list[str](), tmp_path / "go"

    def print_line(line: str) -> None:
        told.append(line)
        go.touch()

    monkeypatch.setattr(preflight_check, "print_line", print_line)
    monkeypatch.setattr(waiting, "EVERY", 0.01)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    slow = (
        "import pathlib, sys, time\nquestion = sys.stdin.read()\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\nprint(question * 2, end='')"
    )
    command = [sys.executable, "-c", slow, str(go)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert preflight_check._answered(process, "abc", 300.0) == ("abcabc", None)
    finally:
        process.kill()
    assert re.fullmatch(r"rehearses whether the run fits \(at most 300 s\), \d+ s so far", told[0])


def test_a_rehearsal_that_takes_too_long_stops_nothing(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight_check, "PREDICTING", 0.01)
    cfg, decision = prepared(compose_config(TINY))
    assert decision.fits is None
    assert cfg.engine.name.value == "zero1"
    said = "rlexp: the run was not rehearsed before it starts: it took longer than 0.01 seconds.\n"
    assert capsys.readouterr().err == said


def test_a_rehearsal_that_dies_stops_nothing(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight_check.sys, "executable", "/bin/false")
    assert prepared(compose_config(TINY))[1].fits is None
    assert "not rehearsed before it starts: it ended with status 1 (it said nothing)." in capsys.readouterr().err


def test_what_cannot_be_rehearsed_is_started_with_one_line(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = judged(monkeypatch, Decision(fits=True))
    monkeypatch.setattr(preflight_check, "unrehearsable", lambda _: "it cannot be.")
    assert prepared(compose_config(TINY))[1].fits is None
    assert asked == []
    assert capsys.readouterr().err == "rlexp: the run was not rehearsed before it starts: it cannot be.\n"


def test_a_decision_in_the_runs_folder_is_taken_again(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on, or a job whose launcher has rehearsed it, does not rehearse again, if it is the same."""
    asked = judged(monkeypatch, Decision(fits=True, peak=7, engine="zero2", engine_chosen="a reason"))
    cfg, decision = prepared(compose_config(TINY), tmp_path)
    preflight_check.keep(tmp_path, decision)
    assert (cfg.engine.name.value, cfg.engine.chosen, len(asked)) == ("zero2", "a reason", 1)
    preflight_check._known.clear()
    assert prepared(compose_config([*TINY, "seed=3"]), tmp_path) == (
        dataclasses.replace(cfg, seed=3),
        dataclasses.replace(decision),
    )
    assert len(asked) == 1, "the seed changes no prediction"
    prepared(compose_config([*TINY, "data.max_length=64"]), tmp_path)
    assert len(asked) == 2, "the length does"
    preflight_check.keep(tmp_path, dataclasses.replace(decision, fits=False))
    assert preflight_check.read(tmp_path, decision.of) is None, "a run that was refused is rehearsed again"
    preflight_check.keep(tmp_path, Decision())
    assert preflight_check.read(tmp_path) is None, "what was predicted of an earlier start is not of this one"


# ---- sweeps ----


def test_a_job_that_cannot_fit_is_skipped_and_the_others_run(rlexp: Shell, tmp_path: Path) -> None:
    """On CPU, where hardware.memory_gib limits a rank."""
    answer = rlexp("-m", "launch.device=cpu", "logger=none", "engine=torch", "checkpoint.export=false",
                   "parallel=ring2", "train.max_steps=1", "hardware.memory_gib=0.01", "data.max_length=512,4096",
                   "hydra.sweep.dir=sw")  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    first, second = jobs_of(tmp_path / "sw")
    assert (first["status"], second["status"]) == ("finished", "skipped")
    assert second["predicted"] > 10.2 * MIB
    assert second["reason"].startswith(
        f"the run does not fit: it needs {preflight_check.size(second['predicted'])} at its peak ("
    )
    assert "a rank may take 10.2 MiB by hardware.memory_gib." in second["reason"]
    assert f"max_length=4096 is skipped: {second['reason']}" in answer.stderr
    assert not (tmp_path / "sw" / "1").exists()
    # The report has what was predicted beside what was measured.
    runs = json.loads((tmp_path / "sw" / "summary.json").read_text(encoding="utf-8"))["runs"]
    kept = preflight_check.read(tmp_path / "sw" / "0")
    assert kept is not None
    assert [run["predicted_bytes"] for run in runs] == [kept.peak, second["predicted"]]
    assert runs[0]["peak_bytes"] > 0
    assert re.search(r"predicted +peak", answer.stdout)
    assert f"{second['predicted'] / 1e9:.3g} GB" in answer.stdout


def test_a_job_that_is_handed_on_takes_its_decision_along(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(tmp_path, "sw")
    planned = Planned(sweep.add(0, "0", []), [], None, decision=Decision("a", fits=True))  # type: ignore[arg-type]
    handed(sweep, planned)
    assert preflight_check.read(tmp_path / "0", "a") == planned.decision
    assert preflight_check.read(tmp_path / "0", "b") is None


def test_a_job_that_was_refused_on_its_own_node_was_skipped(tmp_path: Path) -> None:
    """Where the launcher cannot tell the GPUs, the job predicts itself, and leaves its decision."""
    sweep = Sweep(tmp_path, "sw")
    job = sweep.add(0, "0", [])
    (tmp_path / "0").mkdir()
    reason = "rank 0 failed: the run does not fit: it needs 91.0 GiB\n\npeak memory of rank 0"
    (tmp_path / "0" / "run.json").write_text(json.dumps({"status": "failed", "reason": reason}), encoding="utf-8")
    preflight_check.keep(tmp_path / "0", Decision("a", fits=False, peak=91 << 30))
    launcher = SlurmLauncher.__new__(SlurmLauncher)
    assert not read_verdict(tmp_path / "0", None)
    launcher._record_end(sweep, Planned(job, [], None), None)  # type: ignore[arg-type]
    assert (job.status, job.predicted) == ("skipped", 91 << 30)
    assert job.reason == "rank 0 failed: the run does not fit: it needs 91.0 GiB"


def test_a_refusal_for_memory_is_a_corner_of_the_grid() -> None:
    refused = refusal(DoesNotFitError("it needs more", Decision(fits=False, peak=5, table="a table")))
    assert refused is not None
    assert (refused.status, refused.reason, refused.predicted) == ("skipped", "it needs more", 5)


# ---- wrong input ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch.preflight=maybe",), "launch.preflight=maybe: must be one of auto, off. "),
        (("hardware=h900",), "hardware=h900: no such option. Did you mean h200? Options: "),
        (("parallel=ring8",), "parallel.ring_size=8: the world has 2 ranks"),
        (
            ("parallel=ring2", "hardware=h100", "hardware.memory_gib=2"),
            "hardware.memory_gib=2.0: hardware.reserve_gib=2.5 leaves nothing of it.",
        ),
        (
            ("parallel=ring4", "launch.ranks_per_gpu=2", "hardware=h100", "hardware.memory_gib=4"),
            "hardware.memory_gib=4.0: launch.ranks_per_gpu=2 gives each rank 2 GiB of it, and hardware.reserve_gib=2.5 "
            "leaves nothing of it. Give more memory, fewer ranks on a GPU",
        ),
    ],
)
def test_wrong_input_is_one_message(rlexp: Shell, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    told = rlexp("launch.device=cuda", "logger=none", *words, PATH=gpus(tmp_path))
    assert told.returncode == 1
    assert told.stdout == ""
    assert told.stderr.startswith(f"rlexp: {said}")
    assert told.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_config_that_is_none_is_one_message(rlexp: Shell, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"not": "a model"}', encoding="utf-8")
    told = rlexp("launch.device=cuda", "logger=none", "parallel=ring2", "model=hf", "model.path=model",
                 PATH=gpus(tmp_path))  # fmt: skip
    assert told.returncode == 1
    assert told.stderr.startswith("rlexp: model.path=model: no causal model can be loaded")
    assert told.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
