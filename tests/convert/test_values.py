"""Every known argument with values that nobody expects: a conversion or one message, and no argument is lost."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from rlexp.convert import axolotl, llamafactory
from rlexp.convert.conversion import NOTHING, Conversion, ConvertError
from rlexp.convert.frameworks import FRAMEWORKS, of_asked
from rlexp.convert.read import Asked, plain

pytestmark = pytest.mark.usefixtures("folder")
OF_TRL = {"model_name_or_path": "org/m", "dataset_name": "org/d", "num_processes": 8}
OF_SWIFT = {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4}
OF_AXOLOTL = {"base_model": "org/m", "learning_rate": 1e-5, "datasets": [{"path": "org/d"}]}
BY_OTHER_KEYS: dict[str, dict[str, Any]] = {"sft": {}, "reward": {"reward_model": True}}  # of axolotl; others say `rl`
LEAST: dict[tuple[str, str], dict[str, Any]] = {
    **{("TRL", trainer): OF_TRL for trainer in ("dpo", "cpo", "orpo", "sft", "kto", "bco", "reward")},
    **{("TRL", trainer): {**OF_TRL, "reward_funcs": ["a.b"]} for trainer in ("grpo", "rloo")},
    ("TRL", "ppo"): {**OF_TRL, "reward_model_path": "r"},
    **{("OpenRLHF", trainer): {"pretrain": "org/m", "dataset": "org/d"} for trainer in ("dpo", "sft", "rm", "kto")},
    ("OpenRLHF", "ppo"): {"pretrain": "org/m", "prompt_data": "org/d", "reward_pretrain": "org/r"},
    **{("ms-swift", kind): OF_SWIFT for kind in ("dpo", "sft", "pt")},
    **{("ms-swift", kind): {**OF_SWIFT, "rlhf_type": kind} for kind in ("cpo", "orpo", "simpo", "kto", "rm")},
    ("ms-swift", "grpo"): {**OF_SWIFT, "rlhf_type": "grpo", "reward_funcs": ["a.b"]},
    **{("axolotl", rl): {**OF_AXOLOTL, **BY_OTHER_KEYS.get(rl, {"rl": rl})} for rl in axolotl.TRAINERS},
    **{("LLaMA-Factory", stage): {"model_name_or_path": "org/m", "stage": stage, "dataset": "d"}
       for stage in llamafactory.TRAINERS},
}  # fmt: skip
# Arguments that have a default, or that something else decides.
NOT_NEEDED = ("num_processes", "rl", "reward_model", "rlhf_type", "stage", "NPROC_PER_NODE", "reward_model_path")
# Values that turn on what other arguments then belong to.
TURNED_ON: dict[str, Any] = {
    "use_vllm": True, "eval_strategy": "steps", "vllm_num_engines": 2, "test_split_size": 9, "val_set_size": 9,
    "enable_vllm_is_correction": True, "val_size": 9, "warmup_steps": 5, "eval_dataset": "org/e", "zero_stage": 3,
    "context_parallel_size": 2, "packing": True, "use_peft": True, "adapter": "lora", "lora_r": 8, "lora_alpha": 16,
    "lora_target_linear": True, "lora_rank": 8, "precompute_ref_log_probs": True, "ref_offload": True,
    "adapters": ["a"], "ref_adapters": ["a"], "adapter_name_or_path": "a", "ref_model": "org/m",
}  # fmt: skip
ODD: tuple[Any, ...] = (0, -1, 0.5, 2.0, "x", [1], {}, {"stage": 3}, math.inf, True, False, None, "steps", "zero3")
FEW: tuple[Any, ...] = (0, 1, "x", [], True, "zero3", 10**30)


def convert(framework: str, trainer: str, given: dict[str, Any], gpus: int | None = 8) -> Conversion | str:
    """Return the conversion, or the message that refuses it."""
    try:
        return of_asked(Asked(framework, trainer, given), gpus)
    except ConvertError as error:
        return str(error)


def unaccounted(conv: Conversion) -> set[str]:
    """Return the arguments that are behind no key and in no line, and those of which it says that they set nothing."""
    origins = " ".join(each.origin for each in (*conv.values.values(), *conv.choices.values(), *conv.command.values()))
    explained = {line.name.partition(":")[0] for lines in conv.lines.values() for line in lines if line.why != NOTHING}
    return {name for name in conv.given if name not in {*explained, *conv.off} and not _in(name, origins)}


def _in(name: str, text: str) -> bool:
    return name in text and re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) is not None


@pytest.mark.parametrize(("framework", "trainer"), LEAST)
def test_no_value_is_a_traceback_and_none_is_lost(framework: str, trainer: str) -> None:
    rules = [rule for rule in FRAMEWORKS[framework].rules if not rule.trainers or trainer in rule.trainers]
    names = [name for rule in rules for name in rule.names]
    on = {name: value for name, value in TURNED_ON.items() if name in names}
    wrong: dict[str, Any] = {}
    for base, odd in ((LEAST[framework, trainer], ODD), ({**on, **LEAST[framework, trainer]}, FEW)):
        for name, value in itertools.product(names, odd):
            conv = convert(framework, trainer, {**base, name: value})
            if isinstance(conv, str):
                if "\n" in conv or not conv.endswith("."):
                    wrong[f"{name}={value!r}"] = conv
            elif left := unaccounted(conv):
                wrong[f"{name}={value!r}"] = left
    assert wrong == {}


@pytest.mark.parametrize(("framework", "trainer"), LEAST)
def test_an_argument_that_is_needed_is_asked_for_in_one_message(framework: str, trainer: str) -> None:
    for name in LEAST[framework, trainer]:
        given = {key: value for key, value in LEAST[framework, trainer].items() if key != name}
        conv = convert(framework, trainer, given, None)
        assert isinstance(conv, str) or name in NOT_NEEDED, name


def test_texts_that_stand_for_numbers() -> None:
    texts = ("5e-7", "3", "True", "none", "train[:5%]", "-1", "1.0")
    assert [plain(text) for text in texts] == [5e-7, 3, True, None, "train[:5%]", -1, 1.0]
