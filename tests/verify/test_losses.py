"""`verify` passes for every loss on answers that the rows give. What it finds around each is in
tests/helpers/faults/losses.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlexp.config.load import compose_config
from rlexp.config.schema import KINDS
from rlexp.verify.checks import FLOAT64
from rlexp.verify.compare import TwoRuns
from rlexp.verify.recording import Recording, Scene
from rlexp.verify.verification import verify
from tests.helpers.faults import ANY_ORDER
from tests.helpers.faults.base import FP64
from tests.helpers.faults.losses import LOSSES, of
from tests.helpers.faults.verified import verify_planted

HELD_OUT = ("data.eval_size=13", "train.eval_every=1")


def test_every_loss_on_answers_of_the_rows_is_verified() -> None:
    assert set(LOSSES) == {name for name, kind in KINDS["loss"].items() if not kind.draws}


@pytest.mark.parametrize(
    ("got", "wanted", "right"), [(1e-17, 0.0, True), (1e-10, 0.0, False), (1e3, 1e3 + 1e-5, False)]
)
def test_a_logged_value_that_is_only_rounding_is_right_and_looks_right(
    got: float, wanted: float, right: bool, tmp_path: Path
) -> None:
    """On a GPU, a margin of the first step is rounding where the reference has 0. The table shows what was judged."""
    ran, meant = (
        Recording(scenes=[Scene("rollout 1", 1, row={"train/margin": value})], folder=tmp_path)
        for value in (got, wanted)
    )
    pair = TwoRuns(compose_config([]), ran, meant)
    assert (not [*pair.differences()]) is right
    assert (pair.gauge.largest["train/margin"] <= FLOAT64.metric[0]) is right


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "kto")) for name in LOSSES])
def test_the_order_in_which_tokens_are_added_up_is_no_difference(name: str) -> None:
    """A GPU adds up in any order, so a difference of two sums that is 0 on a CPU is rounding there."""
    words = [*FP64, *HELD_OUT, *of(name)]
    result, reached = verify_planted(ANY_ORDER, overrides=words, steps=1 if name == "kto" else 3)
    assert result.passed, result.failure
    assert reached is (name != "reward"), "a score is read off one token"


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_verify_passes(name: str) -> None:
    """On two replicas of a ring of 2, with micro-batches, for three steps and the held-out pairs after each."""
    result = verify(compose_config([*FP64, *HELD_OUT, *of(name)]), 3, lambda _line: None)
    assert result.passed, result.failure
    assert not result.not_held
    assert result.largest["loss"] <= 1e-12


@pytest.mark.slow
def test_a_pass_without_gradient_under_zero3_passes() -> None:
    """ZeRO-3 gathers weights in each pass, in float32 at least; the last batch is short."""
    words = ("launch.device=cpu", "logger=none", "train.precision=fp32", "engine=zero3", "data.size=13",
             "data.drop_last=false", "train.batch_size=8", "train.micro_batch_size=1", "launch.nproc=4",
             "parallel=ring2", "loss=mpo")  # fmt: skip
    result = verify(compose_config(words), 2, lambda _line: None)
    assert result.passed, result.failure
