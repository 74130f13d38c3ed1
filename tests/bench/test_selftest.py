"""`make selftest`: without a GPU it says so, its cases are those that matter, and its last line says what they mean."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_here, gpu_world, selftest, selftest_cases
from bench.gpu import NO_GPU
from bench.gpu_commands import Failed, Shell
from bench.gpu_here import GIB, Machine, stand_in
from bench.gpu_training import Started, in_turn
from bench.selftest_cases import Finding
from rlexp.base.engine_facts import ENGINES
from rlexp.config.hardware import assumed_gpus
from rlexp.launch import local
from rlexp.launch.local import Interrupted
from tests.helpers.paths import ROOT
from tests.helpers.programs import bench

ONE = Finding(
    "engines", "zero1, ring 4 × 1, bf16", {"loss": 1e-3, "gradient": 5e-3}, {"loss": 1e-2, "gradient": 3e-2}, 4.0
)


# ---- without a GPU ----


@pytest.mark.parametrize("words", [(), ("--here",)], ids=["all", "here"])
def test_without_a_gpu_it_says_so_and_writes_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    told = bench("selftest", *words, "--out", str(tmp_path / "file.json"))
    assert (told.returncode, told.stdout) == (NO_GPU, "")
    assert told.stderr.startswith("make selftest: no GPU is visible on this machine")
    assert told.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- its cases ----


def with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> Machine:
    for module in (gpu_world, selftest_cases):
        monkeypatch.setattr(module, "gpu_generations", lambda: {9})
    return Machine("cuda", "NVIDIA H100, sm_90", gpus, 79 * GIB, "2.13", "580", "h100", known=True)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 4), (2, 2), (3, 2), (8, 8), (16, 8)])
def test_every_engine_and_layout_is_tried_on_all_ranks(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int) -> None:
    """Over NCCL where there are several GPUs. Each case composes."""
    on = with_gpus(monkeypatch, gpus)
    cases = {name: selftest_cases.chosen(name, on) for name in ("engines", "rings", "options")}
    assert {f"`{engine}`" for engine in ENGINES} == {case.name for case in cases["engines"]}
    assert {case.ring for case in cases["engines"]} == {ranks // 2, ranks}
    assert {"zigzag, direct", "allgather", "ulysses", "kernel torch_flash"} <= {case.name for case in cases["rings"]}
    assert {case.name for case in cases["options"]} == set(selftest_cases.OPTIONS)
    with assumed_gpus(gpus):
        for case in (case for each in cases.values() for case in each):
            cfg = case.config(on)
            assert cfg.parallel.world_size == ranks, case
            assert cfg.launch.ranks_per_gpu == (4 if gpus == 1 else 1), case
    assert f"{ranks} ranks" in selftest.placed(on)
    assert ("over NCCL" in selftest.placed(on)) == (gpus > 1)


def test_what_is_not_installed_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    on = with_gpus(monkeypatch, 1)
    monkeypatch.setattr(selftest_cases, "has_deepspeed", lambda: False)
    monkeypatch.setattr(gpu_world, "has_deepspeed", lambda: False)
    monkeypatch.setattr(selftest_cases, "has_peft", lambda: False)
    monkeypatch.setattr(selftest_cases, "installed", lambda name: name == "torch_flash")
    said = "\n".join(selftest_cases.left_out(on))
    assert "zero0 to zero3: DeepSpeed is not installed" in said
    assert "LoRA: peft is not installed" in said
    assert "kernel flash_attn_4: not installed" in said
    assert "torch_flash" not in said
    assert {case.name for case in selftest_cases.chosen("engines", on)} == {"`torch`", "`fsdp2`"}
    assert "LoRA" not in {case.name for case in selftest_cases.chosen("options", on)}


def test_a_machine_on_which_nothing_runs_is_not_tried_for_an_hour() -> None:
    """After three failures one after the other; a case that ends well between them begins the count again."""
    outcomes = iter([Started([{"loss": 0.0}], "one"), Started([], "two"), Started([], "three"), Started([], "four")])
    found = in_turn("abcdefg", lambda _: next(outcomes), str, patience=3)
    assert found["a"] == {"loss": 0.0}
    assert [found[each]["failed"] for each in "bcd"] == ["one", "two", "three"]
    assert {found[each]["failed"] for each in "efg"} == {"not tried, since 3 cases before it failed"}


def test_a_kernel_that_is_wrong_is_named() -> None:
    case = selftest_cases.KernelCase("flash_attn_4", 128)
    good = dict.fromkeys(selftest_cases.PARTS, 2e-3)
    assert selftest_cases._of_kernel(case, good | {"seconds": 1.0}).why is None
    for bad in (0.2, float("nan")):
        assert str(selftest_cases._of_kernel(case, good | {"dk": bad}).why).startswith("dk is ")
    assert selftest_cases._of_kernel(case, {"failed": "no kernel"}).why == "failed: no kernel"


def test_a_verification_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failure = {"quantity": "gradient, whole", "step": 1, "precision": "float64"}
    asked: list[str] = []

    def command(shell: Shell, _module: str, *words: str) -> str:
        asked.extend(words)
        said = {"failure": failure, "float64": {"largest": {"loss": 1e-15, "gradient, whole": 0.5}}}
        (shell.folder / words[1]).write_text(json.dumps(said), encoding="utf-8")
        raise Failed("exit status 1")

    monkeypatch.setattr(Shell, "command", command)
    (found,) = selftest_cases.verified(stand_in(), tmp_path)
    assert "parallel.ring_size=4" in asked
    assert found.why == "gradient, whole, at step 1 in float64"
    assert found.errors == {"loss": 1e-15, "gradient": 0.5}
    monkeypatch.setattr(selftest_cases, "OF_VERIFY", {})
    (tmp_path / "verify.json").unlink()
    monkeypatch.setattr(Shell, "command", lambda *_: (_ for _ in ()).throw(Failed("it said nothing")))
    assert selftest_cases.verified(stand_in(), tmp_path)[0].why == "failed: it said nothing"


# ---- what it says ----


def test_the_last_line_says_what_the_result_means() -> None:
    wrong = [Finding("rings", f"case {number}", why="off") for number in range(5)]
    place, file = "1 × NVIDIA H100 (4 ranks that share it)", Path("selftest.json")
    assert selftest.judged([ONE, ONE], place, file) == (
        "all 2 cases agree with float64 on 1 × NVIDIA H100 (4 ranks that share it): rlexp computes here what it "
        "computes in one process. The results are in selftest.json."
    )
    assert selftest.judged([ONE, *wrong[:1]], place, file) == (
        "1 of 2 cases do not agree with float64 on 1 × NVIDIA H100 (4 ranks that share it): case 0. Send selftest.json "
        "to the maintainers of rlexp: read it first, as a log may name folders."
    )
    assert "5 of 6 cases do not agree" in selftest.judged([ONE, *wrong], place, file)
    assert "case 0; case 1; case 2; and 2 more. Send" in selftest.judged([ONE, *wrong], place, file)
    assert selftest.judged([ONE], place, file, rehearsed=True).startswith("rehearsed, which shows nothing of a GPU: ")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, **sections: Any) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(selftest_cases, "SECTIONS", sections)
    options = argparse.Namespace(rehearse=True, only=list(sections), out=out, commit="0123456789abcdef")
    return selftest.run(options), json.loads(out.read_text(encoding="utf-8"))


def test_the_file_has_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def good(_on: Machine, _folder: Path) -> list[Finding]:
        return [ONE]

    code, said = run(monkeypatch, tmp_path / "file.json", engines=good)
    assert code == 0
    assert said["cases"] == [{"section": "engines", "case": ONE.case, "errors": ONE.errors, "allowed": ONE.allowed,
                              "seconds": 4.0, "why": None, "agrees": True}]  # fmt: skip
    assert said["versions"]["torch"]
    assert said["commit"] == "commit 0123456789ab"
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before.startswith("engines: 1 of 1 cases agree (")
    assert last.startswith("rehearsed, which shows nothing of a GPU: all 1 cases agree with float64 on 4 CPU ranks")


def test_a_failure_is_in_the_file_without_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A section that raises fails alone. Of paths the last part is left, and of rlexp's own those below it."""
    monkeypatch.setattr(selftest.platform, "node", lambda: "node17.uni.example")
    monkeypatch.setattr(selftest.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(selftest.Path, "home", lambda: Path("/home/ada"))
    secrets = ("node17", "ada", "/home", "/data/groups/ml", "our-secret", "plans", "10.1.2.3", str(ROOT), str(tmp_path))

    def bad(_on: Machine, folder: Path) -> list[Finding]:
        print(f'  File "{ROOT}/rlexp/training/engine/zero.py", line 3, in step', file=sys.stderr)
        raise RuntimeError(
            f"NCCL on node17 (10.1.2.3:29500) of ada: /home/ada/x.so, "
            f"/home/ada/our-secret/plans/w.py, /data/groups/ml/y.so, {folder}/z"
        )

    def odd(_on: Machine, _folder: Path) -> list[Finding]:
        return [ONE, Finding("rings", "zigzag", {"loss": float("nan")}, why="the loss is nan off")]

    code, said = run(monkeypatch, tmp_path / "file.json", engines=bad, rings=odd)
    assert code == 1
    text = (tmp_path / "file.json").read_text(encoding="utf-8")
    assert [each for each in secrets if each in text] == []
    assert [each["agrees"] for each in said["cases"]] == [False, True, False]
    assert said["cases"][0]["why"].startswith("RuntimeError: NCCL on NAME")
    assert "…/rlexp/training/engine/zero.py" in said["log"]
    assert said["cases"][2]["errors"] == {"loss": "nan"}
    assert "2 of 3 cases do not agree" in said["verdict"]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGTERM), 143)], ids=str)
