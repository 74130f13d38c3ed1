"""A part of the run is wrong by itself if it says what the run said, whatever that is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlexp.verify.apart import Differing, Scene
from rlexp.verify.records import TensorFiles

WANTED = [-1.0, -2.0, -3.0]
KEY = (0, "answer")


def shares(said: float, part: float, tmp_path: Path) -> tuple[float, float]:
    """How far a part is from what it should say, and how far the run is, which said something else of one token."""
    task: Any = SimpleNamespace(wanted=SimpleNamespace(scores=False))
    pack: Any = SimpleNamespace(sequence_N=torch.tensor([0, 0, 0]))
    differing = Differing({KEY: np.array([WANTED[0], said, WANTED[2]])}, {KEY: np.array(WANTED)})
    scene = Scene(task, [(pack, [KEY])], 1, 1, TensorFiles(tmp_path), differing)

    def says(_pack: Any, _keys: Any) -> Tensor:
        return torch.tensor([WANTED[0], part, WANTED[2]], dtype=torch.float64)

    ours, run = scene.apart(says).tolist()
    return ours, run


@pytest.mark.parametrize("said", [-7.0, -1e160, float("nan"), float("-inf")])
def test_a_part_that_says_what_the_run_said_is_as_far_off(said: float, tmp_path: Path) -> None:
    ours, run = shares(said, said, tmp_path)
    assert 0 < ours == run < float("inf")
    ours, run = shares(said, WANTED[1], tmp_path)
    assert ours == 0 < run < float("inf")
