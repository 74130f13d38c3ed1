"""What rlexp gains must reach the converter: a new option has a rule or is listed, and a rule that says "missing" ends
once rlexp has it."""

from __future__ import annotations

import itertools
import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from rlexp.config.paths import conf_dir
from rlexp.config.schema import KINDS, EngineName, KernelName, LayoutName, LoggerName, Offload
from rlexp.config.schema.keys import all_keys
from rlexp.config.schema.rollouts import Overlong
from rlexp.convert import answers, axolotl, frameworks, openrlhf_rollouts, preference, trl
from rlexp.convert.conversion import ConvertError
from rlexp.convert.frameworks import FRAMEWORKS, converted, of_asked
from rlexp.convert.read import Asked
from rlexp.convert.rules import Fate
from tests.convert.test_values import LEAST

# The options of ours that no file of another trainer leads to.
OURS_ALONE = {
    "data": "synthetic arithmetic jsonl",  # theirs are named, and the library `datasets` reads them
    "model": "tiny",
    "reward": "rule",
    "engine": "torch",
    "parallel.layout": "auto hybrid",
    "parallel.kernel": "cpu_flash torch_flash flash_attn flash_attn_4",
    "rollout": "pipelined",
    "rollout.overlong": "keep",
    "engine.offload": "none",
    "reference": "model none",  # by default the adapter's base or the starting weights; none is what a loss has
}
ENUMS: dict[str, type[Enum]] = {
    "engine": EngineName, "logger": LoggerName, "parallel.layout": LayoutName, "parallel.kernel": KernelName,
    "engine.offload": Offload, "rollout.overlong": Overlong,
}  # fmt: skip
# Values of arguments that lead to an option, or to another argument's having a say.
LEADING: dict[str, tuple[Any, ...]] = {
    "deepspeed": ("zero0", "zero1", "zero2", "zero3_offload", "zero2_offload"),
    "fsdp": ("full_shard",), "zero_stage": (0, 1, 2, 3), "adam_offload": (True,),
    "report_to": tuple(LoggerName.__members__), "wandb_project": ("x",), "use_vllm": (True,),
    "attn_implementation": ("eager", "flash_attention_3"), "context_parallel_size": (2,),
    "parallelism_config_sp_size": (2,),
    "mask_truncated_completions": (True,), "missing_eos_penalty": (1.0,), "scale_rewards": ("group", "none"),
    "importance_sampling_level": ("sequence",), "advantage_estimator": tuple(openrlhf_rollouts.ESTIMATORS),
    "reward_funcs": (["a.b", "a.c"], ["a.b"]), "reward_model_name_or_path": ("org/r",), "remote_rm_url": ("r.py",),
    "loss_type": (*preference.LOSSES, *answers.SINGLE, "simpo", ["sigmoid", "bco_pair", "sft"]), "ipo": (True,),
    "pref_loss": ("orpo", "simpo"),
    "optim": ("adamw_torch", "sgd"), "test_split_size": (5,), "ring_attn_func": tuple(axolotl.RING_FUNCTIONS),
    "use_peft": (True,), "precompute_ref_log_probs": (True,), "adapters": ("sft",), "ref_adapters": ("sft",),
}  # fmt: skip


def options() -> set[str]:
    """Return every option that a run can choose, as GROUP=NAME or KEY=NAME."""
    found = {f"{group}={name}" for group, names in KINDS.items() for name in names}
    found |= {f"{key}={each.value}" for key, kind in ENUMS.items() for each in kind}
    groups = ("optim", "rollout", "reference", "engine", "logger")
    files = {f"{group}={path.stem}" for group in groups for path in (conf_dir() / group).glob("*.yaml")}
    defaults = {"engine=auto", "adapter=none", "reference=auto", "rollout=default", "parallel.kernel=auto"}
    return (found | files) - defaults


