"""`verify` compares starting weights with the bits that a run holds of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlexp.config.load import compose_config
from rlexp.verify.report import failure_in_words
from rlexp.verify.verification import verify
from tests.helpers.adapters import adapter_of
from tests.helpers.models import untied

SMALL = ("launch.device=cpu", "logger=none", "data.size=16", "data.eval_size=0", "parallel=ring2", "train.batch_size=4",
         "train.precision=bf16")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["adapter=lora", "model.freeze=[*layers.0.*]"])
@pytest.mark.parametrize("engine", ["torch", "zero1"])
def test_frozen_weights_have_no_more_bits_than_bf16(frozen: str, engine: str) -> None:
    """Nothing trains them, so no engine has masters of them; those of the tiny model are float32."""
    passes(*SMALL, frozen, f"engine={engine}")


@pytest.mark.slow
@pytest.mark.parametrize("also", [["lm_head"], None], ids=["with a head", "alone"])
@pytest.mark.parametrize("how", [["train.precision=fp64", "engine=fsdp2"], ["engine=torch"], ["engine=zero3"]],
                         ids=["fsdp2 in float64", "torch", "zero3"])  # fmt: skip
def test_an_adapter_is_trained_beside_a_copy_of_itself(tmp_path: Path, also: list[str] | None, how: list[str]) -> None:
    passes(*SMALL, *begun(tmp_path, also), *how)


def passes(*words: str) -> None:
    verdict = verify(compose_config(words), 1, lambda _line: None)
    assert verdict.passed, failure_in_words(verdict.failure) if verdict.failure else verdict.sharding


def begun(folder: Path, also: list[str] | None) -> list[str]:
    """An adapter that was trained, and the reference is what it was."""
    model = folder / "model"
    untied(model)
    adapter = adapter_of(model, folder / "adapter", modules_to_save=also)
    return ["model=hf", f"model.path={model}", "adapter=lora", f"adapter.path={adapter}", "reference=adapter"]
