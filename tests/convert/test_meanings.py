"""What single arguments of other trainers mean here, where a naive reading gives another run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlexp.config.schema import KINDS
from rlexp.convert.conversion import ConvertError
from rlexp.convert.experiment import composed, overrides
from rlexp.convert.rules import Fate
from rlexp.convert.trl import RULES, TELLTALE, trainer_of
from tests.convert.texts import (
    AXOLOTL,
    FACTORY,
    GRPO,
    OPENRLHF,
    PPO,
    RAY,
    SWIFT,
    TRL,
    conversion,
    named,
    values,
    written,
)

OF_ROWS = [name for name, kind in KINDS["loss"].items() if not kind.draws]
OTHER, ABSENT, NEEDLESS, INSTEAD = Fate.OTHER, Fate.ABSENT, Fate.NEEDLESS, Fate.INSTEAD
SHARED = (
    "mask_truncated_completions: true\nnum_generations: 4\n", "epsilon_high: 0.3\n", "truncation_mode: keep_start\n",
    "precompute_ref_log_probs: true\n", "packing: true\n",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        json.dumps(
            {
                "d1": {"file_name": "d1.json"},
                "d3": {"hf_hub_url": "org/d", "columns": None},
                "d4": {},
                "d5": 3,
                "d7": {
                    "hf_hub_url": "org/d",
                    "formatting": "sharegpt",
                    "columns": {"prompt": "content", "response": "said", "kto_tag": "good", "history": "before"},
                },
            }
        )
    )
    (tmp_path / "data" / "d1.json").write_text("[]")
    (tmp_path / "ours.json").write_text('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}')
    monkeypatch.chdir(tmp_path)


DEEPSPEED: tuple[tuple[str, str | None, str | None], ...] = (
    ("deepspeed_configs/zero3_bf16.json", "zero3", None),
    ("ds/zero3_v2.json", "zero3", None),
    ("deepspeed_configs/zero3_bf16_cpuoffload_all.json", "zero3", "all"),
    ("deepspeed_configs/zero3_bf16_cpuoffload_params.json", "zero3", "all"),
    ("ds_z3_offload_config.json", "zero3", "all"),
    ("examples/deepspeed/ds_z2_offload_config.json", "zero2", "optimizer"),
    ("zero2_offload", "zero2", "optimizer"),
    ("zero3_offload", "zero3", "all"),
    ("stage2.json", "zero2", None),
    ("zero0", "zero0", None),
    ("ds_offload.json", None, None),
    ("ours.json", "zero1", "optimizer"),
    ('{"zero_optimization": {"stage": 3}, "train_batch_size": 10}', "zero3", None),
    ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "zero3", "all"),
    ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "zero2", "optimizer"),
    ("{}", "zero0", None),
)


@pytest.mark.parametrize(("config", "engine", "offload"), DEEPSPEED)
@pytest.mark.parametrize("base", [TRL, AXOLOTL, FACTORY, SWIFT])
def test_a_deepspeed_configuration_is_one_engine_for_every_trainer(
    base: str, config: str, engine: str | None, offload: str | None
) -> None:
    text = f"{base} --deepspeed '{config}'" if base == SWIFT else f"{base}deepspeed: '{config}'\n"
    conv = conversion(text, "dpo" if base == TRL else None, 8)
    assert (values(conv).get("engine"), values(conv).get("engine.offload")) == (engine, offload)
    assert ("deepspeed" in named(conv, OTHER)) == (engine is None or "nvme" in config)


# A file's text, its trainer (of TRL), and what comes of it: our keys, and arguments that are told to be something else.
CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[Fate, set[str]]]] = {
    "ppo temperature": (PPO + "temperature: 0.9\n", "ppo", {"rollout.temperature": 0.9}, {}),
    "ppo default temperature": (PPO, "ppo", {"rollout.temperature": 0.7}, {OTHER: {"model_name_or_path"}}),
    "ppo policy": (PPO + "sft_model_path: org/sft\n", None, {"model.path": "org/sft", "reward.path": "org/r"},
                   {OTHER: {"model_name_or_path"}}),
    "axolotl beta of trl": (AXOLOTL + "rl_beta: 0.2\ntrl: {beta: 0.3, num_generations: 4}\n", None, {"loss.beta": 0.3},
                            {ABSENT: {"trl: num_generations"}}),
    "axolotl defaults": (AXOLOTL, None, {"checkpoint.keep_last": 4, "checkpoint.save_every": "1 epoch",
                                         "optim.warmup_ratio": 0.03, "optim.warmup_steps": None}, {}),
    "axolotl no warm-up": (AXOLOTL + "warmup_steps: 0\n", None,
                           {"optim.warmup_ratio": None, "optim.warmup_steps": None}, {}),
    "axolotl shares of an epoch": (AXOLOTL + "evals_per_epoch: 4\nsaves_per_epoch: 1\nval_set_size: 0.1\n", None,
                                   {"train.eval_every": "1/4 epoch", "checkpoint.save_every": "1 epoch",
                                    "data.eval_size": 0.1}, {}),
    "axolotl least rate": (AXOLOTL + "cosine_min_lr_ratio: 0.2\n", None,
                           {"optim.decay": "cosine", "optim.min_lr_ratio": 0.2}, {}),
    "by epochs": (TRL + "save_strategy: epoch\neval_strategy: epoch\n", "dpo",
                  {"checkpoint.save_every": "1 epoch", "train.eval_every": "1 epoch"}, {}),
    "shares of a run": (TRL + "save_steps: 0.1\neval_strategy: steps\neval_steps: 0.25\nnum_train_epochs: 2\n", "dpo",
                        {"checkpoint.save_every": "0.2 epoch", "train.eval_every": "0.5 epoch"}, {}),
    "least share of the rate": (TRL + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
                                "dpo", {"optim.decay": "cosine", "optim.min_lr_ratio": 0.1}, {}),
    "least rate": (TRL + "lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 2e-6\nlr_scheduler_kwargs: "
                   "{min_lr: 5e-7}\n", "dpo", {"optim.decay": "cosine", "optim.min_lr_ratio": 0.25}, {}),
    "inverse square root": (TRL + "lr_scheduler_type: inverse_sqrt\n", "dpo", {"optim.decay": "inverse_sqrt"}, {}),
    "another decay": (TRL + "lr_scheduler_type: reduce_lr_on_plateau\n", "dpo", {"optim.decay": None},
                      {INSTEAD: {"lr_scheduler_type"}}),
    "llamafactory rows": (FACTORY + "max_samples: 1000\nval_size: 0.1\neval_strategy: steps\neval_steps: 500\n",
                          None, {"data.max_samples": 1000, "data.eval_size": 0.1, "train.eval_every": 500}, {}),
    "axolotl warm-up": (AXOLOTL + "max_steps: 1000\n", None, {"optim.warmup_steps": 30}, {}),
    "axolotl long warm-up": (AXOLOTL + "max_steps: 100000\n", None, {"optim.warmup_steps": 100}, {}),
    "axolotl short warm-up": (AXOLOTL + "max_steps: 60\n", None, {"optim.warmup_steps": 2}, {}),
    "axolotl held-out rows": (AXOLOTL + "val_set_size: 200\neval_steps: 50\n", None,
                              {"data.eval_size": 200, "train.eval_every": 50}, {}),
    "axolotl held-out share": (AXOLOTL + "val_set_size: 0.05\neval_steps: 50\n", None,
                               {"train.eval_every": 50, "data.eval_size": 0.05}, {}),
    "axolotl fsdp": (AXOLOTL + "fsdp_config: {offload_params: true, activation_checkpointing: true}\n", None,
                     {"engine": "fsdp2", "memory.checkpointing": True}, {ABSENT: {"fsdp_config: offload_params"}}),
    "fsdp": (TRL + "fsdp: full_shard\nfsdp_config: {activation_checkpointing: true, cpu_offload: true}\n"
             "gradient_checkpointing: false\n", "dpo", {"engine": "fsdp2", "memory.checkpointing": True},
             {ABSENT: {"fsdp_config: cpu_offload"}}),
    "accelerate offload": (TRL + "zero_stage: 3\noffload_optimizer_device: cpu\noffload_param_device: cpu\n", "dpo",
                           {"engine": "zero3", "engine.offload": "all"}, {}),
    "openrlhf once an epoch": (OPENRLHF + "--eval_dataset org/e --eval_steps -1", None,
                               {"train.eval_every": None, "data.eval_path": "org/e"}, {OTHER: {"eval_steps"}}),
    "openrlhf by default": (OPENRLHF + "--eval_dataset org/e", None, {"train.eval_every": None},
                            {OTHER: {"eval_steps"}}),
    "openrlhf rate": (OPENRLHF, None, {"optim.decay": "cosine", "optim.min_lr_ratio": 0.1, "optim.warmup_ratio": 0.03,
                                       "optim.warmup_start": 0}, {}),
    "swift share": (SWIFT + "--split_dataset_ratio 0.01 --eval_steps 100", None,
                    {"train.eval_every": 100, "data.eval_size": 0.01}, {}),
    "swift float32": (SWIFT + "--torch_dtype float32", None, {"train.precision": "fp32"}, {}),
    "swift float16": (SWIFT + "--torch_dtype float16", None, {"train.precision": "bf16"}, {ABSENT: {"torch_dtype"}}),
    "two rewards of one name": (
        TRL + "reward_funcs: [m1.score, m2.score]\nreward_weights: [1.0, 0.5]\n", "grpo",
        {"reward.terms.score.function": "m1:score", "reward.terms.m2_score.function": "m2:score",
         "reward.terms.score.weight": 1.0, "reward.terms.m2_score.weight": 0.5}, {}),
    "a function called model": (
        TRL + "reward_funcs: [a.model]\nreward_model_name_or_path: org/r\n", "grpo",
        {"reward.terms.model.function": "a:model", "reward.terms.model2.path": "org/r"}, {}),
    "no limit of length": (TRL + "max_length: null\n", "dpo", {"data.max_length": None, "data.too_long": "error"},
                           {OTHER: {"max_length"}}),
    "steps as a float": (TRL + "max_steps: 1e3\n", "dpo", {"train.max_steps": 1000, "train.epochs": None}, {}),
    "all checkpoints": (TRL + "save_total_limit: 0\n", "dpo", {"checkpoint.keep_last": 1_000_000}, {}),
    "no held-out rows": (TRL + "datasets: [{path: a/b}, {path: c/d}]\neval_strategy: steps\n", "dpo",
                         {"train.eval_every": None}, {OTHER: {"eval_strategy"}}),
    "smoothing": (TRL + "label_smoothing: 0.1\n", "dpo", {"loss.label_smoothing": 0.0}, {OTHER: {"label_smoothing"}}),
    "smoothing that counts": (TRL + "loss_type: robust\nlabel_smoothing: 0.2\n", "dpo",
                              {"loss": "robust", "loss.label_smoothing": 0.2, "loss.sft_weight": 0.0}, {}),
    "no smoothing of robust": (TRL + "loss_type: robust\n", "dpo", {"loss.label_smoothing": 0.0}, {}),
    "no smoothing of exo": (TRL + "loss_type: exo_pair\nlabel_smoothing: 0\n", "dpo",
                            {"loss": "exo_pair", "loss.label_smoothing": None}, {OTHER: {"label_smoothing"}}),
    "ipo": (TRL + "loss_type: [ipo]\nlabel_smoothing: 0.1\n", "dpo", {"loss": "ipo", "loss.normalize": "token"},
            {OTHER: {"label_smoothing"}}),
    "aot of pairs, as it was called": (TRL + "loss_type: aot_pair\nld_alpha: 1.0\n", "dpo", {"loss": "aot_unpaired"},
                                       {NEEDLESS: {"ld_alpha"}}),
    "bco": (TRL + "loss_type: bco_pair\n", "dpo", {"loss": "bco_pair", "loss.shift": "none"}, {}),
    "tau": (TRL + "loss_type: discopop\ndiscopop_tau: 0.1\n", "dpo", {"loss.tau": 0.1}, {}),
    "tau of another": (TRL + "discopop_tau: 0.1\n", "dpo", {"loss.tau": None}, {NEEDLESS: {"discopop_tau"}}),
    "mpo": (TRL + "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\nlabel_smoothing: 0.1\n", "dpo",
            {"loss": "mpo", "loss.sft_weight": 1.0, "loss.terms": [
                {"loss": "dpo", "weight": 0.8, "label_smoothing": 0.0},
                {"loss": "bco_pair", "weight": 0.2, "shift": "none"}]}, {OTHER: {"label_smoothing"}}),
    "a weight of one loss": (TRL + "loss_type: ipo\nloss_weights: [2.0]\n", "dpo", {"loss": "mpo", "loss.terms": [
        {"loss": "ipo", "weight": 2.0, "beta": 0.1, "normalize": "token"}]}, {}),
    "a sum of losses whose beta is their own": (
        TRL + "loss_type: [sigmoid_norm, sigmoid]\nbeta: 3.0\n", "dpo", {"loss.beta": 3.0, "loss.terms": [
            {"loss": "dpo_norm", "weight": 1.0, "beta": 3.0, "label_smoothing": 0.0},
            {"loss": "dpo", "weight": 1.0, "label_smoothing": 0.0}]}, {}),
    "a loss that weighs nothing": (TRL + "loss_type: [sigmoid, hinge, sft]\nloss_weights: [0, 1, 0]\n", "dpo",
                                   {"loss": "hinge", "loss.terms": None, "loss.sft_weight": 0.0}, {}),
    "a loss twice": (TRL + "loss_type: [hinge, hinge]\nloss_weights: [1, 2]\n", "dpo",
                     {"loss.terms": [{"loss": "hinge", "weight": 3.0}]}, {}),
    "one loss and likelihood": (TRL + "loss_type: [apo_zero, sft]\n", "dpo",
                                {"loss": "apo_zero", "loss.sft_weight": 1.0}, {}),
    "rpo": (TRL + "rpo_alpha: 0.5\n", "dpo", {"loss": "dpo", "loss.sft_weight": 0.5}, {}),
    "a loss that nobody knows": (TRL + "loss_type: [kto_pair, hinge]\n", "dpo", {"loss": "hinge"},
                                 {INSTEAD: {"loss_type"}}),
    "wpo": (TRL + "use_weighting: true\n", "dpo", {"loss.wpo": True}, {}),
    "wpo and likelihood": (TRL + "use_weighting: true\nrpo_alpha: 1.0\n", "dpo",
                           {"loss.wpo": True, "loss.sft_weight": 1.0}, {OTHER: {"use_weighting"}}),
    "wpo of aot": (TRL + "loss_type: aot\nuse_weighting: true\n", "dpo", {"loss.wpo": None},
                   {ABSENT: {"use_weighting"}}),
    "lengths": (TRL + "ld_alpha: 0.5\n", "dpo", {"loss.ld_alpha": 0.5}, {}),
    "lengths of ipo": (TRL + "loss_type: ipo\nld_alpha: 0.5\n", "dpo", {"loss.ld_alpha": None}, {ABSENT: {"ld_alpha"}}),
    "lengths and likelihood": (TRL + "ld_alpha: 0.5\nrpo_alpha: 1.0\n", "dpo", {"loss.ld_alpha": None},
                               {ABSENT: {"ld_alpha"}}),
    "cpo": (TRL + "cpo_alpha: 0.5\nlabel_smoothing: 0.1\nbeta: 0.2\n", None,
            {"loss": "cpo", "loss.sft_weight": 0.5, "loss.label_smoothing": 0.1, "loss.beta": 0.2}, {}),
    "cpo of hinge": (TRL + "loss_type: hinge\n", "cpo", {"loss": "cpo"}, {INSTEAD: {"loss_type"}}),
    "simpo": (TRL + "loss_type: simpo\nsimpo_gamma: 1.6\nbeta: 2.5\ncpo_alpha: 0\n", None,
              {"loss": "simpo", "loss.gamma": 1.6, "loss.beta": 2.5, "loss.sft_weight": 0.0}, {}),
    "orpo": (TRL + "beta: 0.2\nmax_length: 512\n", "orpo",
             {"loss": "orpo", "loss.beta": 0.2, "loss.sft_weight": 1.0, "data.max_length": 512}, {}),
    "openrlhf ipo": (OPENRLHF + "--ipo --nll_loss_coef 0.2 --label_smoothing 0.1", None,
                     {"loss": "ipo", "loss.normalize": "sequence", "loss.sft_weight": 0.2},
                     {NEEDLESS: {"label_smoothing"}}),
    "openrlhf sft of conversations": (
        OPENRLHF.replace("_dpo", "_sft") + "--input_key talk --apply_chat_template --pretrain_mode", None,
        {"loss": "sft", "data.columns.messages": "talk", "data.max_length": 2048, "train.epochs": 2},
        {OTHER: {"multiturn", "pretrain_mode"}}),
    "openrlhf sft of every turn": (
        OPENRLHF.replace("_dpo", "_sft") + "--input_key messages --apply_chat_template --multiturn", None,
        {"data.columns.messages": None}, {NEEDLESS: {"multiturn", "input_key"}}),
    "openrlhf texts": (OPENRLHF.replace("_dpo", "_sft") + "--input_key content --pretrain_mode", None,
                       {"data.columns.text": "content", "data.template": "never"}, {NEEDLESS: {"pretrain_mode"}}),
    "openrlhf kto": (
        OPENRLHF.replace("_dpo", "_kto") + "--undesirable_loss_weight 1.5 --output_key said --label_key good", None,
        {"loss": "kto", "loss.beta": 0.01, "loss.undesirable_weight": 1.5, "data.columns.prompt": "input",
         "data.columns.completion": "said", "data.columns.label": "good", "optim.lr": 1e-5}, {}),
    "openrlhf reward model": (OPENRLHF.replace("_dpo", "_rm") + "--loss logexp --value_head_prefix v_head", None,
                              {"loss": "reward", "loss.margin_weight": 0.0, "train.micro_batch_size": 1},
                              {INSTEAD: {"loss"}, ABSENT: {"value_head_prefix"}}),
    "openrlhf smoothing": (OPENRLHF + "--label_smoothing 0.1", None, {"loss": "dpo", "loss.label_smoothing": 0.1}, {}),
    "swift smoothing": (SWIFT + "--label_smoothing 0.1", None, {"loss": "dpo", "loss.label_smoothing": 0.1}, {}),
    "swift list": (SWIFT + "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1", None,
                   {"loss": "mpo", "loss.sft_weight": 1.0}, {}),
    "swift simpo": (SWIFT.replace("type dpo", "type simpo"), None,
                    {"loss": "simpo", "loss.gamma": 1.0, "loss.beta": 2.0, "loss.sft_weight": 1.0}, {}),
    "swift sft": (SWIFT.replace("rlhf --rlhf_type dpo", "sft") + "--packing true --loss_scale default", None,
                  {"loss": "sft", "data.packing": True, "optim.lr": 1e-5, "loss.beta": None},
                  {OTHER: {"packing"}, NEEDLESS: {"loss_scale"}}),
    "swift texts": (SWIFT.replace("rlhf --rlhf_type dpo", "pt"), None, {"loss": "sft"}, {OTHER: {"dataset"}}),
    "swift kto": (SWIFT.replace("type dpo", "type kto") + "--desirable_weight 2 --ref_model org/r", None,
                  {"loss": "kto", "loss.beta": 0.1, "loss.desirable_weight": 2.0, "reference.path": "org/r"}, {}),
    "swift reward model": (SWIFT.replace("type dpo", "type rm") + "--center_rewards_coefficient 0.01", None,
                           {"loss": "reward", "loss.center": 0.01, "loss.beta": None}, {}),
    "swift cpo": (SWIFT.replace("type dpo", "type cpo") + "--cpo_alpha 0.5", None,
                  {"loss": "cpo", "loss.beta": 0.1, "loss.sft_weight": 0.5}, {}),
    "swift orpo": (SWIFT.replace("type dpo", "type orpo") + "--beta 0.3", None,
                   {"loss": "orpo", "loss.beta": 0.3, "loss.sft_weight": 1.0}, {}),
    "axolotl ipo": (AXOLOTL.replace("rl: dpo", "rl: ipo") + "rl_beta: 0.2\ndpo_label_smoothing: 0.1\n", None,
                    {"loss": "ipo", "loss.beta": 0.2, "loss.normalize": "token"}, {OTHER: {"dpo_label_smoothing"}}),
    "axolotl orpo": (AXOLOTL.replace("rl: dpo", "rl: orpo") + "orpo_alpha: 0.3\n", None,
                     {"loss": "orpo", "loss.beta": 0.3, "loss.sft_weight": 1.0}, {}),
    "axolotl orpo by rl_beta": (AXOLOTL.replace("rl: dpo", "rl: orpo") + "orpo_alpha: 0.3\nrl_beta: 0.2\n", None,
                                {"loss.beta": 0.2}, {NEEDLESS: {"orpo_alpha"}}),
    "axolotl simpo": (AXOLOTL.replace("dpo", "simpo", 1) + "rl_beta: 2.0\ncpo_alpha: 0.1\nsimpo_gamma: 0.8\n", None,
                      {"loss": "simpo", "loss.gamma": 0.8, "loss.sft_weight": 0.1, "loss.beta": 2.0}, {}),
    "axolotl sft": (
        AXOLOTL.replace("rl: dpo\n", "") + "sample_packing: true\ntrain_on_inputs: true\nrl_beta: 0.1\n", None,
        {"loss": "sft", "loss.beta": None, "data.packing": True},
        {OTHER: {"sample_packing", "train_on_inputs"}, NEEDLESS: {"rl_beta"}}),
    "axolotl texts": (
        AXOLOTL.replace("rl: dpo\n", "").replace("chat_template.default", "completion, field: story"), None,
        {"loss": "sft", "data.columns.text": "story"}, {}),
    "axolotl rows of one's own": (
        AXOLOTL.replace("rl: dpo\n", "").replace("chat_template.default", "{field_instruction: q, field_output: a}, "
                                                 "roles_to_train: [user]"), None,
        {"data.columns.prompt": "q", "data.columns.completion": "a"},
        {OTHER: {"datasets: type", "datasets: roles_to_train"}}),
    "axolotl kto": (AXOLOTL.replace("dpo", "kto", 1) + "rl_beta: 0.2\nkto_undesirable_weight: 0.2\n", None,
                    {"loss": "kto", "loss.beta": 0.2, "loss.undesirable_weight": 0.2, "loss.desirable_weight": 1.0},
                    {}),
    "axolotl hinge": (AXOLOTL + "dpo_loss_type: [hinge]\ndpo_use_weighting: true\n", None,
                      {"loss": "hinge", "loss.wpo": True}, {}),
    "factory orpo": (FACTORY + "pref_loss: orpo\npref_beta: 0.2\npref_ftx: 0.5\n", None,
                     {"loss": "orpo", "loss.beta": 0.2, "loss.sft_weight": 1.5}, {}),
    "factory simpo": (FACTORY + "pref_loss: simpo\n", None,
                      {"loss": "simpo", "loss.beta": 0.1, "loss.gamma": 0.5, "loss.sft_weight": 0.0}, {}),
    "factory mixed": (FACTORY + "pref_bco_weight: 0.25\npref_ftx: 0.1\ndpo_label_smoothing: 0.1\n", None,
                      {"loss": "mpo", "loss.sft_weight": 0.1, "loss.terms": [
                          {"loss": "dpo", "weight": 0.8, "label_smoothing": 0.1},
                          {"loss": "bco_pair", "weight": 0.2, "shift": "mean"}]}, {}),
    "factory simpo and what it has not": (
        FACTORY + "pref_loss: simpo\nref_model: org/r\nld_alpha: 0.5\ndpo_label_smoothing: 0.1\n", None,
        {"loss": "simpo", "reference.path": None, "loss.ld_alpha": None},
        {NEEDLESS: {"ref_model", "dpo_label_smoothing"}, ABSENT: {"ld_alpha"}}),
    "factory reference": (FACTORY + "ref_model: org/r\n", None, {"loss": "dpo", "reference.path": "org/r"}, {}),
    "swift orpo without a reference": (SWIFT.replace("type dpo", "type orpo") + "--ref_model org/r", None,
                                       {"loss": "orpo", "reference.path": None}, {NEEDLESS: {"ref_model"}}),
    "factory sft": (FACTORY.replace("stage: dpo", "stage: sft") + "pref_beta: 0.2\nref_model: org/r\npacking: true\n"
                    "train_on_prompt: true\nmask_history: false\ndisable_shuffling: true\nuse_dft_loss: true\n", None,
                    {"loss": "sft", "loss.beta": None, "reference.path": None, "data.shuffle": False},
                    {NEEDLESS: {"pref_beta", "ref_model", "mask_history"}, OTHER: {"packing", "train_on_prompt"},
                     INSTEAD: {"use_dft_loss"}}),
    "factory texts": (FACTORY.replace("stage: dpo", "stage: pt").replace("d1", "d7"), None,
                      {"loss": "sft", "data.columns.text": "content"}, {OTHER: {"packing"}}),
    "factory kto": (FACTORY.replace("stage: dpo", "stage: kto").replace("d1", "d7") + "kto_chosen_weight: 2.0\n"
                    "pref_ftx: 0.1\nref_model: org/r\ntrain_on_prompt: true\n", None,
                    {"loss": "kto", "loss.desirable_weight": 2.0, "loss.beta": 0.1, "reference.path": "org/r",
                     "data.columns.label": "good", "data.columns.completion": "said"},
                    {ABSENT: {"pref_ftx"}, NEEDLESS: {"train_on_prompt"},
                     OTHER: {"dataset: formatting", "dataset: history"}}),
    "factory reward model": (FACTORY.replace("stage: dpo", "stage: rm") + "packing: true\n", None,
                             {"loss": "reward", "loss.margin_weight": 0.0, "loss.beta": None}, {NEEDLESS: {"packing"}}),
    "factory ipo": (FACTORY + "pref_loss: ipo\n", None, {"loss": "ipo", "loss.normalize": "token"}, {}),
    "chosen answers alone": (TRL + "loss_type: sft\nbeta: 0.3\nld_alpha: 0.5\n", "dpo",
                             {"loss": "sft", "loss.beta": None, "loss.sft_weight": None},
                             {NEEDLESS: {"beta", "ld_alpha"}}),
    "chosen answers alone, by weights": (
        TRL + "loss_type: [sigmoid, sft]\nloss_weights: [0, 2]\n", "dpo", {"loss": "sft"}, {OTHER: {"loss_weights"}}),
    "axolotl chosen answers": (AXOLOTL + "dpo_loss_type: [sft]\nrl_beta: 0.2\n", None,
                               {"loss": "sft", "loss.beta": None}, {NEEDLESS: {"rl_beta"}}),
    "swift chosen answers": (SWIFT + "--loss_type sft --beta 0.2 --ref_model org/r", None,
                             {"loss": "sft", "loss.beta": None, "reference.path": None}, {NEEDLESS: {"ref_model"}}),
    "sft defaults": (TRL, "sft", {"loss": "sft", "optim.lr": 2e-5, "data.too_long": "truncate", "data.shuffle": None},
                     {}),
    "sft of answers": (TRL + "assistant_only_loss: true\ncompletion_only_loss: true\n", None, {"loss": "sft"},
                       {NEEDLESS: {"assistant_only_loss", "completion_only_loss"}}),
    "sft of all tokens": (TRL + "assistant_only_loss: false\ncompletion_only_loss: false\n", None, {"loss": "sft"},
                          {OTHER: {"assistant_only_loss", "completion_only_loss"}}),
    "sft of texts": (TRL + "dataset_text_field: story\n", None, {"data.columns.text": "story"}, {}),
    "sft of texts of two sets": (
        TRL + "datasets: [{path: a/b}, {path: c/d}]\ndataset_text_field: story\n", None,
        {"data.sources.source1.columns.text": "story", "data.sources.source2.columns.text": "story"}, {}),
    "sft in blocks": (TRL + "packing: true\npacking_strategy: wrapped\n", None, {"loss": "sft"},
                      {OTHER: {"packing"}, ABSENT: {"packing_strategy"}}),
    "sft without blocks": (TRL + "packing: false\npacking_strategy: wrapped\neval_packing: false\n", None,
                           {"data.packing": None}, {NEEDLESS: {"packing", "packing_strategy", "eval_packing"}}),
    "sft by dft": (TRL + "loss_type: dft\n", None, {"loss": "sft"}, {INSTEAD: {"loss_type"}}),
    "sft in order": (TRL + "train_sampling_strategy: sequential\n", "sft", {"data.shuffle": False}, {}),
    "sft by length": (TRL + "train_sampling_strategy: group_by_length\n", "sft", {"data.shuffle": None},
                      {ABSENT: {"train_sampling_strategy"}}),
    "a template of a tokenizer": (TRL + "chat_template_path: org/m2\n", "sft", {"model.chat_template": None},
                                  {OTHER: {"chat_template_path"}}),
    "kto defaults": (TRL, "kto", {"loss": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0, "optim.lr": 1e-6,
                                  "data.shuffle": False}, {}),
    "kto of older TRL": (TRL + "undesirable_weight: 1.5\nmax_prompt_length: 512\nmax_completion_length: 512\n"
                         "truncation_mode: keep_end\nprecompute_ref_log_probs: true\n", None,
                         {"loss": "kto", "loss.undesirable_weight": 1.5},
                         {OTHER: {"max_prompt_length"}, NEEDLESS: {"precompute_ref_log_probs"}}),
    "apo_zero_unpaired": (TRL + "loss_type: apo_zero_unpaired\nbeta: 0.2\n", None,
                          {"loss": "apo_zero_unpaired", "loss.beta": 0.2}, {}),
    "a loss on single answers that nobody knows": (TRL + "loss_type: bco\ndesirable_weight: 1.0\n", None,
                                                   {"loss": "kto"}, {INSTEAD: {"loss_type"}}),
    "bco of single answers": (TRL + "prompt_sample_size: 512\n", None,
                              {"loss": "bco", "loss.shift": "mean", "data.shuffle": None, "optim.lr": 5e-5},
                              {NEEDLESS: {"prompt_sample_size"}}),
    "reward defaults": (TRL, "reward", {"loss": "reward", "loss.center": 0.0, "optim.lr": 1e-4,
                                        "data.too_long": "drop"}, {}),
    "reward without a limit": (TRL + "max_length: null\n", "reward", {"data.too_long": "error"},
                               {OTHER: {"max_length"}}),
    "evaluated at the start": (TRL + "eval_strategy: steps\neval_on_start: true\n", "dpo",
                               {"eval.before_training": True}, {}),
    "nothing to evaluate at the start": (TRL + "eval_on_start: true\n", "dpo", {"eval.before_training": None},
                                         {NEEDLESS: {"eval_on_start"}}),
    "a share to evaluate at the start": (AXOLOTL + "val_set_size: 0.1\neval_on_start: true\n", None,
                                         {"eval.before_training": True, "data.eval_size": 0.1}, {}),
    "scale of a batch": (GRPO + "scale_rewards: batch\n", "grpo", {"loss": "dr_grpo"}, {INSTEAD: {"scale_rewards"}}),
    "vllm by default": (GRPO + "use_vllm: true\n", "grpo", {"rollout.importance_cap": None},
                        {ABSENT: {"vllm_importance_sampling_mode"}}),
    "vllm by token": (GRPO + "use_vllm: true\nvllm_importance_sampling_mode: token_truncate\n", "grpo",
                      {"rollout.importance_cap": 3.0}, {}),
    "context parallelism": (TRL + "parallelism_config_cp_size: 2\n", "dpo",
                            {"train.batch_size": 32, "parallel.ring_size": 2}, {}),
    "openrlhf lengths": (RAY + "--max_len 4096 --prompt_max_len 1024 --generate_max_len 512", None,
                         {"data.max_length": 1536, "rollout.max_new_tokens": 512}, {NEEDLESS: {"max_len"}}),
    "openrlhf gae": (RAY, None, {"loss": "ppo", "loss.value_coef": 1.0}, {}),
    "openrlhf discount": (RAY + "--advantage_estimator reinforce --gamma 0.99", None, {"loss": "reinforce_pp"},
                          {ABSENT: {"gamma"}}),
    "openrlhf sleep": (RAY + "--vllm_enable_sleep", None, {"rollout.vllm_sleep": True}, {}),
    "openrlhf weights": (RAY + "--enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 4.0", None,
                         {"rollout.importance_cap": 4.0}, {ABSENT: {"vllm_is_truncated_threshold"}}),
    "openrlhf icepop": (RAY + "--enable_vllm_is_correction --vllm_is_correction_type icepop", None,
                        {"rollout.importance_cap": None}, {ABSENT: {"vllm_is_correction_type"}}),
    "template as a text": (OPENRLHF + "--tokenizer_chat_template '{% for m in messages %}{{ m }}'", None,
                           {"model.chat_template": None}, {OTHER: {"tokenizer_chat_template"}}),
    "rows of a file": (SWIFT + "--dataset /d/x.jsonl#500", None,
                       {"data.path": "/d/x.jsonl", "data.max_samples": 500}, {}),
    "weights in bfloat16": (FACTORY + "pure_bf16: true\n", None, {"train.precision": "bf16"}, {ABSENT: {"pure_bf16"}}),
    "null columns": (FACTORY.replace("d1", "d3"), None, {"data.path": "org/d"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_an_argument_means(case: str) -> None:
    text, trainer, wanted, told = CASES[case]
    conv = conversion(text, trainer, 8)
    assert {key: values(conv).get(key) for key in wanted} == wanted
    for fate, names in told.items():
        assert names <= named(conv, fate), (fate, named(conv, fate))


@pytest.mark.parametrize("shared", SHARED)
def test_an_argument_of_several_trainers_tells_no_trainer(shared: str) -> None:
    with pytest.raises(ConvertError, match=r"does not say which trainer it is for. Say --trainer dpo"):
        conversion(TRL + shared, None, 8)


def test_a_telltale_argument_belongs_to_one_trainer() -> None:
    """By our own rules, for the trainers that we have."""
    rules = {name: {rule.trainers for rule in RULES if name in rule.names} for rule in RULES for name in rule.names}
    for trainer, words in TELLTALE.items():
        others = [rules.get(word, {(trainer,)}) - {(trainer,)} for word in words.split()]
        shared = dict(zip(words.split(), others, strict=True)) | {"rloo_k": set()}
        assert not any(shared.values()), shared


@pytest.mark.parametrize(
    ("loss", "trainer"),
    [
        (["sigmoid"], "dpo"),
        ("sigmoid", "dpo"),
        ("dapo", "grpo"),
        ("bnpo", "grpo"),
        (["a"], None),
        ("simpo", "cpo"),
        (["sigmoid", "sft"], "dpo"),
        (["sft"], "dpo"),
        ("apo_zero_unpaired", "kto"),
        ("nll", "sft"),
        (["dapo"], None),
        ([["sigmoid"]], None),
    ],
)
def test_a_loss_tells_its_trainer(loss: Any, trainer: str | None) -> None:
    assert trainer_of({"loss_type": loss}) == trainer


@pytest.mark.parametrize("case", [case for case, (_, _, wanted, _) in CASES.items() if wanted.get("loss") in OF_ROWS])
def test_a_loss_over_rows_composes(case: str) -> None:
    text, trainer, wanted, _ = CASES[case]
    conv = conversion(text, trainer, 8)
    assert composed(written(conv), "mine", overrides(conv)).loss.name == wanted["loss"]


@pytest.mark.parametrize(
    ("text", "trainer", "said"),
    [
        (TRL, "orpo", "ORPO: the likelihood in theirs counts the tokens of the prompt too"),
        (TRL + "loss_type: [sigmoid, sft]\n", "dpo", "a mean over the tokens of each micro-batch"),
        (FACTORY + "pref_ftx: 1.0\n", None, "a mean over each answer's tokens"),
        (OPENRLHF + "--nll_loss_coef 0.1", None, "a mean over each answer's tokens"),
        (TRL + "loss_type: sft\n", "dpo", "Supervised training: theirs is a mean over the tokens of each micro-batch"),
        (FACTORY.replace("stage: dpo", "stage: rm"), None, "Reward model: theirs is a value head beside"),
        (
            OPENRLHF.replace("_dpo", "_sft") + "--pretrain_mode",
            None,
            "theirs is a mean over the tokens of each micro-batch",
        ),
        (TRL, "sft", "theirs trains every token unless assistant_only_loss is true"),
        (TRL, "kto", "KTO: theirs estimates the divergence from each micro-batch's prompts"),
        (TRL, "kto", "rlexp does so with data.unpair=true"),
        (TRL, "bco", "BCO: theirs moves the mean reward with each micro-batch"),
        (TRL, "reward", "theirs reads the score at the token before the end"),
        (TRL, "reward", "loss.margin_weight=0 is a run without margins"),
    ],
)
def test_what_is_averaged_or_read_otherwise_is_told(text: str, trainer: str | None, said: str) -> None:
    assert said in " ".join(conversion(text, trainer, 8).notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss_type: [sigmoid, sft]\nloss_weights: [1.0]\n", "loss_weights=[1.0]: has 1 weights for 2 losses."),
        ("loss_weights: [-1.0]\n", "loss_weights=[-1.0]: must be a list of numbers of at least 0."),
        ("loss_weights: [0]\n", "loss_weights=[0]: all weights are 0. Give a loss a weight above 0."),
        ("label_smoothing: x\n", "label_smoothing=x: must be a number of at least 0."),
    ],
)
def test_a_wrong_sum_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConvertError, match=re.escape(said)):
        conversion(TRL + text, "dpo", 8)


@pytest.mark.parametrize("name", ["d4", "d5", "d6"])
def test_a_data_set_that_is_described_by_nothing_is_one_message(name: str) -> None:
    with pytest.raises(ConvertError, match=f"dataset={name}: "):
        conversion(FACTORY.replace("d1", name), None, 8)


def test_all_that_make_a_weight_are_named() -> None:
    """A supervised loss of a sum, and the weight of the chosen answers' likelihood, are one weight here."""
    conv = conversion(TRL + "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\nrpo_alpha: 1.0\n", "dpo")
    assert conv.values["loss.sft_weight"].value == pytest.approx(1.2)
    assert conv.values["loss.sft_weight"].origin == "loss_type, loss_weights, rpo_alpha"
    assert "rpo_alpha" not in named(conv, NEEDLESS)