def reached(folder: Path) -> set[str]:
    """Return the options to which some file of another trainer leads."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"d": {"hf_hub_url": "org/d"}}))
    found: set[str] = set()
    for (framework, trainer), least in LEAST.items():
        names = {name for rule in FRAMEWORKS[framework].rules for name in rule.names}
        cases = [{}, *({name: value} for name, values in LEADING.items() for value in values)]
        pairs = [one | two for one, two in itertools.combinations(cases[1:], 2)
                 if "ring_attn_func" in two or {"adapters", "ref_adapters"} == {*one, *two}]  # fmt: skip
        for given in (*cases, *pairs):
            try:
                conv = of_asked(Asked(framework, trainer, least | {n: v for n, v in given.items() if n in names}), 8)
            except ConvertError:
                continue
            found |= {f"{key}={each.value}" for key, each in (*conv.choices.items(), *conv.values.items())}
    return found


def unexplained(folder: Path) -> set[str]:
    listed = {f"{key}={name}" for key, names in OURS_ALONE.items() for name in names.split()}
    return options() - reached(folder) - listed


def test_every_option_is_reached_or_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left = unexplained(tmp_path)
    assert left == set(), f"no rule leads to {left}: give it one in rlexp/convert, or list it in OURS_ALONE"
    listed = {f"{key}={name}" for key, names in OURS_ALONE.items() for name in names.split()}
    assert listed <= options()
    assert not listed & reached(tmp_path)


@pytest.mark.parametrize("group", KINDS)
def test_a_new_option_is_found(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.convert.test_gaps.reached", lambda _: set())
    monkeypatch.setitem(KINDS[group], "planted", next(iter(KINDS[group].values())))
    assert f"{group}=planted" in unexplained(tmp_path)


# ---- what is missing ----


def there() -> set[str]:
    """Return our keys, and our options as GROUP=NAME."""
    return {*all_keys(), *options(), *(f"{path.parent.name}={path.stem}" for path in conf_dir().glob("*/*.yaml"))}


def outdated() -> set[str]:
    """Return the names of rules that call missing what is here."""
    now, found = there(), set()
    for framework in FRAMEWORKS.values():
        for rule in framework.rules:
            found |= {f"{rule.names[0]}: {probe}" for probe in rule.until if any(probe in name for name in now)}
    return found | {f"{name}: {option}" for name, option in frameworks.NOT_YET.items() if option in now}


def test_what_a_rule_calls_not_here_is_not_here() -> None:
    assert outdated() == set(), "rlexp has it now: give the argument a rule that takes it over"


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [("kto_pair", {"loss_type", "pref_loss", "dpo_loss_type"}), ("dft", {"loss_type"}), ("gkd", {"gkd", "kd"})],
)
def test_a_loss_that_comes_ends_its_refusals(loss: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS["loss"], loss, KINDS["loss"]["dpo"])
    assert wanted <= {each.partition(":")[0] for each in outdated()}


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("adapter.use_dora", {"use_dora", "peft_use_dora"}),
        ("adapter.quantization", {"load_in_4bit", "ds.load_in_4bit", "quant_method", "quantization_bit"}),
        ("adapter.lr_ratio", {"lorap_lr_ratio", "loraplus_lr_ratio"}),
        ("adapter.target_parameters", {"lora_target_parameters", "target_parameters"}),
    ],
)
def test_a_kind_of_adapter_that_comes_ends_its_refusals(
    key: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {*all_keys(), key}
    monkeypatch.setattr("tests.convert.test_gaps.all_keys", lambda: keys)
    assert wanted <= {each.partition(":")[0] for each in outdated()}


def test_a_loss_that_is_here_is_named_where_a_file_is_not_read(tmp_path: Path) -> None:
    """A framework's trainer whose files are not converted is refused with our name for what it does, if we have it."""
    (tmp_path / "theirs.yaml").write_text("base_model: org/m\nrl: grpo\n")
    with pytest.raises(ConvertError, match=r"axolotl's grpo, whose files are not converted, .* has it: loss=grpo, "):
        converted(tmp_path / "theirs.yaml", None, 8)
    assert {*frameworks.OURS.values()} <= KINDS["loss"].keys()
    assert not {*frameworks.NOT_YET} & {*KINDS["loss"], *frameworks.OURS}


def test_a_refusal_of_a_loss_or_of_lora_has_a_probe() -> None:
    """So that no rule of this kind is left behind."""
    for name, framework in FRAMEWORKS.items():
        for rule in framework.rules:
            words = f"{' '.join(rule.names)} {rule.why}".lower()
            about = any(word in words for word in ("lora", "quantized", "preference loss", "tensor parallelism", "ipo"))
            if rule.fate is Fate.ABSENT and about:
                assert rule.until, (name, rule.names)
    assert {*trl.TELLTALE} == {*trl.TRAINERS} - {"orpo"}  # orpo has no argument of its own
