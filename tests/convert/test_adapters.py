"""Adapters of other trainers, and the references that go with them: what each becomes, and that it composes."""

from __future__ import annotations

import pytest

from rlexp.convert import adapters
from tests.convert import tables
from tests.convert.tables import ABSENT, INSTEAD, NEEDLESS, OTHER, REMARK, Becomes, Table
from tests.convert.texts import AXOLOTL, AXOLOTL_LORA, COMMAND, FACTORY_LORA, OPENRLHF, RAY, SWIFT_LORA, TRL, TRL_LORA

pytestmark = pytest.mark.usefixtures("folder")
BY_TRL = {"adapter": "lora", "adapter.rank": 16, "adapter.alpha": 32.0, "adapter.dropout": 0.0,
          "adapter.targets": ["q_proj", "v_proj"], "adapter.rslora": None, "adapter.also": None}  # fmt: skip
PLAIN = {"adapter": None, "adapter.rank": None, "adapter.targets": None, "reference": None, "reference.path": None}
BEFORE = "precompute_ref_log_probs: true"
OPENRLHF_DOTTED = OPENRLHF.replace("--pretrain", "--model.model_name_or_path").replace("--dataset", "--data.dataset")
# The reference of the run, in rows whose experiment is composed.
RUN = "the run's reference"
ADAPTERS: Table = {
    (TRL_LORA, "dpo"): {
        "": BY_TRL | {"reference": None, OTHER: "lora_dropout, lora_target_modules", RUN: "adapter",
            REMARK: "lora_dropout: 0.05 their default: no dropout (0 is used)"},
        "lora_target_modules: [v_proj, lm_head]\nlora_modules_to_save: [embed_tokens]": {"adapter.targets": ["v_proj"],
            "adapter.also": ["embed_tokens"], ABSENT: "lora_target_modules", RUN: "adapter"},
        "lora_target_modules: '.*(q|v)_proj'": {"adapter.targets": [], ABSENT: "lora_target_modules"},
        "use_rslora: true\nlora_r: 64\nlora_dropout: 0.1\nlora_target_modules: all-linear": {"adapter.rslora": True,
            "adapter.rank": 64, "adapter.targets": [], REMARK: "lora_dropout: 0.1 no dropout (0 is used)"},
        "use_dora: true\nload_in_4bit: true\nlora_target_parameters: [experts]\nbnb_4bit_quant_type: nf4":
            BY_TRL | {ABSENT: "use_dora, load_in_4bit, lora_target_parameters", NEEDLESS: "bnb_4bit_quant_type"},
        BEFORE: BY_TRL | {"reference": "precompute", RUN: "precompute",
            REMARK: "lora_target_modules: null their default depends on the model's family"}},
    (TRL_LORA.replace("org/m", "neox"), "dpo"): {"": {"adapter.targets": ["query_key_value"]}},
    (TRL_LORA, "reward"): {
        "": BY_TRL | {OTHER: "lora_task_type", RUN: "adapter"},
        "lora_task_type: SEQ_CLS": BY_TRL | {NEEDLESS: "lora_task_type"}},
    (TRL_LORA + "reward_funcs: [a.b]\n", "grpo"): {"beta: 0.04": BY_TRL | {RUN: "adapter"}},
    (TRL, "dpo"): {
        "use_peft: false\nlora_r: 8\nlora_dropout: 0.1\nuse_dora: true":
            PLAIN | {NEEDLESS: "use_peft, lora_r, lora_dropout, use_dora", RUN: "model"},
        f"{BEFORE}\nprecompute_ref_batch_size: 4": {"reference": "precompute", NEEDLESS: "precompute_ref_batch_size"},
        f"{BEFORE}\nloss_type: sft": PLAIN | {NEEDLESS: "precompute_ref_log_probs", RUN: "model"},
        "precompute_ref_log_probs: false\nlora_r: 16": {NEEDLESS: "precompute_ref_log_probs", INSTEAD: "lora_r"}},
    (TRL, "bco"): {BEFORE: {"reference": "precompute", RUN: "precompute"}},
    (TRL, "kto"): {BEFORE: PLAIN | {NEEDLESS: "precompute_ref_log_probs", RUN: "model"}},
    COMMAND + "--use_peft ": {
        "--lora_r 8 --lora_alpha 16 --lora_target_modules q_proj v_proj --lora_dropout 0.0": {"adapter": "lora",
            "adapter.rank": 8, "adapter.alpha": 16.0, "adapter.targets": ["q_proj", "v_proj"], "adapter.dropout": 0.0},
        '--lora_target_modules "q_proj", "v_proj"': {"adapter.targets": ["q_proj", "v_proj"],
            OTHER: "lora_target_modules"}},
    OPENRLHF: {
        "--lora_rank 8 --lora_dropout 0.1 --load_in_4bit": {"adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16.0,
            "adapter.targets": [], "adapter.dropout": 0.0, OTHER: "lora_dropout", ABSENT: "load_in_4bit"},
        "--ref_offload --lora_rank 0 --lora_alpha 8": PLAIN | {"reference.offload": True, NEEDLESS: "lora_alpha"},
        "--ref_offload --ref_pretrain org/m --lora_rank 8": {"reference.offload": None, "reference.path": None,
            NEEDLESS: "ref_offload, ref_pretrain", RUN: "adapter"},
        "--ref_offload --ref_pretrain org/r --lora_rank 8": {"reference.offload": True, "reference.path": "org/r",
            RUN: "model"}},
    OPENRLHF_DOTTED: {"--ds.lora.rank 64 --ds.lora.alpha 64 --ds.lora.target_modules q_proj": {"adapter.rank": 64,
        "adapter.alpha": 64.0, "adapter.targets": ["q_proj"]}},
    RAY: {
        "--ref_reward_offload --init_kl_coef 0.1": {"reference.offload": True, RUN: "model"},
        "--ref_reward_offload --init_kl_coef 0": {"reference.offload": None, NEEDLESS: "ref_reward_offload"}},
    SWIFT_LORA: {
        "": {"adapter": "lora", "adapter.rank": 8, "adapter.alpha": 32.0, "adapter.targets": [], "optim.lr": 1e-4,
            "adapter.dropout": 0.0, "reference.path": None, OTHER: "lora_dropout"},
        "--train_type lora --lora_rank 4 --lora_alpha 8 --target_modules q_proj k_proj --learning_rate 5e-5 "
            "--modules_to_save lm_head all-norm --use_rslora true --merge_lora true --ref_adapters sft":
            {"adapter.path": None, "reference.path": None, "adapter.rank": 4, "adapter.alpha": 8.0,
            "adapter.targets": ["q_proj", "k_proj"], "optim.lr": 5e-5, "adapter.also": ["lm_head"],
            "adapter.rslora": True, "checkpoint.export": "merged", ABSENT: "modules_to_save, ref_adapters"},
        "--tuner_type adalora --quant_method bnb --quant_bits 4 --use_dora true --init_weights pissa "
            "--lora_bias all --lorap_lr_ratio 16 --target_regex x": {"adapter": "lora", NEEDLESS: "quant_bits",
            INSTEAD: "tuner_type", REMARK: "use_dora: true no DoRA: plain LoRA is used",
            ABSENT: "quant_method, use_dora, init_weights, lora_bias, lorap_lr_ratio, target_regex"},
        "--adapters sft --ref_adapters sft --lora_rank 8": {"adapter.path": "sft", "adapter.rank": None,
            "reference": "adapter", "reference.path": None, NEEDLESS: "lora_rank", RUN: "adapter"},
        "--adapters sft": {"adapter.path": "sft", "reference": None, "reference.path": "org/m", RUN: "model"},
        "--tuner_type full --lora_rank 8 --merge_lora true": PLAIN | {"checkpoint.export": None, "optim.lr": 1e-5,
            NEEDLESS: "lora_rank, merge_lora, tuner_type", RUN: "model"}},
    SWIFT_LORA.replace("rlhf --rlhf_type dpo", "sft"): {"--adapters sft": {"adapter.path": "sft", RUN: "adapter"}},
    AXOLOTL_LORA: {"": {"adapter": "lora", "adapter.rank": 32, "adapter.alpha": 64.0, "adapter.dropout": 0.0,
        "adapter.targets": [], "adapter.path": None, OTHER: "lora_dropout", RUN: "adapter"}},
    AXOLOTL_LORA.replace("lora_target_linear: true", "lora_target_modules: [q_proj, v_proj]"): {
        "lora_modules_to_save: [embed_tokens, lm_head]\npeft_use_rslora: true\nrl_adapter_ref_model: true":
            {"adapter.targets": ["q_proj", "v_proj"], "adapter.also": ["embed_tokens", "lm_head"],
            "adapter.rslora": True, NEEDLESS: "rl_adapter_ref_model"}},
    AXOLOTL_LORA.replace("adapter: lora\n", ""): {
        "load_in_4bit: true\nmerge_lora: true\npeft_use_dora: true\nloraplus_lr_ratio: 16\nadapter: qlora":
            {"adapter.rank": 32, "checkpoint.export": "merged", INSTEAD: "adapter",
            ABSENT: "load_in_4bit, peft_use_dora, loraplus_lr_ratio",
            REMARK: "load_in_4bit: true weights stay in the dtype that computes (no QLoRA)"}},
    AXOLOTL: {
        "adapter: lora\nlora_model_dir: sft\nlora_r: 8": {"adapter.path": "sft", "adapter.rank": None,
            NEEDLESS: "lora_r", RUN: "adapter"},
        "adapter: llama-adapter": PLAIN | {INSTEAD: "adapter"},
        "adapter:\nlora_r: 8\nload_in_8bit: false": PLAIN | {NEEDLESS: "adapter, lora_r, load_in_8bit"},
        f"{BEFORE}\nlora_r: 16": {"reference": "precompute", INSTEAD: "lora_r", RUN: "precompute"}},
    AXOLOTL.replace("dpo", "kto"): {BEFORE: {"reference": None, NEEDLESS: "precompute_ref_log_probs"}},
    FACTORY_LORA: {
        "": {"adapter.rank": 8, "adapter.alpha": 16.0, "adapter.dropout": 0.0, "adapter.targets": []},
        "lora_rank: 32\nlora_dropout: 0.1\nlora_target: q_proj,v_proj\nuse_rslora: true\n"
            "additional_target: embed_tokens,lm_head": {"adapter.rank": 32, "adapter.alpha": 64.0,
            "adapter.targets": ["q_proj", "v_proj"], "adapter.rslora": True,
            "adapter.also": ["embed_tokens", "lm_head"], OTHER: "lora_dropout", RUN: "adapter"},
        "use_dora: true\npissa_init: true\nquantization_bit: 4\nquantization_method: bnb\n"
            "loraplus_lr_ratio: 16\nref_model: org/r\nref_model_adapters: sft": {"reference.path": "org/r",
            NEEDLESS: "quantization_method", RUN: "model",
            ABSENT: "use_dora, pissa_init, quantization_bit, loraplus_lr_ratio, ref_model_adapters"},
        "finetuning_type: freeze\nfreeze_trainable_layers: 4\nlora_rank: 8": PLAIN | {INSTEAD: "finetuning_type",
            ABSENT: "freeze_trainable_layers", NEEDLESS: "lora_rank"},
        "finetuning_type: oft\nref_model: org/m": {"adapter": "lora", INSTEAD: "finetuning_type",
            NEEDLESS: "ref_model"},
        "adapter_name_or_path: sft\nlora_rank: 8": {"adapter.path": "sft", "adapter.rank": None,
            "reference.path": "org/m", NEEDLESS: "lora_rank", RUN: "model",
            REMARK: "theirs compares with the model without any adapter"},
        "adapter_name_or_path: sft\nref_model: org/m\nref_model_adapters: sft": {"adapter.path": "sft",
            "reference": "adapter", "reference.path": None, RUN: "adapter"},
        "adapter_name_or_path: sft,sft2": {"adapter.path": "sft2", ABSENT: "adapter_name_or_path", RUN: "model",
            REMARK: "merge it into its model first, and train that"},
        "adapter_name_or_path: sft\ncreate_new_adapter: true": {"adapter.path": None, "adapter.rank": 8,
            "reference.path": None, ABSENT: "adapter_name_or_path", RUN: "adapter"}},
    FACTORY_LORA.replace("dpo", "sft"): {"adapter_name_or_path: sft": {"adapter.path": "sft", "reference.path": None}},
}  # fmt: skip
CASES = tables.cases(ADAPTERS)


@pytest.mark.parametrize(("text", "trainer", "wanted"), CASES)
def test_an_adapter_becomes_ours(text: str, trainer: str | None, wanted: Becomes) -> None:
    tables.assert_becomes(tables.of_eight(text, trainer), {key: value for key, value in wanted.items() if key != RUN})


@pytest.mark.parametrize(("text", "trainer", "wanted"), [case for case in CASES if RUN in case.values[2]])
def test_the_experiment_composes_with_its_reference(text: str, trainer: str | None, wanted: Becomes) -> None:
    conv = tables.of_eight(text, trainer)
    cfg = tables.experiment_of(conv)
    assert cfg.reference.name.value == wanted[RUN]
    assert cfg.adapter.name == (conv.choices["adapter"].value if "adapter" in conv.choices else "none")


@pytest.mark.slow
def test_the_layers_of_a_family_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {family: tuple(known[family]) for family in adapters.OF_FAMILIES} == adapters.OF_FAMILIES
