"""What rlexp gains must reach the converter: a new option or key has a rule or is listed, every argument of TRL has a
rule, and a rule that says "missing" ends once rlexp has it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from enum import Enum
from typing import Any

import pytest

from rlexp.config.paths import conf_dir
from rlexp.config.schema import KINDS, EngineName, KernelName, LayoutName, LoggerName, Offload
from rlexp.config.schema.keys import all_keys
from rlexp.config.schema.rollouts import Overlong
from rlexp.convert import axolotl, frameworks, losses, openrlhf_rollouts, trl
from rlexp.convert.frameworks import FRAMEWORKS
from rlexp.convert.rules import Fate, Rule
from tests.convert.test_values import LEAST, convert

# The options of ours that no file of another trainer leads to.
OPTIONS_OURS_ALONE = {
    "data": "synthetic arithmetic jsonl",  # theirs are named, and the library `datasets` reads them
    "model": "tiny", "reward": "rule", "engine": "torch", "parallel.layout": "auto hybrid", "rollout": "pipelined",
    "parallel.kernel": "cpu_flash torch_flash flash_attn flash_attn_4", "rollout.overlong": "keep",
    "engine.offload": "none",
    "reference": "model none",  # by default the adapter's base or the starting weights; none is what a loss has
}  # fmt: skip
# Keys that no argument of another trainer sets. A new key belongs into a rule of theirs, or into this list.
KEYS_OURS_ALONE = {
    "adapter": "name", "checkpoint": "export_dtype host_memory_gib", "engine": "chosen name overrides",
    "data": "bad_rows cache digits fill name revision seed share_prefix size unpair", "eval": "buckets",
    "launch": "collectives grace_seconds interface preflight rank_cpus rank_memory_gb ranks_per_gpu time_limit "
              "torch_threads",
    "logger": "artifacts axes baseline mode name tags", "loss": "kl_horizon name whiten", "memory": "count_tensors",
    "model": "freeze fused gguf heads hidden_size intermediate_size kv_heads layers name seed window", "optim": "name",
    "parallel": "backend chosen cut dp_size elastic transport ulysses_size world_size", "reference": "name revision",
    "resume": "force mode",
    "reward": "ignore_case max_length most name pattern precision rule target text timeout_seconds trust_remote_code "
              "workers",
    "rollout": "micro_batch_size micro_batch_tokens sampling_ranks stop",
    "train": "grad_acc max_tokens_per_micro_batch stop_after",
}  # fmt: skip
# data_seed: theirs shuffles, ours is for generated rows. alpha: theirs is AlphaPO's, ours is an adapter's.
ALIKE = {"data_seed", "alpha"}
ENUMS: dict[str, type[Enum]] = {
    "engine": EngineName, "logger": LoggerName, "parallel.layout": LayoutName, "parallel.kernel": KernelName,
    "engine.offload": Offload, "rollout.overlong": Overlong,
}  # fmt: skip
# Values of arguments that lead to an option, or to another argument's having a say.
LEADING: dict[str, tuple[Any, ...]] = {
    "deepspeed": ("zero0", "zero1", "zero2", "zero3_offload", "zero2_offload"), "fsdp": ("full_shard",),
    "zero_stage": (0, 1, 2, 3), "adam_offload": (True,), "wandb_project": ("x",), "use_vllm": (True,),
    "report_to": tuple(LoggerName.__members__), "attn_implementation": ("eager", "flash_attention_3"),
    "context_parallel_size": (2,), "parallelism_config_sp_size": (2,),
    "mask_truncated_completions": (True,), "missing_eos_penalty": (1.0,), "scale_rewards": ("group", "none"),
    "importance_sampling_level": ("sequence",), "advantage_estimator": tuple(openrlhf_rollouts.ESTIMATORS),
    "reward_funcs": (["a.b", "a.c"], ["a.b"]), "reward_model_name_or_path": ("org/r",), "remote_rm_url": ("r.py",),
    "loss_type": (*losses.LOSSES, *losses.SINGLE, "simpo", ["sigmoid", "bco_pair", "sft"]), "ipo": (True,),
    "pref_loss": ("orpo", "simpo"),
    "optim": ("adamw_torch", "sgd"), "test_split_size": (5,), "ring_attn_func": tuple(axolotl.RING_FUNCTIONS),
    "use_peft": (True,), "precompute_ref_log_probs": (True,), "adapters": ("sft",), "ref_adapters": ("sft",),
}  # fmt: skip
RULES: list[Rule] = [rule for framework in FRAMEWORKS.values() for rule in framework.rules]


def listed(names: dict[str, str], joint: str) -> set[str]:
    return {f"{first}{joint}{second}" for first, seconds in names.items() for second in seconds.split()}


def options() -> set[str]:
    """Return every option that a run can choose, as GROUP=NAME or KEY=NAME."""
    kinds = {f"{group}={name}" for group, names in KINDS.items() for name in names}
    enums = {f"{key}={each.value}" for key, kind in ENUMS.items() for each in kind}
    groups = ("optim", "rollout", "reference", "engine", "logger")
    files = {f"{group}={path.stem}" for group in groups for path in (conf_dir() / group).glob("*.yaml")}
    defaults = {"engine=auto", "adapter=none", "reference=auto", "rollout=default", "parallel.kernel=auto"}
    return (kinds | enums | files) - defaults


def reached() -> set[str]:
    """Return the options to which some file of another trainer leads."""
    keys: set[str] = set()
    for (framework, trainer), least in LEAST.items():
        names = {name for rule in FRAMEWORKS[framework].rules for name in rule.names}
        single = [{name: value} for name, values in LEADING.items() for value in values]
        pairs = [one | two for one, two in itertools.combinations(single, 2)
                 if "ring_attn_func" in two or {"adapters", "ref_adapters"} == {*one, *two}]  # fmt: skip
        for given in ({}, *single, *pairs):
            conv = convert(framework, trainer, least | {n: v for n, v in given.items() if n in names})
            if not isinstance(conv, str):
                keys |= {f"{key}={each.value}" for key, each in (*conv.choices.items(), *conv.values.items())}
    return keys


def unexplained() -> set[str]:
    return options() - reached() - listed(OPTIONS_OURS_ALONE, "=")


@pytest.mark.usefixtures("folder")
def test_every_option_is_reached_or_ours_alone() -> None:
    left = unexplained()
    assert left == set(), f"no rule leads to {left}: give it one in rlexp/convert, or list it in OPTIONS_OURS_ALONE"
    assert listed(OPTIONS_OURS_ALONE, "=") <= options() - reached()


@pytest.mark.parametrize("group", KINDS)
def test_a_new_option_is_found(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.convert.test_completeness.reached", set)
    monkeypatch.setitem(KINDS[group], "planted", next(iter(KINDS[group].values())))
    assert f"{group}=planted" in unexplained()


def test_every_key_that_a_rule_names_exists() -> None:
    """So that a key which is renamed is renamed here too."""
    keys = {*all_keys(), *KINDS, "hydra.run.dir", "engine", "optim", "logger"}
    for rule in RULES:
        for each in re.findall(r"[a-z_]+(?:\.[a-zA-Z_]+)+", rule.key):
            name = re.sub(r"\.(sources|terms)\.NAME.*|(\.columns|\.template_options)\..*", r".\1\2", each)
            assert name.replace("..", ".") in keys, (rule.names, each)


def test_every_key_is_in_a_rule_or_ours_alone() -> None:
    named = {key.partition("=")[0] for rule in RULES for key in re.split(", | or ", rule.key)}
    named |= {"data.columns", "data.template_options", "data.sources", "reward.terms"} & {
        ".".join(key.split(".")[:2]) for key in named
    }
    keys = {key for key in all_keys() if "." in key and not key.startswith("hardware.")}
    assert keys - named == listed(KEYS_OURS_ALONE, ".")
    assert not listed(KEYS_OURS_ALONE, ".") & named


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_every_argument_of_trl_has_a_rule(name: str) -> None:
    theirs = pytest.importorskip("trl")
    known = {each for rule in trl.RULES if not rule.trainers or name.lower() in rule.trainers for each in rule.names}
    kinds = (getattr(theirs, f"{name}Config"), theirs.ScriptArguments, theirs.ModelConfig)
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} <= known


def there() -> set[str]:
    """Return our keys, and our options as GROUP=NAME."""
    return {*all_keys(), *options(), *(f"{path.parent.name}={path.stem}" for path in conf_dir().glob("*/*.yaml"))}


def outdated(now: set[str]) -> set[str]:
    """Return the names of rules that call missing what is here."""
    rules = {rule.names[0] for rule in RULES if any(probe in name for probe in rule.until for name in now)}
    return rules | {name for name, option in frameworks.NOT_YET.items() if option in now}


def test_what_a_rule_calls_not_here_is_not_here() -> None:
    assert outdated(there()) == set(), "rlexp has it now: give the argument a rule that takes it over"
    assert {*frameworks.OURS.values()} <= KINDS["loss"].keys()
    assert not {*frameworks.NOT_YET} & {*KINDS["loss"], *frameworks.OURS}


def test_what_is_called_absent_is_absent() -> None:
    """It fails where rlexp has come to have a key of the name that a rule calls missing."""
    ours = {"_".join(key.split(".")[start:]) for key in all_keys() for start in (0, 1)}
    assert {name.replace(".", "_") for rule in RULES if rule.fate is Fate.ABSENT for name in rule.names} & ours <= ALIKE


# An option or a key that comes, and the arguments whose refusals it ends.
COMING = {
    "loss=kto_pair": {"loss_type", "pref_loss", "dpo_loss_type"}, "loss=dft": {"loss_type"}, "loss=gkd": {"gkd", "kd"},
    "adapter.use_dora": {"use_dora", "peft_use_dora"}, "adapter.lr_ratio": {"lorap_lr_ratio", "loraplus_lr_ratio"},
    "adapter.quantization": {"load_in_4bit", "ds.load_in_4bit", "quant_method", "quantization_bit"},
    "adapter.target_parameters": {"lora_target_parameters", "target_parameters"},
}  # fmt: skip


@pytest.mark.parametrize("coming", COMING)
def test_what_comes_ends_its_refusals(coming: str) -> None:
    assert COMING[coming] <= outdated(there() | {coming})


def test_a_refusal_of_a_loss_or_of_lora_has_a_probe() -> None:
    """So that no rule of this kind is left behind."""
    for rule in RULES:
        words = f"{' '.join(rule.names)} {rule.why}".lower()
        about = any(word in words for word in ("lora", "quantized", "preference loss", "tensor parallelism", "ipo"))
        if rule.fate is Fate.ABSENT and about:
            assert rule.until, rule.names
    assert {*trl.TELLTALE} == {*trl.TRAINERS} - {"orpo"}  # orpo has no argument of its own