def test_stopped_it_keeps_what_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def stops(_on: Machine, _folder: Path) -> list[Finding]:
        raise error

    ended, said = run(monkeypatch, tmp_path / "file.json", engines=lambda *_: [ONE], rings=stops, kernels=stops)
    assert ended == code
    assert [each["case"] for each in said["cases"]] == [ONE.case]
    last = capsys.readouterr().out.splitlines()[-1]
    assert "stopped in section rings, of what was tried until then: all 1 cases agree" in last
    assert selftest.MADE not in last
    assert "nothing has ended" in selftest.judged([], "a GPU", Path("file.json"), stopped_in="engines")


def test_stopped_before_the_first_section_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["selftest", "--rehearse"])
    monkeypatch.setattr(selftest, "stand_in", lambda: (_ for _ in ()).throw(Interrupted(signal.SIGINT)))
    assert selftest.main() == 130


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("in ROOT/rlexp/training/a.py, line 3", "in …/rlexp/training/a.py, line 3"),
        ("ROOT-private/plans/x.py", "…/x.py"),
        ("ROOT/runs/our-secret/x.py", "…/x.py"),
        ("/home/adam/secret/w.py", "…/w.py"),
        ("/home/ada", "~"),
        ("~/plans/secret/w.py", "…/w.py"),
        ("'/scratch/job=12/secret/w.py'", "'…/w.py'"),
        ("/usr/lib/python3/site-packages/torch/nn.py", "…/site-packages/torch/nn.py"),
        ("/usr/share/secret/x: no such file", "…/x: no such file"),
        ("3 GiB/s and/or /dev", "3 GiB/s and/or /dev"),
    ],
)
def test_folders_are_left_out(monkeypatch: pytest.MonkeyPatch, text: str, left: str) -> None:
    monkeypatch.setattr(selftest.Path, "home", lambda: Path("/home/ada"))
    assert selftest.nameless(text.replace("ROOT", str(ROOT))) == left


