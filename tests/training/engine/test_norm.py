"""The norm of the gradient reads it where it lies, a part at a time."""

from __future__ import annotations

import pytest
import torch

from rlexp.config.schema import Config
from rlexp.preflight.predict import Prediction
from rlexp.preflight.rehearsal.log import passes
from rlexp.preflight.rehearsal.rehearse import rehearse
from rlexp.training.engine import base
from rlexp.training.engine.base import sum_of_squares
from tests.helpers.ranks import seeded
from tests.helpers.rehearsals import alone, elsewhere, plan

WIDE = ("model.hidden_size=1024", "model.intermediate_size=4096", "train.batch_size=2")


def peaks_of(cfg: Config) -> dict[str, int]:
    found = Prediction(passes(rehearse(plan(cfg, 0, gpu=True))), 0, 1)
    return {phase: peak.bytes for phase, peak in found.peaks.items()}


def test_zero3_leaves_an_offloaded_gradient_on_the_host() -> None:
    """Its step needs no byte of the GPU beyond what is there before the first pass; a large piece has 8 MiB."""
    words = ("launch.nproc=2", "parallel=ring2", "engine=zero3", "engine.offload=optimizer")
    peaks = alone(peaks_of, elsewhere(*WIDE, *words))
    assert peaks["optimizer"] < peaks["data"] + (64 << 10)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_squares_of_parts_add_up_to_those_of_the_whole(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, of float32 and of an empty piece, whose layout is its own."""
    monkeypatch.setitem(base.AT_ONCE, "cpu", at_once)
    pieces = [seeded(5, 20, seed=1).float(), seeded(30, seed=2).float()[:0], seeded(6, 4, seed=3).float().T]
    exact = sum(float(piece.double().square().sum()) for piece in pieces)
    found = sum_of_squares(pieces, "cpu")
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(exact, rel=1e-14)
    assert float(sum_of_squares([], "cpu")) == 0.0
