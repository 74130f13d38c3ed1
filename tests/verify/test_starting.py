"""`verify` compares starting weights with the bits that a run holds of them."""

from __future__ import annotations

import pytest

from rlexp.config.load import compose_config
from rlexp.verify.report import failure_in_words
from rlexp.verify.verification import verify

SMALL = ("launch.device=cpu", "logger=none", "data.size=16", "data.eval_size=0", "parallel=ring2", "train.batch_size=4",
         "train.precision=bf16")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["adapter=lora", "model.freeze=[*layers.0.*]"])
@pytest.mark.parametrize("engine", ["torch", "zero1"])
def test_frozen_weights_have_no_more_bits_than_bf16(frozen: str, engine: str) -> None:
    """Nothing trains them, so no engine has masters of them; those of the tiny model are float32."""
    verdict = verify(compose_config([*SMALL, frozen, f"engine={engine}"]), 1, lambda _line: None)
    assert verdict.passed, failure_in_words(verdict.failure) if verdict.failure else verdict.sharding