def driver_too_old(_place: Any) -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040)\nCompile with `DSA`.")


def test_a_gpu_that_torch_cannot_use_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    start = local.run_ranks
    monkeypatch.setattr(local, "run_ranks", lambda _facts, ranks, **_: start(driver_too_old, ranks, device="cpu"))
    with pytest.raises(SystemExit, match=r"^torch cannot use the GPU .* is too old .*12040.*\. Driver: ") as found:
        gpu_here.machine()
    assert "\n" not in str(found.value)


# ---- a rehearsal ----


def test_the_kernels_are_rehearsed(tmp_path: Path) -> None:
    told = bench("selftest", "--rehearse", "--only", "kernels", "--out", str(tmp_path / "file.json"))
    assert told.returncode == 0, told.stdout + told.stderr
    said = json.loads((tmp_path / "file.json").read_text(encoding="utf-8"))
    assert {each["case"] for each in said["cases"]} == {
        f"{kernel}, heads of {size}, bf16" for kernel in ("cpu_flash", "plain") for size in (64, 128)
    }
    assert said["log"] == ""
    assert "all 4 cases agree with float64" in told.stdout.splitlines()[-1]


@pytest.mark.slow
def test_all_of_it_is_rehearsed(tmp_path: Path) -> None:
    told = bench("selftest", "--rehearse", "--out", str(tmp_path / "file.json"), timeout=1800)
    assert told.returncode == 0, told.stdout + told.stderr
    said = json.loads((tmp_path / "file.json").read_text(encoding="utf-8"))
    assert {each["section"] for each in said["cases"]} == set(selftest.SECTIONS)
    assert all(each["errors"] and each["seconds"] is not None for each in said["cases"])
    assert selftest.MADE in told.stdout.splitlines()[-1]


def test_the_sections_are_those_that_can_be_asked_for() -> None:
    assert tuple(selftest_cases.SECTIONS) == selftest.SECTIONS
