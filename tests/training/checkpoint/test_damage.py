"""Checkpoints that were cut short, have a flipped bit, or did not fit on the disk."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlexp.base.errors import CheckpointError
from rlexp.config.load import compose_config
from rlexp.export.checkpoint import _newest_whole
from rlexp.run_files import checkpoint_folder as folder
from rlexp.training.checkpoint.restore import _set_aside
from rlexp.training.train.resume import check_space
from tests.helpers import warm

QUICK = ("launch.device=cpu", "logger=none", "engine=torch", "train.precision=fp32", "parallel=ring2", "launch.nproc=2",
         "model.layers=1", "data.size=40", "checkpoint.save_every=2", "checkpoint.keep_last=3",
         "checkpoint.export=false", "train.batch_size=2", "data.eval_size=2")  # fmt: skip
STEPS, LONGER = 6, 8
PLACES = 50


def train(run_dir: Path, steps: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*QUICK, f"hydra.run.dir={run_dir}", f"train.max_steps={steps}", *args]
    return warm.run("rlexp", command, run_dir.parent)


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with its three checkpoints. Do not change it: `run` is a copy."""
    run_dir = tmp_path_factory.mktemp("damage") / "run"
    answer = train(run_dir, STEPS)
    assert answer.returncode == 0, answer.stderr
    assert [folder.step_of(path) for path in folder.latest_first(run_dir)] == [6, 4, 2]
    return run_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return folder.latest_first(run)[0]


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def check(checkpoint: Path) -> None:
    manifest = folder.check_sizes(checkpoint)
    folder.check_contents(checkpoint, manifest["files"], manifest)


