"""Waiting for what is no rank of the world counts as getting further: each such place says so."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlexp.config.schema import HFModelConfig
from rlexp.config.schema.rollouts import PythonRewardConfig
from rlexp.launch import watch
from rlexp.run_files import checkpoint_folder
from rlexp.training.checkpoint import keeper, restore, saver
from rlexp.training.checkpoint.host_copy import HostCopy, Laid
from rlexp.training.model import loading
from rlexp.training.rollout.rewards import weighted
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.world.groups import ALONE, World
from rlexp.training.world.objects import some_do

WORLD = World(0, 1, ALONE)


class Seen:
    """Stands in for what takes long, and notes whether the watch would wait for it."""

    def __init__(self) -> None:
        self.waited_for: list[bool] = []

    def __call__(self, *_: Any, **__: Any) -> None:
        self.waited_for.append(watch._progress.waits_elsewhere > 0)


@pytest.fixture
def seen() -> Any:
    seen = Seen()
    yield seen
    assert seen.waited_for
    assert all(seen.waited_for)
    assert watch._progress.waits_elsewhere == 0


def test_a_reward(seen: Seen) -> None:
    Rewards([SimpleNamespace(name="a", collect=seen)], [], {}).judged([], {})  # type: ignore[list-item]


def test_the_import_of_a_reward(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighted, "PythonReward", seen)
    weighted.build_reward(PythonRewardConfig(function="x:y"))


def test_a_model_of_the_hub_or_of_a_slow_disk(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "prepared", lambda cfg: seen() or cfg)
    loading._pretrained(SimpleNamespace(from_pretrained=seen), HFModelConfig(path="x"))
    assert len(seen.waited_for) == 2


def test_work_for_which_ranks_of_another_world_wait(seen: Seen) -> None:
    some_do(seen, 1, 1.0)


def test_the_check_of_a_checkpoint(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "check_sizes", lambda _path: {"files": {}})
    monkeypatch.setattr(checkpoint_folder, "check_contents", seen)
    assert restore._agreed_fault(Path("x"), WORLD) is None


def test_a_disk_that_takes_pieces_of_a_checkpoint_slowly() -> None:
    """Training goes on copying when a piece is written, and meanwhile it stands still."""
    laid = Laid.of({"weight/a": torch.arange(1 << 13, dtype=torch.float32)}, {"weight/a": 0})
    host, full = HostCopy(most=1 << 13), threading.Event()
    host.begin()
    copying = threading.Thread(target=host.copy, args=(laid,))
    copying.start()
    for _ in range(500):
        if watch._progress.waits_elsewhere:
            break
        full.wait(0.01)
    assert watch._progress.waits_elsewhere == 1
    host.drain(lambda _content: None)
    copying.join()
    assert watch._progress.waits_elsewhere == 0


def test_the_end_of_a_checkpoint(seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(saver.Saver, "_commit", seen)
    saving = saver.Saver(SimpleNamespace(), WORLD, tmp_path, {})  # type: ignore[arg-type]
    saving._thread = threading.Thread(target=lambda: None)
    saving._thread.start()
    saving.settle()


def test_old_checkpoints_that_are_removed(seen: Seen) -> None:
    keeper.Keeper._pruned(SimpleNamespace(_pruning=SimpleNamespace(join=seen)))  # type: ignore[arg-type]
