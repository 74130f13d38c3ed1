"""Every known argument with values that nobody expects: a conversion or one message, and no argument is lost."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rlexp.convert import axolotl, llamafactory
from rlexp.convert.conversion import NOTHING, Conversion, ConvertError
from rlexp.convert.frameworks import FRAMEWORKS, of_asked
from rlexp.convert.read import Asked

OF_TRL = {"model_name_or_path": "org/m", "dataset_name": "org/d", "num_processes": 8}
AXOLOTL: dict[str, dict[str, Any]] = {"sft": {}, "reward": {"reward_model": True}}  # the others say `rl`
LEAST: dict[tuple[str, str], dict[str, Any]] = {
    ("TRL", "dpo"): OF_TRL,
    ("TRL", "cpo"): OF_TRL,
    ("TRL", "orpo"): OF_TRL,
    ("TRL", "sft"): OF_TRL,
    ("TRL", "kto"): OF_TRL,
    ("TRL", "bco"): OF_TRL,
    ("TRL", "reward"): OF_TRL,
    ("TRL", "grpo"): {**OF_TRL, "reward_funcs": ["a.b"]},
    ("TRL", "rloo"): {**OF_TRL, "reward_funcs": ["a.b"]},
    ("TRL", "ppo"): {**OF_TRL, "reward_model_path": "r"},
    ("OpenRLHF", "dpo"): {"pretrain": "org/m", "dataset": "org/d"},
    **{("OpenRLHF", trainer): {"pretrain": "org/m", "dataset": "org/d"} for trainer in ("sft", "rm", "kto")},
    ("OpenRLHF", "ppo"): {"pretrain": "org/m", "prompt_data": "org/d", "reward_pretrain": "org/r"},
    ("ms-swift", "dpo"): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4},
    ("ms-swift", "cpo"): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4, "rlhf_type": "cpo"},
    ("ms-swift", "orpo"): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4, "rlhf_type": "orpo"},
    ("ms-swift", "simpo"): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4, "rlhf_type": "simpo"},
    **{("ms-swift", kind): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4, "rlhf_type": kind}
       for kind in ("kto", "rm")},
    **{("ms-swift", kind): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4} for kind in ("sft", "pt")},
    ("ms-swift", "grpo"): {"model": "org/m", "dataset": "org/d", "NPROC_PER_NODE": 4, "rlhf_type": "grpo",
                           "reward_funcs": ["a.b"]},
    **{("axolotl", rl): {"base_model": "org/m", **AXOLOTL.get(rl, {"rl": rl}), "learning_rate": 1e-5,
                         "datasets": [{"path": "org/d"}]}
       for rl in axolotl.TRAINERS},
    **{("LLaMA-Factory", stage): {"model_name_or_path": "org/m", "stage": stage, "dataset": "d"}
       for stage in llamafactory.TRAINERS},
}  # fmt: skip
# Values that turn on what other arguments then belong to.
TURNED_ON: dict[str, Any] = {"use_vllm": True, "eval_strategy": "steps", "vllm_num_engines": 2, "test_split_size": 9,
                             "enable_vllm_is_correction": True, "val_set_size": 9, "val_size": 9, "warmup_steps": 5,
                             "eval_dataset": "org/e", "zero_stage": 3, "context_parallel_size": 2,
                             "packing": True, "use_peft": True, "adapter": "lora", "lora_r": 8, "lora_alpha": 16,
                             "lora_target_linear": True, "lora_rank": 8, "precompute_ref_log_probs": True,
                             "ref_offload": True, "adapters": ["a"], "ref_adapters": ["a"],
                             "adapter_name_or_path": "a", "ref_model": "org/m"}  # fmt: skip
ODD: tuple[Any, ...] = (0, -1, 0.5, 2.0, "x", [1], {}, {"stage": 3}, math.inf, True, False, None, "steps", "zero3")
FEW: tuple[Any, ...] = (0, 1, "x", [], True, "zero3", 10**30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"d": {"hf_hub_url": "org/d", "columns": None}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(framework: str, trainer: str, given: dict[str, Any], gpus: int | None = 8) -> Conversion | str:
    """Return the conversion, or the message that refuses it."""
    try:
        return of_asked(Asked(framework, trainer, given), gpus)
    except ConvertError as error:
        return str(error)


def unaccounted(conv: Conversion) -> set[str]:
    """Return the arguments that are behind no key and in no line, and those of which it says that they set nothing."""
    origins = " ".join(each.origin for each in (*conv.values.values(), *conv.choices.values(), *conv.command.values()))
    lines = [line for each in conv.lines.values() for line in each]
    told = {line.name.partition(":")[0] for line in lines if line.why != NOTHING}
    return {name for name in conv.given if name not in {*told, *conv.off} and not _in(name, origins)}


def _in(name: str, text: str) -> bool:
    return name in text and re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) is not None


@pytest.mark.parametrize(("framework", "trainer"), LEAST)
def test_no_value_is_a_traceback_and_none_is_lost(framework: str, trainer: str, folder: Path) -> None:
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
def test_an_argument_that_is_needed_is_asked_for_in_one_message(framework: str, trainer: str, folder: Path) -> None:
    for name in LEAST[framework, trainer]:
        given = {key: value for key, value in LEAST[framework, trainer].items() if key != name}
        conv = convert(framework, trainer, given, None)
        assert isinstance(conv, str) or name in (
            "num_processes",
            "rl",
            "reward_model",
            "rlhf_type",
            "stage",
            "NPROC_PER_NODE",
            "reward_model_path",
        ), name


@pytest.mark.parametrize(
    ("framework", "trainer", "given", "said"),
    [
        ("TRL", "grpo", {"num_generations": 0}, "num_generations=0: must be a whole number of at least 1. For "),
        ("TRL", "rloo", {"rloo_k": 0}, "rloo_k=0: must be"),
        ("TRL", "rloo", {"rloo_k": 3}, "rloo_k=3: does not divide the 64 answers"),
        ("TRL", "kto", {"desirable_weight": "x"}, "desirable_weight=x: must be a number. For example: "),
        ("TRL", "sft", {"packing": "bfd"}, "packing=bfd: must be true or false."),
        ("TRL", "reward", {"center_rewards_coefficient": [1]}, "center_rewards_coefficient=[1]: must be a number."),
        ("TRL", "dpo", {"per_device_train_batch_size": "auto"}, "per_device_train_batch_size=auto: must be a whole"),
        ("TRL", "dpo", {"num_train_epochs": "many"}, "num_train_epochs=many: must be a number of at least 0. For "),
        ("TRL", "dpo", {"lr_scheduler_type": ["cosine"]}, "lr_scheduler_type=['cosine']: must be a text."),
        ("TRL", "dpo", {"datasets": "x"}, "datasets=x: must be a list of mappings"),
        ("TRL", "dpo", {"deepspeed": {"zero_optimization": {"stage": "auto"}}}, "zero_optimization.stage=auto must"),
        ("TRL", "grpo", {"reward_funcs": ["a.b", "a.c"], "reward_weights": [1.0]}, "has 1 weights for 2 rewards."),
        ("OpenRLHF", "ppo", {"eps_clip_low_high": 0.2}, "eps_clip_low_high=0.2: must be two numbers. For example: "),
        ("OpenRLHF", "ppo", {"train_batch_size": 0}, "train_batch_size=0: must be a whole number of at least 1."),
        ("OpenRLHF", "ppo", {"train.batch_size": 100}, "train.batch_size=100: does not divide the 1024 answers"),
        ("OpenRLHF", "dpo", {"dataset": "b,c", "dataset_probs": 0.5}, "dataset_probs=0.5: must be 2 numbers"),
        ("ms-swift", "dpo", {"dataset": "org/d#abc"}, "dataset=org/d#abc: must be a path or a name"),
        ("axolotl", "dpo", {"datasets": ["org/d"]}, "datasets=['org/d']: must be a list of mappings"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_own_name(
    framework: str, trainer: str, given: dict[str, Any], said: str, folder: Path
) -> None:
    with pytest.raises(ConvertError) as error:
        of_asked(Asked(framework, trainer, LEAST[framework, trainer] | given), 8)
    assert said in str(error.value)


@pytest.mark.parametrize("given", [{}, {"pretrain": "org/m"}])
def test_what_is_missing_has_a_remedy(given: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConvertError, match=r"is missing, and it names .* Add it to the (file|command), as "):
        of_asked(Asked("OpenRLHF", "dpo", given), 8)
