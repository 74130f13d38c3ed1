"""Adapters of other trainers, and the references that go with them: what each becomes, and that it composes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlexp.config.schema.models import ReferenceName
from rlexp.convert import adapters
from rlexp.convert.conversion import ConvertError
from rlexp.convert.experiment import composed, overrides
from rlexp.convert.frameworks import FRAMEWORKS
from rlexp.convert.rules import Fate
from tests.convert.texts import (
    AXOLOTL,
    AXOLOTL_LORA,
    COMMAND,
    FACTORY_LORA,
    GRPO,
    OPENRLHF,
    RAY,
    SWIFT,
    SWIFT_LORA,
    TRL,
    TRL_LORA,
    conversion,
    named,
    values,
    written,
)

OTHER, ABSENT, NEEDLESS, INSTEAD = Fate.OTHER, Fate.ABSENT, Fate.NEEDLESS, Fate.INSTEAD
BY_TRL = {"adapter": "lora", "adapter.rank": 16, "adapter.alpha": 32.0, "adapter.dropout": 0.0,
          "adapter.targets": ["q_proj", "v_proj"], "adapter.rslora": None, "adapter.also": None}  # fmt: skip
PLAIN = {"adapter": None, "adapter.rank": None, "adapter.targets": None, "reference": None, "reference.path": None}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters, a model of a family, a set of rows and a reward."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"d1": {"hf_hub_url": "org/d"}}')
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for name in ("sft", "sft2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(said))
        (tmp_path / name / "adapter_model.safetensors").touch()
    (tmp_path / "a.py").write_text("def b(prompts, answers, rows):\n    return [0.0] * len(answers)\n")
    (tmp_path / "neox").mkdir()
    (tmp_path / "neox" / "config.json").write_text(
        json.dumps({"model_type": "gpt_neox", "num_attention_heads": 8, "hidden_size": 64})
    )
    monkeypatch.chdir(tmp_path)


# A file's text, its trainer (of TRL), what comes of it, and what is told.
CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[Fate, set[str]]]] = {
    "trl": (TRL_LORA, "dpo", BY_TRL | {"reference": None}, {OTHER: {"lora_dropout", "lora_target_modules"}}),
    "trl of a command": (
        COMMAND + "--use_peft --lora_r 8 --lora_alpha 16 --lora_target_modules q_proj v_proj --lora_dropout 0.0", None,
        {"adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16.0, "adapter.targets": ["q_proj", "v_proj"],
         "adapter.dropout": 0.0}, {}),
    "trl of every layer": (TRL_LORA + "lora_target_modules: all-linear\n", "dpo", {"adapter.targets": []}, {}),
    "trl of a family": (TRL_LORA.replace("org/m", "neox"), "dpo", {"adapter.targets": ["query_key_value"]}, {}),
    "trl of commas": (COMMAND + '--use_peft --lora_target_modules "q_proj", "v_proj"', None,
                      {"adapter.targets": ["q_proj", "v_proj"]}, {OTHER: {"lora_target_modules"}}),
    "trl of the head too": (TRL_LORA + "lora_target_modules: [v_proj, lm_head]\nlora_modules_to_save: [embed_tokens]\n",
                            "dpo", {"adapter.targets": ["v_proj"], "adapter.also": ["embed_tokens"]},
                            {ABSENT: {"lora_target_modules"}}),
    "trl of a pattern": (TRL_LORA + "lora_target_modules: '.*(q|v)_proj'\n", "dpo", {"adapter.targets": []},
                         {ABSENT: {"lora_target_modules"}}),
    "trl scaled by the root": (TRL_LORA + "use_rslora: true\nlora_r: 64\n", "dpo",
                               {"adapter.rslora": True, "adapter.rank": 64}, {}),
    "trl of more kinds": (
        TRL_LORA + "use_dora: true\nload_in_4bit: true\nlora_target_parameters: [experts]\nbnb_4bit_quant_type: nf4\n",
        "dpo", BY_TRL, {ABSENT: {"use_dora", "load_in_4bit", "lora_target_parameters"},
                        NEEDLESS: {"bnb_4bit_quant_type"}}),
    "trl without": (TRL + "use_peft: false\nlora_r: 8\nlora_dropout: 0.1\nuse_dora: true\n", "dpo", PLAIN,
                    {NEEDLESS: {"use_peft", "lora_r", "lora_dropout", "use_dora"}}),
    "trl that draws": (GRPO + "use_peft: true\nbeta: 0.04\n", "grpo", BY_TRL, {}),
    "trl of a reward model": (TRL_LORA, "reward", BY_TRL, {OTHER: {"lora_task_type"}}),
    "trl of a reward model's kind": (TRL_LORA + "lora_task_type: SEQ_CLS\n", "reward", BY_TRL,
                                     {NEEDLESS: {"lora_task_type"}}),
    "trl that computes before": (TRL + "precompute_ref_log_probs: true\nprecompute_ref_batch_size: 4\n", "dpo",
                                 {"reference": "precompute"}, {NEEDLESS: {"precompute_ref_batch_size"}}),
    "trl that computes before with an adapter": (TRL_LORA + "precompute_ref_log_probs: true\n", "dpo",
                                                  BY_TRL | {"reference": "precompute"}, {}),
    "trl's bco that computes before": (TRL + "precompute_ref_log_probs: true\n", "bco",
                                       {"reference": "precompute"}, {}),
    "trl's kto that computes before": (TRL + "precompute_ref_log_probs: true\n", "kto", PLAIN,
                                       {NEEDLESS: {"precompute_ref_log_probs"}}),
    "trl that compares with nothing": (TRL + "precompute_ref_log_probs: true\nloss_type: sft\n", "dpo", PLAIN,
                                       {NEEDLESS: {"precompute_ref_log_probs"}}),
    "trl that computes in each step": (TRL + "precompute_ref_log_probs: false\n", "dpo", PLAIN,
                                       {NEEDLESS: {"precompute_ref_log_probs"}}),
    "openrlhf": (OPENRLHF + "--lora_rank 8 --lora_dropout 0.1 --load_in_4bit", None,
                 {"adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16.0, "adapter.targets": [],
                  "adapter.dropout": 0.0}, {OTHER: {"lora_dropout"}, ABSENT: {"load_in_4bit"}}),
    "openrlhf, newer": (OPENRLHF.replace("--pretrain", "--model.model_name_or_path").replace("--dataset",
                        "--data.dataset") + "--ds.lora.rank 64 --ds.lora.alpha 64 --ds.lora.target_modules q_proj",
                        None, {"adapter.rank": 64, "adapter.alpha": 64.0, "adapter.targets": ["q_proj"]}, {}),
    "openrlhf without": (OPENRLHF + "--lora_rank 0 --lora_alpha 8", None, PLAIN, {NEEDLESS: {"lora_alpha"}}),
    "openrlhf offload": (OPENRLHF + "--ref_offload", None, {"reference.offload": True}, {}),
    "openrlhf offload and an adapter": (
        OPENRLHF + "--ref_offload --ref_pretrain org/m --lora_rank 8", None,
        {"reference.offload": None, "reference.path": None}, {NEEDLESS: {"ref_offload", "ref_pretrain"}}),
    "openrlhf offload of another": (
        OPENRLHF + "--ref_offload --ref_pretrain org/r --lora_rank 8", None,
        {"reference.offload": True, "reference.path": "org/r"}, {}),
    "openrlhf that draws": (RAY + "--ref_reward_offload --init_kl_coef 0.1", None, {"reference.offload": True}, {}),
    "openrlhf that compares with nothing": (RAY + "--ref_reward_offload --init_kl_coef 0", None,
                                            {"reference.offload": None}, {NEEDLESS: {"ref_reward_offload"}}),
    "swift by default": (SWIFT_LORA, None, {"adapter": "lora", "adapter.rank": 8, "adapter.alpha": 32.0,
                         "adapter.targets": [], "adapter.dropout": 0.0, "optim.lr": 1e-4, "reference.path": None},
                         {OTHER: {"lora_dropout"}}),
    "swift": (SWIFT_LORA + "--train_type lora --lora_rank 4 --lora_alpha 8 --target_modules q_proj k_proj "
              "--modules_to_save lm_head all-norm --use_rslora true --learning_rate 5e-5 --merge_lora true", None,
              {"adapter.rank": 4, "adapter.alpha": 8.0, "adapter.targets": ["q_proj", "k_proj"], "optim.lr": 5e-5,
               "adapter.also": ["lm_head"], "adapter.rslora": True, "checkpoint.export": "merged"},
              {ABSENT: {"modules_to_save"}}),
    "swift of all weights": (SWIFT + "--lora_rank 8 --merge_lora true", None, PLAIN | {"checkpoint.export": None,
                             "optim.lr": 1e-5}, {NEEDLESS: {"lora_rank", "merge_lora", "tuner_type"}}),
    "swift of more kinds": (
        SWIFT_LORA + "--tuner_type adalora --quant_method bnb --quant_bits 4 --use_dora true --init_weights pissa "
        "--lora_bias all --lorap_lr_ratio 16 --target_regex x", None, {"adapter": "lora"},
        {ABSENT: {"quant_method", "use_dora", "init_weights", "lora_bias", "lorap_lr_ratio", "target_regex"},
         NEEDLESS: {"quant_bits"}, INSTEAD: {"tuner_type"}}),
    "swift from an adapter": (
        SWIFT_LORA + "--adapters sft --ref_adapters sft --lora_rank 8", None,
        {"adapter.path": "sft", "adapter.rank": None, "adapter.dropout": None, "reference": "adapter",
         "reference.path": None}, {NEEDLESS: {"lora_rank"}}),
    "swift from an adapter that is left out": (
        SWIFT_LORA + "--adapters sft", None, {"adapter.path": "sft", "reference": None, "reference.path": "org/m"}, {}),
    "swift and an adapter of the reference": (SWIFT_LORA + "--ref_adapters sft", None,
                                              {"adapter.path": None, "reference.path": None},
                                              {ABSENT: {"ref_adapters"}}),
    "swift sft from an adapter": (SWIFT_LORA.replace("rlhf --rlhf_type dpo", "sft") + "--adapters sft", None,
                                  {"adapter.path": "sft", "reference.path": None}, {}),
    "axolotl": (AXOLOTL_LORA, None, {"adapter": "lora", "adapter.rank": 32, "adapter.alpha": 64.0,
                "adapter.dropout": 0.0, "adapter.targets": [], "adapter.path": None}, {OTHER: {"lora_dropout"}}),
    "axolotl of some layers": (
        AXOLOTL_LORA.replace("lora_target_linear: true", "lora_target_modules: [q_proj, v_proj]")
        + "lora_modules_to_save: [embed_tokens, lm_head]\npeft_use_rslora: true\nrl_adapter_ref_model: true\n", None,
        {"adapter.targets": ["q_proj", "v_proj"], "adapter.also": ["embed_tokens", "lm_head"], "adapter.rslora": True},
        {NEEDLESS: {"rl_adapter_ref_model"}}),
    "axolotl of quantized weights": (
        AXOLOTL_LORA.replace("adapter: lora", "adapter: qlora") + "load_in_4bit: true\nmerge_lora: true\n"
        "peft_use_dora: true\nloraplus_lr_ratio: 16\n", None, {"adapter": "lora", "checkpoint.export": "merged"},
        {INSTEAD: {"adapter"}, ABSENT: {"load_in_4bit", "peft_use_dora", "loraplus_lr_ratio"}}),
    "axolotl from an adapter": (AXOLOTL + "adapter: lora\nlora_model_dir: sft\nlora_r: 8\n", None,
                                {"adapter.path": "sft", "adapter.rank": None, "reference.path": None},
                                {NEEDLESS: {"lora_r"}}),
    "axolotl of another kind": (AXOLOTL + "adapter: llama-adapter\n", None, PLAIN, {INSTEAD: {"adapter"}}),
    "axolotl without": (AXOLOTL + "adapter:\nlora_r: 8\nload_in_8bit: false\n", None, PLAIN,
                        {NEEDLESS: {"adapter", "lora_r", "load_in_8bit"}}),
    "axolotl that computes before": (AXOLOTL + "precompute_ref_log_probs: true\n", None, {"reference": "precompute"},
                                     {}),
    "axolotl's kto": (AXOLOTL.replace("rl: dpo", "rl: kto") + "precompute_ref_log_probs: true\n", None,
                      {"reference": None}, {NEEDLESS: {"precompute_ref_log_probs"}}),
    "factory by default": (FACTORY_LORA, None, {"adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16.0,
                           "adapter.dropout": 0.0, "adapter.targets": []}, {}),
    "factory": (FACTORY_LORA + "lora_rank: 32\nlora_dropout: 0.1\nlora_target: q_proj,v_proj\nuse_rslora: true\n"
                "additional_target: embed_tokens,lm_head\n", None,
                {"adapter.rank": 32, "adapter.alpha": 64.0, "adapter.targets": ["q_proj", "v_proj"],
                 "adapter.rslora": True, "adapter.also": ["embed_tokens", "lm_head"]}, {OTHER: {"lora_dropout"}}),
    "factory of more kinds": (
        FACTORY_LORA + "use_dora: true\npissa_init: true\nquantization_bit: 4\nquantization_method: bnb\n"
        "loraplus_lr_ratio: 16\n", None, {"adapter": "lora"},
        {ABSENT: {"use_dora", "pissa_init", "quantization_bit", "loraplus_lr_ratio"},
         NEEDLESS: {"quantization_method"}}),
    "factory of some weights": (FACTORY_LORA + "finetuning_type: freeze\nfreeze_trainable_layers: 4\nlora_rank: 8\n",
                                None, PLAIN, {INSTEAD: {"finetuning_type"}, ABSENT: {"freeze_trainable_layers"},
                                              NEEDLESS: {"lora_rank"}}),
    "factory of another kind": (FACTORY_LORA + "finetuning_type: oft\n", None, {"adapter": "lora"},
                                {INSTEAD: {"finetuning_type"}}),
    "factory from an adapter": (
        FACTORY_LORA + "adapter_name_or_path: sft\nlora_rank: 8\n", None,
        {"adapter.path": "sft", "adapter.rank": None, "reference.path": "org/m"}, {NEEDLESS: {"lora_rank"}}),
    "factory from an adapter and against it": (
        FACTORY_LORA + "adapter_name_or_path: sft\nref_model: org/m\nref_model_adapters: sft\n", None,
        {"adapter.path": "sft", "reference": "adapter", "reference.path": None}, {}),
    "factory from two": (FACTORY_LORA + "adapter_name_or_path: sft,sft2\n", None, {"adapter.path": "sft2"},
                         {ABSENT: {"adapter_name_or_path"}}),
    "factory from one with a new one": (
        FACTORY_LORA + "adapter_name_or_path: sft\ncreate_new_adapter: true\n", None,
        {"adapter.path": None, "adapter.rank": 8, "reference.path": None}, {ABSENT: {"adapter_name_or_path"}}),
    "factory and an adapter of the reference": (
        FACTORY_LORA + "ref_model: org/r\nref_model_adapters: sft\n", None, {"reference.path": "org/r"},
        {ABSENT: {"ref_model_adapters"}}),
    "factory and the same reference": (FACTORY_LORA + "ref_model: org/m\n", None, {"reference.path": None},
                                       {NEEDLESS: {"ref_model"}}),
    "factory sft from an adapter": (
        FACTORY_LORA.replace("stage: dpo", "stage: sft") + "adapter_name_or_path: sft\n", None,
        {"adapter.path": "sft", "reference.path": None}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_becomes_ours(case: str) -> None:
    text, trainer, wanted, told = CASES[case]
    conv = conversion(text, trainer, 8)
    assert {key: values(conv).get(key) for key in wanted} == wanted
    for fate, names in told.items():
        assert names <= named(conv, fate), (fate, named(conv, fate))


# The reference of the run, for files whose experiments are composed.
REFERENCES: Mapping[ReferenceName, str] = {
    ReferenceName.adapter: "trl, trl of the head too, trl that draws, trl of a reward model, openrlhf, swift, axolotl, "
    "openrlhf offload and an adapter, swift from an adapter, axolotl from an adapter, factory, "
    "factory from an adapter and against it, factory from one with a new one, swift sft from an adapter",
    ReferenceName.precompute: "trl that computes before, trl that computes before with an adapter, "
    "trl's bco that computes before, axolotl that computes before",
    ReferenceName.model: "trl without, trl's kto that computes before, trl that compares with nothing, "
    "openrlhf offload, openrlhf offload of another, openrlhf that draws, swift of all weights, "
    "factory from an adapter, swift from an adapter that is left out, factory from two, "
    "factory and an adapter of the reference",
}


@pytest.mark.parametrize(
    ("case", "reference"), [(case, name) for name, cases in REFERENCES.items() for case in cases.split(", ")]
)
def test_the_experiment_composes_with_its_reference(case: str, reference: ReferenceName) -> None:
    text, trainer, _, _ = CASES[case]
    conv = conversion(text, trainer, 8)
    cfg = composed(written(conv), "mine", overrides(conv))
    assert cfg.reference.name is reference
    assert cfg.adapter.name == values(conv).get("adapter", "none")


@pytest.mark.parametrize(
    ("text", "trainer", "said"),
    [
        (TRL_LORA, "dpo", "lora_dropout: 0.05 their default: no dropout (0 is used)"),
        (TRL_LORA, "dpo", "lora_target_modules: null their default depends on the model's family"),
        (TRL_LORA + "lora_dropout: 0.1\n", "dpo", "lora_dropout: 0.1 no dropout (0 is used)"),
        (
            AXOLOTL_LORA + "load_in_4bit: true\n",
            None,
            "load_in_4bit: true weights stay in the dtype that computes (no QLoRA)",
        ),
        (SWIFT_LORA + "--use_dora true", None, "use_dora: true no DoRA: plain LoRA is used"),
        (OPENRLHF.replace("_dpo", "_rm") + "--lora_rank 8", None, "LoRA: theirs freezes the head that scores"),
        (FACTORY_LORA + "adapter_name_or_path: sft\n", None, "theirs compares with the model without any adapter"),
        (FACTORY_LORA + "adapter_name_or_path: sft,sft2\n", None, "merge it into its model first, and train that"),
    ],
)
def test_what_is_lost_of_an_adapter_is_told(text: str, trainer: str | None, said: str) -> None:
    lines = [line.removeprefix("#").strip() for line in written(conversion(text, trainer, 8)).splitlines()]
    assert said in re.sub(r"\s+", " ", " ".join(lines))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AXOLOTL_LORA.replace("lora_r: 32\n", ""), "lora_r: is missing, and axolotl has no default. Add it to the "),
        (AXOLOTL_LORA.replace("lora_target_linear: true\n", ""), "lora_target_modules: is missing, and nothing says "),
        (FACTORY_LORA + "lora_rank: 0\n", "lora_rank=0: must be a whole number of at least 1."),
        (FACTORY_LORA + "lora_target: lm_head\n", "lora_target=lm_head: names the head or embeddings alone, which"),
    ],
)
def test_an_adapter_that_no_file_can_mean_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConvertError, match=re.escape(said)):
        conversion(text, None, 8)


def test_no_rule_says_that_there_are_no_adapters() -> None:
    for framework in FRAMEWORKS.values():
        assert not [rule.names for rule in framework.rules if re.search(r"no LoRA(?!\+)", rule.why)]
        assert {"adapter.rank", "adapter.alpha", "adapter.dropout", "adapter.targets"} <= {
            key for rule in framework.rules for key in rule.key.split(", ")
        }


@pytest.mark.slow
def test_the_layers_of_a_family_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {family: tuple(known[family]) for family in adapters.OF_FAMILIES} == adapters.OF_FAMILIES