def turn(path: Path, bit: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[bit // 8] ^= 1 << bit % 8
    path.write_bytes(contents)


def shorten(path: Path, size: int) -> None:
    os.truncate(path, size)


def refused(checkpoint: Path, file: Path, how: str) -> None:
    """Assert that an error names the checkpoint and the file, or fail with the damage that was not seen."""
    said = ""
    try:
        check(checkpoint)
    except CheckpointError as error:
        said = str(error)
    assert said, f"{file.name}, {how}: was taken for whole"
    assert str(checkpoint) in said
    assert file.name in said


def test_the_manifest_names_every_file(checkpoint: Path) -> None:
    check(checkpoint)
    there = {str(path.relative_to(checkpoint)) for path in files_of(checkpoint)}
    assert there == {folder.MANIFEST, *folder.read_manifest(checkpoint)["files"]}
    assert sum(name.startswith("state-") for name in there) == 2


def test_a_file_cut_short_anywhere_is_refused(checkpoint: Path) -> None:
    """Every file is cut at least once, also the manifest."""
    draw, files = random.Random(0), files_of(checkpoint)
    for number in range(PLACES):
        file = files[number % len(files)]
        whole = file.read_bytes()
        size = draw.randrange(len(whole))
        shorten(file, size)
        refused(checkpoint, file, f"cut from {len(whole)} bytes to {size}")
        file.write_bytes(whole)
    check(checkpoint)


def test_a_single_bit_turned_anywhere_is_refused(checkpoint: Path) -> None:
    draw, files = random.Random(1), files_of(checkpoint)
    for number in range(PLACES):
        file = files[number % len(files)]
        bit = draw.randrange(file.stat().st_size * 8)
        turn(file, bit)
        refused(checkpoint, file, f"bit {bit} turned")
        turn(file, bit)
    check(checkpoint)


def test_a_file_that_is_gone_is_refused(checkpoint: Path) -> None:
    for file in files_of(checkpoint):
        file.rename(file.with_suffix(".away"))
        refused(checkpoint, file, "gone")
        file.with_suffix(".away").rename(file)
    check(checkpoint)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run: Path, checkpoint: Path) -> None:
    """Its step is saved again under the same name."""
    state = next(checkpoint.glob("state-00001-*"))
    turn(state, state.stat().st_size * 4)
    assert folder.step_of(_newest_whole(run)) == 4
    answer = train(run, LONGER)
    assert answer.returncode == 0, answer.stderr
    said = f"rlexp: skipped a checkpoint: {checkpoint}: {state.name} is not what was written (its SHA-256 differs).\n"
    assert said in answer.stderr
    assert f"continues from {folder.folder_of(run, 4)}, after step 4" in answer.stderr
    assert answer.stderr.count("skipped a checkpoint") == 1
    assert steps_of(run) == list(range(1, LONGER + 1))
    there = folder.latest_first(run)
    assert [folder.step_of(path) for path in there] == [8, 6, 4]
    for path in there:
        check(path)


def test_damaged_checkpoints_of_another_run_stay_where_they_are(tmp_path: Path) -> None:
    own, other = (folder.folder_of(tmp_path / run, 1) for run in ("own", "other"))
    for each in (own, other):
        each.mkdir(parents=True)
    _set_aside([own, other], tmp_path / "own")
    assert [each.exists() for each in (own, other)] == [False, True]


def test_where_all_are_damaged_it_says_so_and_trains_nothing(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    latest, middle, first = folder.latest_first(run)
    shorten(next(latest.glob("state-00000-*")), 100)
    turn(middle / folder.POSITION, 80)
    (first / folder.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"there is no whole checkpoint\. {latest}: .* {first}: "):
        _newest_whole(run)
    answer = train(run, LONGER)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    *skipped, error = answer.stderr.splitlines()
    assert [line.startswith(f"rlexp: skipped a checkpoint: {path}: ") for line, path in
            zip(skipped, (latest, middle, first), strict=True)] == [True] * 3  # fmt: skip
    assert error.startswith(f"rlexp: {run / 'checkpoints'}: has no whole checkpoint")
    assert "hydra.run.dir" in error
    assert (run / "metrics.jsonl").read_bytes() == before


# ---- a disk that fills up ----


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    """Mount a file system of `size` bytes, or skip the test where that is not allowed."""
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("a full disk needs root, to mount a small one")
    mounted = mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    if mounted.returncode != 0:
        pytest.skip(f"a full disk needs a mount, and that is refused: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=240)


def mount(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *args], capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("words", "saved", "bytes_each", "said"),
    [
        (["train.precision=bf16", "checkpoint.save_every=null"], 0, 12, "a checkpoint of this run takes"),
        (["train.precision=fp64", "checkpoint.save_every=null"], 0, 24, "a checkpoint of this run takes"),
        (["checkpoint.save_every=1"], 0, 3 * 12, "3 checkpoints of this run take"),  # a third is there before one goes
        (["checkpoint.save_every=1"], 1, 2 * 12, "2 checkpoints of this run take"),
        (["checkpoint.save_every=10", "checkpoint.keep_last=9999"], 2, 4 * 12, "4 checkpoints of this run take"),
    ],
)
def test_there_must_be_room_for_weights_and_two_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], saved: int, bytes_each: int, said: str
) -> None:
    cfg = compose_config(["launch.device=cpu", *words])
    for step in range(saved):
        folder.folder_of(tmp_path, step + 1).mkdir(parents=True)
    engine = SimpleNamespace(shapes=lambda: {"a": torch.Size([3, 5])})
    run: Any = SimpleNamespace(cfg=cfg, engine=engine, total_steps=30)
    needed = 15 * bytes_each
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=needed))
    check_space(run, tmp_path, 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=needed - 1))
    with pytest.raises(CheckpointError, match=f"GB free, and {said}"):
        check_space(run, tmp_path, 30)


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_a_checkpoint_and_no_step(finished: Path, tmp_path: Path) -> None:
    """The disk has room for one checkpoint and half of the next."""
    size = sum(path.stat().st_size for path in files_of(folder.folder_of(finished, 2)))
    disk = tmp_path / "disk"
    run = disk / "run"
    with small_disk(disk, size * 8 // 5):
        full = train(run, STEPS)
        assert "Traceback" not in full.stderr
        assert full.returncode == 1, full.stderr
        for step in (4, 6):
            assert f"rlexp: the checkpoint of step {step} could not be saved (" in full.stderr
        assert "Training continues, and saves again when the next save is due." in full.stderr
        assert "The run can resume from step-00000002." in full.stderr
        assert "No space left on device" in full.stderr
        assert steps_of(run) == list(range(1, STEPS + 1))
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
        check(folder.folder_of(run, 2))
        assert json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] == "failed"

        still_full = train(run, STEPS)
        assert still_full.returncode == 1
        assert "GB free, and a checkpoint of this run takes" in still_full.stderr
        assert "Traceback" not in still_full.stderr

        assert mount("-o", f"remount,size={size * 8}", str(disk)).returncode == 0
        again = train(run, STEPS)
        assert again.returncode == 0, again.stderr
        assert f"continues from {folder.folder_of(run, 2)}, after step 2" in again.stderr
        assert steps_of(run) == list(range(1, STEPS + 1))
        assert [folder.step_of(path) for path in folder.latest_first(run)] == [6, 4, 2]
        for path in folder.latest_first(run):
            check(path)


ODD: tuple[dict[str, Any], ...] = (
    {"files": []}, {"files": {"a": {}}}, {"files": {"a": 3}}, {"parameters": 3}, {"format": 7},
)  # fmt: skip


@pytest.mark.parametrize("wrong", ODD)
def test_a_manifest_of_other_kinds_is_one_message(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Its own SHA-256 is made by whoever makes the folder."""
    manifest = {"format": folder.FORMAT, "files": {}, "parameters": {}, **wrong}
    text = json.dumps(manifest | {"sha256": folder._digest(manifest)})
    (tmp_path / folder.MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"its manifest\.json is none that rlexp has written|is of format 7"):
        folder.check_sizes(tmp_path)


@pytest.mark.parametrize("wrong", [[], {"config": []}, {"identity": 3}, {"step": "x"}, {"layout": [1]}])
def test_a_position_of_other_kinds_is_one_message(wrong: Any, tmp_path: Path) -> None:
    (tmp_path / folder.POSITION).write_text(json.dumps(wrong), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"its position\.json is none that rlexp has written"):
        folder.read_position(tmp_path)
