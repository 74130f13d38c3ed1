"""When a run saves, and which checkpoints it keeps; the disk is a stub here."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlexp.config.schema import CheckpointConfig
from rlexp.launch import stops
from rlexp.run_files.checkpoint_folder import folder_of
from rlexp.training.checkpoint.keeper import Keeper
from rlexp.training.world.groups import ALONE, World


@pytest.fixture(autouse=True)
def _nobody_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "asked", lambda: None)


class FullDisk:
    """A saver that fails as soon as it is waited for."""

    writing = False

    def __init__(self) -> None:
        self.pending = False
        self.prepared = 0
        self.begun: list[int] = []

    def prepare(self) -> None:
        self.prepared += 1

    def begin(self, step: int, _describe: Any) -> None:
        self.pending = True
        self.begun.append(step)

    def settle(self) -> str:
        self.pending = False
        return "no space"


def keeper_of(run_dir: Path, disk: Any, **keys: Any) -> Keeper:
    return Keeper(
        CheckpointConfig(**keys), disk, World(0, 1, ALONE), torch.device("cpu"), run_dir,
        describe=lambda *_: lambda _: {}, say=lambda _: None, saved=lambda *_: None, steps_per_epoch=1,
        saved_step=0, within=lambda _: contextlib.nullcontext(),
    )  # fmt: skip


def test_the_last_save_is_tried_twice(tmp_path: Path) -> None:
    disk = FullDisk()
    keeper_of(tmp_path, disk).close({"step": 5})
    assert disk.begun == [5, 5]


def test_memory_for_saving_is_taken_once(tmp_path: Path) -> None:
    disk = FullDisk()
    keeper = keeper_of(tmp_path, disk)
    for step in (1, 2):
        keeper.after_step({"step": step})
    assert disk.prepared == 1


def test_a_run_that_goes_on_saves_what_is_better_than_the_best_of_before(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.4)):
        folder_of(tmp_path, step).mkdir(parents=True)
        (folder_of(tmp_path, step) / "position.json").write_text(json.dumps({"score": {"eval/loss": loss}}))
    for loss, saved in ((0.41, []), (0.39, [4])):
        disk = FullDisk()
        keeper_of(tmp_path, disk, keep_best=2).after_step({"step": 4, "eval/loss": loss})
        assert disk.begun == saved
