"""Arguments of other trainers on steps, rates, engines, GPUs and rows, templates and the defaults of a version."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import TrainingArguments, get_scheduler

from rlexp.config.chat_templates import NAMED
from rlexp.convert import model_keys
from rlexp.training.train.build import build_schedule
from tests.convert import tables
from tests.convert.tables import ABSENT, IMAGES, INSTEAD, NEEDLESS, OTHER, REMARK, Becomes, Table
from tests.convert.texts import AXOLOTL, COMMAND, FACTORY, GRPO, OPENRLHF, RAY, SWIFT, SWIFT_SFT, TRL, written
from tests.helpers.paths import ROOT
from tests.helpers.schedules import rates_of

pytestmark = pytest.mark.usefixtures("folder")
SWIFT_UNCOUNTED = SWIFT.removeprefix("NPROC_PER_NODE=4 ")
MODEL = "model_name_or_path: org/m\n"
TEXTS = ("0906_1200", "007", "2024_01_01", "1_000", "inf", "nan", "0x10", "1e3")  # though they look like numbers
ARGUMENTS: Table = {
    (TRL, "dpo"): {
        "save_strategy: epoch\neval_strategy: epoch\nsave_total_limit: 0\nreport_to: [none]\noutput_dir: ''\n"
            "optim: lion_32bit\nlr_scheduler_type: reduce_lr_on_plateau": {"checkpoint.save_every": "1 epoch",
            "train.eval_every": "1 epoch", "checkpoint.keep_last": 1_000_000, "logger": "none", "hydra.run.dir": None,
            "optim": None, "optim.decay": None, INSTEAD: "optim, lr_scheduler_type"},
        "save_steps: 0.1\neval_strategy: steps\neval_steps: 0.25\nnum_train_epochs: 2\neval_on_start: true\n"
            "optim: paged_adamw_8bit\nlr_scheduler_type: cosine_with_min_lr\nlearning_rate: 2e-6\n"
            "lr_scheduler_kwargs: {min_lr: 5e-7}": {"checkpoint.save_every": "0.2 epoch",
            "train.eval_every": "0.5 epoch", "eval.before_training": True, "optim.decay": "cosine",
            "optim.min_lr_ratio": 0.25, ABSENT: "optim"},
        "save_steps: 0.2\nmax_steps: 1e3\nwarmup_ratio: 0.1\nmetric_for_best_model: loss\n"
            "eval_on_start: true\noptim: galore_adamw": {"train.max_steps": 1000, "train.epochs": None,
            "checkpoint.save_every": "200", "optim.warmup_ratio": 0.1, "checkpoint.keep_best": None,
            "checkpoint.best_metric": None, "eval.before_training": None,
            NEEDLESS: "metric_for_best_model, eval_on_start", INSTEAD: "optim"},
        "num_train_epochs: 0.5\ndatasets: [{path: a/b}, {path: c/d}]\neval_strategy: steps\n"
            "fsdp: full_shard\nfsdp_config: {activation_checkpointing: true, cpu_offload: true}\n"
            "gradient_checkpointing: false\nmax_length: null": {"train.epochs": 1, "train.eval_every": None,
            "engine": "fsdp2", "memory.checkpointing": True, "data.max_length": None, "data.too_long": "error",
            OTHER: "num_train_epochs, eval_strategy, max_length", ABSENT: "fsdp_config: cpu_offload",
            REMARK: "only whole epochs are counted here, and 1 is taken"},
        "lr_scheduler_type: cosine_with_restarts\nmax_completion_length: 9\nlabel_smoothing: 0.1\nlabel_smoothing: 0":
            {"optim.decay": "cosine", "loss.label_smoothing": 0.0, OTHER: "max_completion_length",
            NEEDLESS: "label_smoothing"},
        "lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\ntrust_remote_code: true": {
            "model.trust_remote_code": None, INSTEAD: "lr_scheduler_kwargs", OTHER: "trust_remote_code"},
        "zero_stage: 3\noffload_optimizer_device: cpu\noffload_param_device: cpu\nparallelism_config_cp_size: 2":
            {"engine": "zero3", "engine.offload": "all", "train.batch_size": 32, "parallel.ring_size": 2}},
    (TRL + "env: {WANDB_PROJECT: zz}\n", "dpo"): {f"run_name: {name}": {"logger.run_name": name, "logger.project": "zz"}
        for name in ("my trl dpo run", "swift rlhf baseline", "openrlhf.cli.train_dpo")},
    (TRL, "sft"): {
        "train_sampling_strategy: sequential\nmax_seq_length: 77": {"data.shuffle": False, "data.max_length": 77},
        "train_sampling_strategy: group_by_length\nchat_template_path: org/m2": {"data.shuffle": None,
            "model.chat_template": None, OTHER: "chat_template_path", ABSENT: "train_sampling_strategy"}},
    TRL: {  # the arguments tell that it is sft
        "dataset_text_field: story\npacking: true\npacking_strategy: wrapped": {"data.columns.text": "story",
            "loss": "sft", OTHER: "packing", ABSENT: "packing_strategy"},
        "datasets: [{path: a/b}, {path: c/d}]\ndataset_text_field: story\npacking: false\n"
            "packing_strategy: wrapped\neval_packing: false": {"data.sources.source1.columns.text": "story",
            "data.packing": None, "data.sources.source2.columns.text": "story",
            NEEDLESS: "packing, packing_strategy, eval_packing"}},
    (MODEL + "dataset_mixer: {org/a: 1}\n", "sft"): {
        "": {OTHER: "packing"},
        "scale_rewards: true": {REMARK: "Trainer: --trainer says sft, and the file has arguments of grpo alone."}},
    (MODEL, "sft"): {"dataset_mixture:\n  datasets:\n  - {id: org/a, config: SFT, split: one, weight: 0.5}\n"
        "  - {id: org/b, weight: 0.5, columns: [messages]}\n  test_split_size: 100": {"data.path": None,
        "data.sources.source1.path": "org/a", "data.sources.source1.subset": "SFT", "data.eval_size": 100,
        "data.sources.source1.split": "one[:50%]", "data.sources.source2.split": "train[:50%]",
        OTHER: "dataset_mixture: weight"}},
    (MODEL, "dpo"): {
        "dataset_mixer: {org/a: 1.0}\ndataset_splits: [train_p, test_p]\neval_strategy: steps": {"data.path": "org/a",
            "data.split": "train_p", "data.eval_split": "test_p", "train.eval_every": 10},
        "dataset_mixer: {org/a: 1}\nevaluation_strategy: steps": {"data.split": "train", "data.eval_split": "test",
            OTHER: "auto_insert_empty_system_msg"},
        "dataset_mixer: {org/a: 1, org/b: 0.25}\ndataset_splits: [t]": {"data.sources.source1.split": "t",
            "data.sources.source2.split": "t[:25%]"}},
    (GRPO, "grpo"): {
        "max_prompt_length: 256\nsystem_prompt: be kind\ndataset_prompt_column: problem\nwandb_project: p\n"
            "chat_template: '{{ x }}'": {"data.too_long": "truncate", "data.system": "be kind", "logger.project": "p",
            "data.columns.prompt": "problem", OTHER: "chat_template"}},
    (GRPO + "use_vllm: true\n", "grpo"): {
        "steps_per_generation: 8\ngradient_accumulation_steps: 2\nvllm_max_model_length: 512": {
            OTHER: "steps_per_generation, vllm_max_model_length"},
        "vllm_device: auto": {"loss.beta": 0.04, "rollout.temperature": 0.9}},
    "accelerate launch --num_processes 2 src/open_r1/sft.py --config recipe.yaml ": {
        "--learning_rate 1e-6 --output_dir out-$(date)": {"loss": "sft", "optim.lr": 1e-6, "launch.nproc": 2,
            "hydra.run.dir": None, REMARK: "Program: src/open_r1/sft.py is not TRL's own."}},
    "/envs/rloo/bin/trl dpo --model_name_or_path org/m --dataset_name org/d ": {"--beta 0.2": {"loss.beta": 0.2}},
    "accelerate launch --num_processes 2 -m axolotl.cli.train pairs.yaml ": {
        "--learning-rate 1e-6": {"loss": "dpo", "optim.lr": 1e-6, "launch.nproc": 2, "data.path": "org/d"}},
    f"WANDB_PROJECT=zz CUDA_VISIBLE_DEVICES=0,1 FOO=1 {COMMAND}": {"": {"logger.project": "zz", "launch.nproc": 2,
        OTHER: "FOO"}},
    f"export NPROC_PER_NODE=8\n. ./a.sh\n{SWIFT_UNCOUNTED}": {"": {"launch.nproc": 8, REMARK: "./a.sh is not read"}},
    f"export LR=1e-6\nA=1 srun --nodes 2 bash -c \"{OPENRLHF} ": {"--learning_rate $LR\"": {"optim.lr": 1e-6,
        OTHER: "A", NEEDLESS: "srun"}},
    OPENRLHF.replace("deepspeed", "deepspeed --include localhost:4,5"): {"": {"launch.nproc": 2}},
    f"torchrun --nproc_per_node 4 --nnodes 2 trl/scripts/{COMMAND[4:].replace('dpo', 'dpo.py', 1)}": {"": {
        "launch.nproc": 4, "launch.nodes": 2}},
    "trl dpo --config recipe.yaml ": {"--learning_rate 1e-6": {"optim.lr": 1e-6, "model.path": "org/m"}},
    COMMAND: {
        "--logging_first_step --log_level info --eval_strategy steps": {"train.eval_every": 10,
            NEEDLESS: "logging_first_step, log_level"},
        "--logging_steps 7 --eval_strategy steps --max_steps 20_000 --per_device_train_batch 2": {"train.eval_every": 7,
            "train.max_steps": 20_000, "train.micro_batch_size": 2}},
    COMMAND.replace("trl dpo", "accelerate launch --config_file two.yaml trl/scripts/dpo.py"): {
        "": {"train.batch_size": 64, "launch.nproc": 4, "engine": "zero3"}},
    OPENRLHF: {
        **{f"--use_wandb $X --wandb_run_name {text}": {"logger.run_name": text, "logger": "wandb"} for text in TEXTS},
        "--save_path 007 --beta 0.1 --beta 0.5": {"hydra.run.dir": "007", "loss.beta": 0.5, NEEDLESS: "beta"},
        f"--max_samples 300\necho {OPENRLHF}\n": {"data.max_samples": 300, "data.split": None, "loss": "dpo"},
        "--tokenizer_chat_template '{% for m in messages %}{{ m }}' --eval_dataset org/e --eval_steps -1":
            {"model.chat_template": None, "train.eval_every": "1 epoch", "data.eval_path": "org/e",
            OTHER: "tokenizer_chat_template"},
        "--train_split a --eval_split b --eval_steps 9": {"data.split": "a", "data.eval_split": "b",
            "train.eval_every": 9},
        "--eval_dataset org/e --seed 3 --save_path $(date) \\": {"train.eval_every": "1 epoch", "seed": 3,
            "hydra.run.dir": None, OTHER: "save_path"}},
    OPENRLHF.replace("dpo", "sft"): {
        "--input_key talk --apply_chat_template --pretrain_mode": {"loss": "sft", "data.columns.messages": "talk",
            "data.max_length": 2048, "train.epochs": 2, OTHER: "multiturn, pretrain_mode"},
        "--input_key messages --apply_chat_template --multiturn": {NEEDLESS: "multiturn, input_key"},
        "--input_key content --pretrain_mode": {"data.columns.text": "content", "data.template": "never",
            NEEDLESS: "pretrain_mode", REMARK: "theirs is a mean over the tokens of each micro-batch"},
        "--input_key q --output_key a": {REMARK: "input_template: "}},
    SWIFT: {
        "--model_type qwen2_vl --torch_dtype float32 --template qwen2_5 --rope_scaling '{\"type\": \"yarn\", "
            "\"factor\": 4.0}'": {"train.precision": "fp32", "model.rope": "yarn:4", "model.chat_template": "qwen",
            "data.max_length": None, "data.too_long": "error", OTHER: "max_length", REMARK: IMAGES},
        "--torch_dtype float16 --metric_for_best_model rouge --eval_steps 9 --rope_scaling yarn --template llama":
            {"train.precision": "bf16", "checkpoint.keep_best": None, "model.rope": None,
            ABSENT: "torch_dtype, metric_for_best_model", OTHER: "rope_scaling, template"},
        "--max_length 4096 --dataset /d/x.jsonl#500 --split_dataset_ratio 0.01 --eval_steps 100 --streaming "
            "true --model_name a --model_author b --freeze_vit true": {"data.too_long": "drop", "data.max_length": 4096,
            "data.path": "/d/x.jsonl", "data.max_samples": 500, "train.eval_every": 100, "data.eval_size": 0.01,
            "data.streaming": True, ABSENT: "freeze_vit", NEEDLESS: "model_name, model_author", REMARK: IMAGES},
        "--dataset swift/self-cognition#100": {"data.max_samples": 100, OTHER: "dataset"}},
    SWIFT_SFT: {
        "--system system.txt --val_dataset held.jsonl --eval_steps 50": {"data.system": "Be brief.\nBe kind.",
            "data.eval_path": "held.jsonl", "train.eval_every": 50},
        "--freeze_llm true --tuner_type lora --trainable_parameters x --new_special_tokens '<a>' --model_type own":
            {"model.add_tokens": ["<a>"], INSTEAD: "freeze_llm, trainable_parameters", OTHER: "model_type"},
        "--new_special_tokens t.txt --max_pixels 9": {INSTEAD: "new_special_tokens", REMARK: IMAGES},
        "--system 'Be brief.'": {"data.system": "Be brief."},
        "--system \"${P:-a (b); c\nd}\"": {"data.system": "a (b); c\nd"},
        "--system not_here.txt": {INSTEAD: "system"}},
    f"MAX_PIXELS=1003520 {SWIFT}": {"": {ABSENT: "MAX_PIXELS", REMARK: IMAGES}},
    **{SWIFT_SFT.replace("org/m", model): {"": {REMARK: IMAGES}}
       for model in ("sees", "/data/Qwen2.5-VL-7B/", "Qwen/Qwen2-VL-7B-Instruct", "org/MiniCPM-V-2_6")},
    SWIFT_UNCOUNTED.replace("swift rlhf", "accelerate launch --config_file two.yaml swift/cli/rlhf.py"): {
        "--gradient_accumulation_steps 2": {"train.batch_size": 16, "launch.nproc": 4, "launch.nodes": 2}},
    f"CUDA_VISIBLE_DEVICES=0,1 {SWIFT_UNCOUNTED}": {  # one process on two GPUs
        "--gradient_accumulation_steps 16": {"train.batch_size": 16, "launch.nproc": 2, "parallel.ring_size": 2,
            OTHER: "CUDA_VISIBLE_DEVICES"}},
    f"export NPROC_PER_NODE=2 X=1\nNPROC_PER_NODE=$NPROC_PER_NODE {SWIFT_SFT.partition(' ')[2]} ": {
        "--seed $X": {"launch.nproc": 2, "seed": 1}},
    "model: org/m\ntuner_type: lora\ndataset: [org/d]\n": {"ENV: {NPROC_PER_NODE: 2}": {"loss": "sft",
        "train.batch_size": 16}},
    AXOLOTL: {
        "": {"checkpoint.keep_last": 4, "checkpoint.save_every": "1 epoch", "optim.warmup_ratio": 0.03},
        "max_steps: 1000\nval_set_size: 200\neval_steps: 50": {"optim.warmup_steps": 30, "data.eval_size": 200},
        "max_steps: 100000\nval_set_size: 0.05\neval_steps: 50\neval_on_start: true\ncosine_min_lr_ratio: 0.2":
            {"optim.warmup_steps": 100, "train.eval_every": 50, "data.eval_size": 0.05, "eval.before_training": True,
            "optim.decay": "cosine", "optim.min_lr_ratio": 0.2},
        "max_steps: 60\nprocessor_type: AutoProcessor\n"
            "fsdp_config: {offload_params: true, activation_checkpointing: true}": {"optim.warmup_steps": 2,
            "engine": "fsdp2", "memory.checkpointing": True, ABSENT: "fsdp_config: offload_params, processor_type",
            REMARK: IMAGES},
        "evals_per_epoch: 4\nsaves_per_epoch: 1\nval_set_size: 0.1\nfp16: true\nbf16: false\n"
            "unfrozen_parameters: [lm_head]": {"train.eval_every": "1/4 epoch", "checkpoint.save_every": "1 epoch",
            "data.eval_size": 0.1, "train.precision": "bf16", INSTEAD: "unfrozen_parameters"},
        "max_steps: 1000\nwarmup_steps: 0\nbatch_size: 8\nmicro_batch_size: 2\ncurriculum_sampling: true":
            {"optim.warmup_steps": None, "train.batch_size": 64, "data.shuffle": False, NEEDLESS: "batch_size"},
        "tensor_parallel_size: 2\nbf16: true\neval_steps: 5\ntest_datasets: [{path: org/d, split: test}]\n"
            "sample_packing: true\neval_sample_packing: false": {"train.batch_size": 4, "data.eval_split": "test",
            "train.eval_every": 5, "data.drop_last": True, ABSENT: "tensor_parallel_size",
            REMARK: "weights that are trained are float32, theirs bfloat16 without DeepSpeed"},
        "wandb_name:\nload_in_8bit: false\nwarmup_steps: 0\nnew_thing:": {"optim.warmup_ratio": None, ABSENT: "",
            NEEDLESS: "wandb_name, load_in_8bit, new_thing"},
        "test_datasets: [{path: org/e, split: val}]\nsample_packing: true": {"data.eval_path": "org/e",
            "data.eval_split": "val", "data.drop_last": False, REMARK: "rows of a block see each other there"}},
    AXOLOTL + "overrides_of_model_config: \n": {
        "  rope_scaling: {type: yarn, factor: 4.0}": {"model.rope": "yarn:4"},
        "  rope_scaling: {rope_type: yarn, factor: 2.5, original_max_position_embeddings: 32768}":
            {"model.rope": "yarn:2.5:32768"},
        "  rope_parameters: {rope_type: yarn, factor: 2}": {"model.rope": "yarn:2"},
        "  rope_scaling: {type: linear, factor: 4.0}": {"model.rope": None, ABSENT: "overrides_of_model_config"},
        "  output_router_logits: true": {INSTEAD: "overrides_of_model_config: output_router_logits"}},
    AXOLOTL.partition("datasets")[0]: {
        "datasets: [{path: org/d, type: {system_prompt: Be kind., field_instruction: q}}]": {"data.system": "Be kind.",
            "data.columns.prompt": "q"},
        "datasets: [{path: org/d, system_prompt: Be kind., type: x, field_prompt: p}]": {"data.system": None,
            "data.columns.prompt": "p", ABSENT: "datasets: system_prompt"}},
    AXOLOTL.partition("rl: ")[0] + "learning_rate: 1e-5\n": {
        "datasets: [{path: org/d, type: completion, field: story}]": {"loss": "sft", "data.columns.text": "story",
            REMARK: "a text that is longer goes on in the next block there"},
        "datasets: [{path: org/d, type: completion}]\ntrain_on_inputs: true\nplugins: [a.LigerPlugin, a.Prune]\n"
            "val_set_size: 9\nsaves_per_epoch: 1\nevals_per_epoch: 2\nearly_stopping_patience: 3": {
            "checkpoint.keep_best": 1, INSTEAD: "plugins", NEEDLESS: "train_on_inputs",
            OTHER: "load_best_model_at_end"},
        "datasets: [{path: org/d, type: sharegpt, field: talk}]\nsaves_per_epoch: 1\nevals_per_epoch: 2": {
            "data.columns.messages": "talk", "data.columns.text": None, "checkpoint.keep_best": None, OTHER: "bf16",
            REMARK: "theirs is a mean over the tokens of each GPU"},
        "datasets: [{path: org/d, type: context_qa.load_v2}]\nfsdp: [full_shard]": {"data.columns.prompt": "context",
            "data.columns.input": "question"},
        "datasets: [{path: org/d, type: alpaca_chat.load_qa}]": {"data.columns.prompt": "question",
            "data.columns.completion": "answer"},
        "datasets: [{path: org/d, type: {field_instruction: q, field_output: a}, roles_to_train: [user]}]":
            {"data.columns.prompt": "q", "data.columns.completion": "a",
            OTHER: "datasets: type, datasets: roles_to_train"},
        "datasets: [{path: org/d, type: bradley_terry.chat_template}]\nreward_model: true":
            {"data.columns.prompt": "input", "data.too_long": "truncate"},
        "datasets: [{path: org/d, data_files: [a/b.json]}]": {"data.path": "org/d", ABSENT: "datasets: data_files"},
        "datasets: [{path: json, data_files: [d.json]}]": {"data.path": "d.json", ABSENT: ""},
        "pretraining_dataset: [{path: org/c, name: en, text_column: body, type: pretrain}]": {"data.path": "org/c",
            "data.subset": "en", "data.columns.text": "body"},
        "pretraining_dataset: org/c": {"data.path": "org/c"}},
    FACTORY: {
        "ddp_timeout: 180000000\nuse_badam: true\nbadam_mode: layer\nsequence_parallel_size: 4\npure_bf16: true":
            {"launch.timeout_seconds": 604800.0, "parallel.ring_size": 4, "train.batch_size": 16,
            "train.precision": "bf16", INSTEAD: "use_badam", NEEDLESS: "badam_mode", ABSENT: "pure_bf16"},
        "save_steps: 0\nsequence_parallel_size: 1\ntrain_mm_proj_only: true": {"checkpoint.save_every": None,
            "parallel.ring_size": 1, INSTEAD: "train_mm_proj_only", OTHER: "bf16"},
        "ddp_timeout: 3600\nimage_max_pixels: 262144\nmax_samples: 1000\nval_size: 0.1\n"
            "eval_strategy: steps\neval_steps: 500": {"launch.timeout_seconds": 3600.0, "data.max_samples": 1000,
            "data.eval_size": 0.1, "train.eval_every": 500, ABSENT: "image_max_pixels", REMARK: IMAGES},
        "pipeline_model_parallel_size: 4\ntensor_model_parallel_size: 1\neval_dataset: d1": {"train.batch_size": 16,
            ABSENT: "pipeline_model_parallel_size", REMARK: "theirs evaluates rows that it trains on"},
        "eval_dataset: d2\neval_strategy: epoch\ndataset_dir: own": {"data.path": "org/own", "data.eval_path": "org/e",
            "data.eval_split": "val", "train.eval_every": "1 epoch"}},
    FACTORY.replace("dpo", "pt").replace("d1", "d7"): {"": {"loss": "sft", "data.columns.text": "content",
        "data.too_long": "truncate", OTHER: "packing"}},
    FACTORY.replace("d1", "d8"): {"": {"data.columns.prompt": "ask", OTHER: "dataset: query"}},
    "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train --model_name_or_path org/m --dataset d --finetuning_type full ": {
        "--stage dpo --per_device_train_batch_size 2": {"loss": "dpo", "train.batch_size": 4, "adapter": None}},
    "torchrun --nproc_per_node 2 src/train_bash.py --stage sft --do_train --model_name_or_path org/m ": {
        "--finetuning_type full --dataset d1": {"loss": "sft", "train.batch_size": 16, "launch.nproc": 2}},
    "FORCE_TORCHRUN=1 llamafactory-cli train theirs.yaml ": {
        "learning_rate=1e-7 per_device_train_batch_size=2": {"optim.lr": 1e-7, "train.micro_batch_size": 2}},
    "accelerate launch LLaMA-Factory/src/train.py theirs.yaml": {"": {"loss": "sft", "data.path": "org/e"}},
}  # fmt: skip


@pytest.mark.parametrize(("text", "trainer", "wanted"), tables.cases(ARGUMENTS))
def test_an_argument_becomes_ours(text: str, trainer: str | None, wanted: Becomes) -> None:
    tables.assert_becomes(tables.of_eight(text, trainer), wanted)


DEEPSPEED: tuple[tuple[str, str | None, str | None], ...] = (
    ("deepspeed_configs/zero3_bf16.json", "zero3", None), ("ds/zero3_v2.json", "zero3", None),
    ("deepspeed_configs/zero3_bf16_cpuoffload_all.json", "zero3", "all"),
    ("deepspeed_configs/zero3_bf16_cpuoffload_params.json", "zero3", "all"),
    ("ds_z3_offload_config.json", "zero3", "all"), ("zero3_offload", "zero3", "all"),
    ("examples/deepspeed/ds_z2_offload_config.json", "zero2", "optimizer"), ("zero2_offload", "zero2", "optimizer"),
    ("stage2.json", "zero2", None), ("zero0", "zero0", None), ("{}", "zero0", None), ("ds_offload.json", None, None),
    ("ours.json", "zero1", "optimizer"),
    ('{"zero_optimization": {"stage": 3}, "train_batch_size": 10}', "zero3", None),
    ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "zero3", "all"),
    ('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "zero2", "optimizer"),
)  # fmt: skip


@pytest.mark.parametrize(("config", "engine", "offload"), DEEPSPEED)
@pytest.mark.parametrize("base", [TRL, AXOLOTL, FACTORY, SWIFT], ids=["TRL", "axolotl", "LLaMA-Factory", "ms-swift"])
def test_a_deepspeed_configuration_is_one_engine_for_every_trainer(
    base: str, config: str, engine: str | None, offload: str | None
) -> None:
    text = f"{base} --deepspeed '{config}'" if base == SWIFT else f"{base}deepspeed: '{config}'\n"
    conv = tables.of_eight(text, "dpo" if base == TRL else None)
    tables.assert_becomes(conv, {"engine": engine, "engine.offload": offload})
    assert ("deepspeed" in {line.name for line in conv.lines[OTHER]}) == (engine is None or "nvme" in config)


# Defaults of a version, which is given with the trainer or follows from the arguments.
OF_VERSIONS: Table = {
    (GRPO, "grpo trl==0.15"): {"": {"loss.beta": 0.04, "rollout.temperature": 0.9, "loss.normalize": "sequence",
        "train.precision": "fp32"}},
    (f"# pip install trl==0.25\n{GRPO}", "grpo"): {"": {"loss.beta": 0.0, "data.max_length": 768}},
    (SWIFT_SFT.replace("tuner_type", "train_type"), "ms-swift==3.5.1"): {"": {"data.eval_size": 0.01}},
    (SWIFT, "ms-swift==3.7"): {"": {"loss.sft_weight": 1.0}},
    (RAY, "openrlhf==0.6.3"): {"--init_kl_coef 0": {"loss.normalize": "sequence", "loss.lam": 0.95}},
    RAY: {"--actor.dual_clip 3": {"loss.normalize": "token", "loss.value_clip": 0.5}},
}  # fmt: skip
UNDATED = "Versions: nothing says which of "


@pytest.mark.parametrize(("text", "trainer", "wanted"), tables.cases(OF_VERSIONS))
def test_defaults_are_those_of_the_version(text: str, trainer: str | None, wanted: Becomes) -> None:
    conv = tables.of_eight(text, trainer.split() if trainer else None)
    tables.assert_becomes(conv, wanted)
    assert UNDATED not in tables.comments(conv) or "train_type" in text


def test_a_version_is_read_beside_the_file() -> None:
    Path("requirements.txt").write_text("torch\ntrl==0.18.1\n")
    conv = tables.of_eight(GRPO, "grpo")
    tables.assert_becomes(conv, {"loss.beta": 0.04, "rollout.temperature": 1.0})
    assert UNDATED not in tables.comments(conv)


def test_where_the_version_is_not_known_the_first_lines_say_what_others_had() -> None:
    head = " ".join(written(tables.of_eight(GRPO, "grpo")).replace("\n#", "").splitlines()[:6])
    older = f"{UNDATED}TRL it is for, and the newer defaults are taken. Older ones had bf16=False before 0.19, "
    for text in (older, "beta=0.04 before 0.19", "--trainer trl==VERSION"):
        assert text in head


WRITTEN = json.loads((ROOT / "tests" / "files" / "chat_templates.json").read_text(encoding="utf-8"))["templates"]
TEMPLATES = {"LLaMA-Factory": model_keys.FACTORY, "axolotl": model_keys.AXOLOTL, "ms-swift": model_keys.SWIFT}


@pytest.mark.parametrize(("framework", "theirs"), [(each, name) for each, them in TEMPLATES.items() for name in them])
def test_a_template_is_taken_over_only_where_the_text_is_the_same(framework: str, theirs: str) -> None:
    """Their own code wrote the texts (`tests/files/chat_templates.json`), with a system prompt and without."""
    ours = TEMPLATES[framework][theirs]
    assert ours in NAMED
    conversations = ["asked", "told", "asked by a system", "told by a system"]
    if f"{framework} {theirs}" == "axolotl gemma":  # theirs refuses a system prompt
        conversations = conversations[:2]
    texts = WRITTEN[ours]["cases"]
    assert [each for each in conversations if f"{framework} {theirs}" not in texts[each]["by"]] == []


STEPS, LR = 40, 2e-5


def ceiled(share: float) -> int:
    """Return what transformers makes of a share."""
    return TrainingArguments(output_dir="nowhere", warmup_steps=share, use_cpu=True).get_warmup_steps(STEPS)


SCHEDULES: Table = {  # transformers' scheduler, and its warm-up
    (f"{TRL}learning_rate: {LR}\n", "dpo"): {
        "warmup_ratio: 0.07\nlr_scheduler_type: cosine": ("cosine", ceiled(0.07)),
        "warmup_steps: 5": ("linear", 5),
        "warmup_steps: 0.3": ("linear", ceiled(0.3)),
        "": ("linear", 0),
        "warmup_ratio: 0.1\nlr_scheduler_type: constant": ("constant", 0),
        "warmup_ratio: 0.1\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}":
            ("cosine_with_min_lr", ceiled(0.1))},
    f"{FACTORY}warmup_ratio: 0.1\nlearning_rate: {LR}\n": {
        "lr_scheduler_type: inverse_sqrt": ("inverse_sqrt", ceiled(0.1))},
    f"{SWIFT} --learning_rate {LR} ": {"--warmup_ratio 0.05": ("cosine", ceiled(0.05))},
    f"{OPENRLHF} --learning_rate {LR}": {"": ("cosine_with_min_lr", math.ceil(STEPS * 0.03))},
    AXOLOTL.replace("1e-5", str(LR)): {
        "warmup_steps: 3\nlr_scheduler: constant_with_warmup": ("constant_with_warmup", 3)},
}  # fmt: skip


@pytest.mark.parametrize(("text", "trainer", "theirs"), tables.cases(SCHEDULES))
def test_every_step_of_a_converted_file_has_their_rate(text: str, trainer: str | None, theirs: tuple[str, int]) -> None:
    cfg = tables.experiment_of(tables.of_eight(text, trainer), f"train.max_steps={STEPS}")
    schedule = build_schedule(cfg, steps_per_epoch=STEPS)
    (name, warm_up), options = theirs, {"min_lr_rate": 0.1} if "min_lr" in theirs[0] else None
    rates = rates_of(lambda it: get_scheduler(name, it, warm_up, STEPS, scheduler_specific_kwargs=options), LR, STEPS)
    assert [schedule.at(step) for step in range(1, STEPS + 1)] == pytest.approx(rates, rel=1e-9, abs=1e-15)
