"""The learning rate of every step of a converted file is that of the other trainer: of transformers' own scheduler."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import TrainingArguments, get_scheduler

from rlexp.convert.experiment import composed, overrides
from rlexp.training.train.build import build_schedule
from tests.convert.texts import AXOLOTL, FACTORY, OPENRLHF, SWIFT, TRL, conversion, written
from tests.helpers.schedules import rates_of

STEPS, LR = 40, 2e-5
KWARGS = {"cosine_with_min_lr": {"min_lr_rate": 0.1}}


def ceiled(share: float) -> int:
    """Return what transformers makes of a share."""
    arguments = TrainingArguments(output_dir="nowhere", warmup_steps=share, use_cpu=True)
    return arguments.get_warmup_steps(STEPS)


CASES: dict[str, tuple[str, str | None, str, int]] = {  # a file, its trainer, transformers' scheduler, its warm-up
    "TRL, a share": (TRL + f"learning_rate: {LR}\nwarmup_ratio: 0.07\nlr_scheduler_type: cosine\n", "dpo", "cosine",
                     ceiled(0.07)),
    "TRL, steps": (TRL + f"learning_rate: {LR}\nwarmup_steps: 5\n", "dpo", "linear", 5),
    "TRL, a share as steps": (TRL + f"learning_rate: {LR}\nwarmup_steps: 0.3\n", "dpo", "linear", ceiled(0.3)),
    "TRL, none": (TRL + f"learning_rate: {LR}\n", "dpo", "linear", 0),
    "TRL, constant": (TRL + f"learning_rate: {LR}\nwarmup_ratio: 0.1\nlr_scheduler_type: constant\n", "dpo",
                      "constant", 0),
    "TRL, a least rate": (TRL + f"learning_rate: {LR}\nwarmup_ratio: 0.1\nlr_scheduler_type: cosine_with_min_lr\n"
                          "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n", "dpo", "cosine_with_min_lr", ceiled(0.1)),
    "LLaMA-Factory": (FACTORY + f"learning_rate: {LR}\nlr_scheduler_type: inverse_sqrt\nwarmup_ratio: 0.1\n", None,
                      "inverse_sqrt", ceiled(0.1)),
    "ms-swift": (SWIFT + f"--learning_rate {LR} --warmup_ratio 0.05", None, "cosine", ceiled(0.05)),
    "OpenRLHF": (OPENRLHF + f"--learning_rate {LR}", None, "cosine_with_min_lr", math.ceil(STEPS * 0.03)),
    "axolotl": (AXOLOTL.replace("1e-5", str(LR)) + "warmup_steps: 3\nlr_scheduler: constant_with_warmup\n", None,
                "constant_with_warmup", 3),
}  # fmt: skip


def theirs(name: str, warm_up: int) -> list[float]:
    options = KWARGS.get(name)
    return rates_of(lambda it: get_scheduler(name, it, warm_up, STEPS, scheduler_specific_kwargs=options), LR, STEPS)


@pytest.mark.parametrize("case", CASES)
def test_every_step_of_a_converted_file_has_their_rate(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"d1": {"hf_hub_url": "org/d", "ranking": true}}')
    monkeypatch.chdir(tmp_path)
    text, trainer, scheduler, warm_up = CASES[case]
    conv = conversion(text, trainer, 8)
    cfg = composed(written(conv), "mine", [*overrides(conv), f"train.max_steps={STEPS}"])
    schedule = build_schedule(cfg, steps_per_epoch=STEPS)
    ours = [schedule.at(step) for step in range(1, STEPS + 1)]
    assert ours == pytest.approx(theirs(scheduler, warm_up), rel=1e-9, abs=1e-15)
