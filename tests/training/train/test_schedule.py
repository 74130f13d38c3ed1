"""The learning rate of each step is that of transformers' own schedulers, and its default that of the loss."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainingArguments, optimization

from rlexp.config.load import compose_config
from rlexp.config.rates import ALL_WEIGHTS, LIKE_DPO, default_rate, rates_in_words
from rlexp.config.schema import KINDS, Config, Decay
from rlexp.training.train.build import build_schedule
from rlexp.training.train.schedule import Schedule
from tests.conftest import ROOT
from tests.helpers.schedules import rates_of

STEPS, LR = 23, 3e-4
FROM_ZERO = ("optim.warmup_start=0", f"optim.lr={LR}", f"train.max_steps={STEPS}")
Scheduler = Callable[[torch.optim.Optimizer, int], Any]


def ours(cfg: Config) -> list[float]:
    schedule = build_schedule(cfg, steps_per_epoch=7)
    return [schedule.at(step) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(("words", "scheduler"), [
    (("optim.decay=linear",), lambda it, warm: optimization.get_linear_schedule_with_warmup(it, warm, STEPS)),
    (("optim.decay=cosine",), lambda it, warm: optimization.get_cosine_schedule_with_warmup(it, warm, STEPS)),
    (("optim.decay=constant",), optimization.get_constant_schedule_with_warmup),
    (("optim.decay=inverse_sqrt",), optimization.get_inverse_sqrt_schedule),
    (("optim.decay=cosine", "optim.min_lr_ratio=0.1"), lambda it, warm:
     optimization.get_cosine_with_min_lr_schedule_with_warmup(it, warm, STEPS, min_lr_rate=0.1)),
    (("optim.decay=linear", "optim.min_lr_ratio=0.2"), lambda it, warm:
     optimization.get_polynomial_decay_schedule_with_warmup(it, warm, STEPS, lr_end=0.2 * LR, power=1.0)),
], ids=["linear", "cosine", "constant", "inverse_sqrt", "cosine to a tenth", "linear to a fifth"])  # fmt: skip
@pytest.mark.parametrize("ratio", [0.0, 0.07, 0.1, 0.5])
def test_every_step_has_the_rate_of_transformers(words: tuple[str, ...], scheduler: Scheduler, ratio: float) -> None:
    asked = [*FROM_ZERO, *words, f"optim.warmup_ratio={ratio}"]
    if not ratio:
        asked.remove("optim.warmup_start=0")
    cfg = compose_config(asked)
    warm_up = TrainingArguments(output_dir="nowhere", warmup_steps=ratio, use_cpu=True).get_warmup_steps(STEPS)
    assert ours(cfg) == pytest.approx(rates_of(lambda it: scheduler(it, warm_up), LR, STEPS), rel=1e-12, abs=1e-18)


def test_a_warm_up_without_a_start_trains_in_its_first_step() -> None:
    cfg = compose_config([f"optim.lr={LR}", f"train.max_steps={STEPS}", "optim.warmup_ratio=0.15"])
    assert ours(cfg)[:5] == pytest.approx([LR * step / 5 for step in range(1, 6)])
    assert ours(cfg) == ours(compose_config([f"optim.lr={LR}", f"train.max_steps={STEPS}", "optim.warmup_steps=4"]))


@pytest.mark.parametrize("warm_up", [0, 1, 10])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("decay", Decay)
def test_the_numbers_of_the_header_are_those_of_its_rates(decay: Decay, ratio: float, warm_up: int) -> None:
    schedule = Schedule(5e-7, warm_up, STEPS, decay, min_lr_ratio=ratio)
    said = re.fullmatch(r"(?:warm-up (\d+) (steps?), then )?([a-z ]+?)(?: to (\S+))?", schedule.in_words())
    assert said
    steps, unit, fall, rate = said.groups()
    below = next(step for step in range(1, STEPS) if schedule.at(step) == schedule.lr) - 1
    assert (int(steps or 0), unit) == (below, {0: None, 1: "step"}.get(below, "steps"))
    assert fall == decay.value.replace("_", " ")
    last, *after = (schedule.at(step) for step in (STEPS, STEPS + 1, 2 * STEPS))
    ends = after[:1] if last != after[0] == after[1] else []  # of what falls, and then no further
    assert [float(each) for each in [rate] if each] == pytest.approx(ends, rel=5e-3)  # three digits


# ---- the default rate ----


def default(*words: str) -> Config:
    return compose_config(["launch.device=cpu", "model=hf", "model.path=org/name", "data=jsonl",
                           f"data.path={__file__}", "reward.text=e", *words])  # fmt: skip


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("loss", sorted(KINDS["loss"]))
def test_no_loss_is_trained_at_the_rate_of_dpo_unless_it_is_of_its_kind(loss: str, adapter: str) -> None:
    """Its kind: what TRL's DPOTrainer trains."""
    rate, dpo = default(f"loss={loss}", f"adapter={adapter}").optim.lr, default_rate("dpo", adapter, "hf")
    assert rate == pytest.approx(ALL_WEIGHTS[loss] * (10 if adapter == "lora" else 1))
    assert (rate == dpo) is (loss in LIKE_DPO)
    assert rate > 0


@pytest.mark.parametrize(("config", "losses"), [
    ("SFTConfig", ["sft"]), ("KTOConfig", ["kto", "apo_zero_unpaired"]), ("GRPOConfig", ["grpo", "gspo"]),
    ("RLOOConfig", ["rloo"]),
])  # fmt: skip
def test_a_rate_that_is_said_to_be_of_trl_is(config: str, losses: list[str]) -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(getattr(trl, config))}["learning_rate"]
    assert {ALL_WEIGHTS[loss] for loss in losses} == {theirs}


def test_the_banner_says_which_rate_is_the_default() -> None:
    assert rates_in_words(default("loss=sft")) == "2e-05 (default for sft)"
    assert rates_in_words(default("loss=dpo", "adapter=lora")) == "5e-06 (default for dpo with an adapter)"
    assert rates_in_words(default("loss=ppo")) == "1e-06 (default for ppo), the critic's 9e-06 (default)"
    assert rates_in_words(default("loss=ppo", "optim.lr=3e-6", "loss.value_lr=2e-6")) == "3e-06, the critic's 2e-06"
    assert rates_in_words(compose_config(["optim.lr=1e-3"])) == "0.001"


def test_a_critic_has_the_rate_that_is_given_to_the_policy() -> None:
    assert default("loss=ppo", "optim.lr=3e-4").loss.value_lr is None
    assert default("loss=ppo", "loss.critic=shared").loss.value_lr is None
    assert default("loss=ppo", "adapter=lora").loss.value_lr == 9e-5
    assert compose_config(["loss=ppo", "reward.text=e"]).loss.value_lr is None  # of random weights
    dog = compose_config(["+experiment=dog", "model.path=org/name", "launch.device=cpu"])
    assert (dog.optim.lr, dog.loss.value_lr) == (3e-4, None)


def test_the_page_has_the_rate_of_every_loss() -> None:
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.partition("## The learning rate")[2].partition("```bash")[0].splitlines()]
    said = {name: (row[1].strip(), row[2].strip()) for row in rows if len(row) > 3 and "critic" not in row[3]
            for name in re.findall(r"`(\w+)`", row[3]) if name in ALL_WEIGHTS}  # fmt: skip
    assert said == {loss: (f"{rate:g}", f"{10 * rate:g}") for loss, rate in ALL_WEIGHTS.items()}
