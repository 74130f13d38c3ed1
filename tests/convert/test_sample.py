"""What public files of other trainers have: a conversion, or a refusal by the true cause."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from rlexp.convert.conversion import ConvertError
from rlexp.convert.experiment import text_of
from rlexp.convert.rules import Fate
from tests.convert.texts import (
    AXOLOTL,
    COMMAND,
    FACTORY,
    GRPO,
    OPENRLHF,
    RAY,
    SWIFT,
    TRL,
    conversion,
    named,
    values,
)

OTHER, ABSENT, NEEDLESS, INSTEAD = Fate.OTHER, Fate.ABSENT, Fate.NEEDLESS, Fate.INSTEAD
AXOLOTL_SFT = AXOLOTL.replace("rl: dpo\n", "").replace("chat_template.default", "chat_template")
SWIFT_GRPO = SWIFT.replace("dpo", "grpo") + "--reward_funcs accuracy format "
MIX = "model_name_or_path: org/m\n"
FACTORY_COMMAND = "CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train --model_name_or_path org/m --dataset d1 "
FACTORY_COMMAND += "--finetuning_type full "
# A file's text, its trainer (of TRL), and what comes of it: our keys, and arguments that are told to be something else.
CASES: dict[str, tuple[str, str | None, Mapping[str, Any], Mapping[Fate, set[str]]]] = {
    "a wait of years": (FACTORY + "ddp_timeout: 180000000\n", None, {"launch.timeout_seconds": 604800.0}, {}),
    "a wait of an hour": (FACTORY + "ddp_timeout: 3600\n", None, {"launch.timeout_seconds": 3600.0}, {}),
    "a first step that is logged": (COMMAND + "--logging_first_step --log_level info --eval_strategy steps", None,
                                    {"train.eval_every": 10}, {NEEDLESS: {"logging_first_step", "log_level"}}),
    "steps that are logged": (COMMAND + "--logging_first_step --logging_steps 7 --eval_strategy steps", None,
                              {"train.eval_every": 7}, {}),
    "an optimizer of 8 bits": (TRL + "optim: paged_adamw_8bit\n", "dpo", {"optim": None}, {ABSENT: {"optim"}}),
    "another optimizer": (TRL + "optim: lion_32bit\n", "dpo", {"optim": None}, {INSTEAD: {"optim"}}),
    "an optimizer by a flag": (FACTORY + "use_badam: true\nbadam_mode: layer\n", None, {},
                               {INSTEAD: {"use_badam"}, NEEDLESS: {"badam_mode"}}),
    "a metric that nothing measures": (SWIFT + "--metric_for_best_model rouge --eval_steps 9", None,
                                       {"checkpoint.keep_best": None}, {ABSENT: {"metric_for_best_model"}}),
    "a best model without held-out rows": (TRL + "metric_for_best_model: loss\n", "dpo",
                                           {"checkpoint.keep_best": None, "checkpoint.best_metric": None},
                                           {NEEDLESS: {"metric_for_best_model"}}),
    "a GRPO over rings": (SWIFT_GRPO + "--sequence_parallel_size 2 --per_device_train_batch_size 8 --num_generations 8 "
                          "--gradient_accumulation_steps 2", None,
                          {"train.batch_size": 64, "rollout.batch_size": 8, "parallel.ring_size": 2}, {}),
    "prompts that are too long": (GRPO + "max_prompt_length: 256\n", "grpo", {"data.too_long": "truncate"}, {}),
    "rows in their order": (AXOLOTL + "curriculum_sampling: true\n", None, {"data.shuffle": False}, {}),
    "rows of a scorer": (AXOLOTL_SFT.replace("type: chat_template", "type: bradley_terry.chat_template") +
                         "reward_model: true\n", None,
                         {"data.columns.prompt": "input", "data.too_long": "truncate"}, {}),
    "a streamed set": (SWIFT + "--streaming true", None, {"data.streaming": True}, {}),
    "names in rows": (SWIFT.replace("org/d", "swift/self-cognition#100"), None, {"data.max_samples": 100},
                      {OTHER: {"dataset"}}),
    "texts in blocks": (FACTORY.replace("dpo", "pt"), None, {"data.too_long": "truncate"}, {OTHER: {"packing"}}),
    "the first rows": (OPENRLHF + "--max_samples 300", None, {"data.max_samples": 300, "data.split": None}, {}),
    "a command that is shown": (OPENRLHF + "\necho " + OPENRLHF + "\n", None, {"loss": "dpo"}, {}),
    "no warm-up": (AXOLOTL + "max_steps: 1000\nwarmup_steps: 0\n", None, {"optim.warmup_steps": None}, {}),
    "a warm-up by default": (AXOLOTL + "max_steps: 1000\n", None, {"optim.warmup_steps": 30}, {}),
    "nothing asked for": (AXOLOTL + "wandb_name:\nload_in_8bit: false\nwarmup_steps: 0\nnew_thing:\n", None, {},
                          {NEEDLESS: {"wandb_name", "load_in_8bit", "new_thing"}, ABSENT: set()}),
    "one process on two GPUs": ("CUDA_VISIBLE_DEVICES=0,1 " + SWIFT[SWIFT.index("swift"):] +
                                "--gradient_accumulation_steps 16", None,
                                {"train.batch_size": 16, "launch.nproc": 2}, {OTHER: {"CUDA_VISIBLE_DEVICES"}}),
    "the model's own length": (SWIFT, None, {"data.too_long": "error", "data.max_length": None},
                               {OTHER: {"max_length"}}),
    "a length": (SWIFT + "--max_length 4096", None, {"data.too_long": "drop", "data.max_length": 4096}, {}),
    "a name in rows of its own": (SWIFT + "--model_name a --model_author b", None, {},
                                  {NEEDLESS: {"model_name", "model_author"}}),
    "accelerate's file": (SWIFT.replace("NPROC_PER_NODE=4 swift rlhf", "accelerate launch --config_file two.yaml "
                                        "swift/cli/rlhf.py") + "--gradient_accumulation_steps 2", None,
                          {"train.batch_size": 16, "launch.nproc": 4, "launch.nodes": 2}, {}),
    "accelerate's file of TRL": (COMMAND.replace("trl dpo", "accelerate launch --config_file two.yaml "
                                                 "trl/scripts/dpo.py"), None,
                                 {"train.batch_size": 64, "launch.nproc": 4, "engine": "zero3"}, {}),
    "a command of LLaMA-Factory": (FACTORY_COMMAND + "--stage dpo --per_device_train_batch_size 2", None,
                                   {"loss": "dpo", "train.batch_size": 8, "adapter": None}, {}),
    "a script of LLaMA-Factory": ("torchrun --nproc_per_node 2 src/train_bash.py --stage sft --do_train "
                                  "--model_name_or_path org/m --finetuning_type full --dataset d1", None,
                                  {"loss": "sft", "train.batch_size": 16, "launch.nproc": 2}, {}),
    "a yaml of ms-swift": ("model: org/m\ntuner_type: lora\ndataset: [org/d]\nENV: {NPROC_PER_NODE: 2}\n", None,
                           {"loss": "sft", "train.batch_size": 16, "launch.nproc": 2}, {}),
    "a mixture": (
        MIX + "dataset_mixture:\n  datasets:\n  - {id: org/a, config: SFT, split: one, weight: 0.5}\n"
        "  - {id: org/b, weight: 1.0, columns: [messages]}\n  test_split_size: 100\n", "sft",
        {"data.sources.source1.path": "org/a", "data.sources.source1.subset": "SFT",
         "data.sources.source1.split": "one[:50%]", "data.sources.source2.split": "train", "data.path": None,
         "data.eval_size": 100}, {OTHER: {"dataset_mixture: weight"}}),
    "a mixer": (MIX + "dataset_mixer: {org/a: 1.0}\ndataset_splits: [train_p, test_p]\neval_strategy: steps\n", "dpo",
                {"data.path": "org/a", "data.split": "train_p", "data.eval_split": "test_p",
                 "train.eval_every": 10}, {}),
    "a mixer of two": (MIX + "dataset_mixer: {org/a: 1, org/b: 0.25}\ndataset_splits: [t]\n", "dpo",
                       {"data.sources.source2.split": "t[:25%]", "data.sources.source1.split": "t"}, {}),
    "simpo of its authors": (TRL + "gamma_beta_ratio: 0.3\nbeta: 10\n", None,
                             {"loss": "simpo", "loss.gamma": 3.0, "loss.beta": 10, "loss.sft_weight": 0.0}, {}),
    "an older length": (TRL + "max_seq_length: 77\n", "sft", {"data.max_length": 77}, {}),
    "keys of open-r1": (GRPO + "system_prompt: be kind\ndataset_prompt_column: problem\nwandb_project: p\n"
                        "chat_template: '{{ x }}'\n", "grpo",
                        {"data.system": "be kind", "logger.project": "p", "data.columns.prompt": "problem"},
                        {OTHER: {"chat_template"}}),
    "ppo by default": (TRL + "total_episodes: 1000\nsave_steps: 5\neval_strategy: steps\neval_steps: 7\n"
                       "num_ppo_epochs: 3\n", None,
                       {"reward.path": "EleutherAI/pythia-160m", "checkpoint.save_every": "15",
                        "train.eval_every": 21}, {}),
    "a batch without accumulation": (AXOLOTL + "batch_size: 8\nmicro_batch_size: 2\n", None,
                                     {"train.batch_size": 64, "train.micro_batch_size": 2}, {NEEDLESS: {"batch_size"}}),
    "a model on two GPUs": (AXOLOTL + "tensor_parallel_size: 2\nmicro_batch_size: 2\n", None,
                            {"train.batch_size": 8}, {ABSENT: {"tensor_parallel_size"}}),
    "a model in four pieces": (FACTORY + "pipeline_model_parallel_size: 4\ntensor_model_parallel_size: 1\n", None,
                               {"train.batch_size": 16}, {ABSENT: {"pipeline_model_parallel_size"}}),
    "an objective of a plugin": (AXOLOTL_SFT + "strict: false\nwandb_watch:\n"
                                 "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n", None,
                                 {"loss": "sft"}, {INSTEAD: {"plugins"}}),
    "rows before tuning": (AXOLOTL_SFT.partition("datasets")[0] + "pretraining_dataset: [{path: org/c, name: en, "
                           "text_column: body, type: pretrain}]\n", None,
                           {"data.path": "org/c", "data.subset": "en", "data.columns.text": "body"}, {}),
    "rows before tuning by name": (AXOLOTL_SFT.partition("datasets")[0] + "pretraining_dataset: org/c\n", None,
                                   {"data.path": "org/c"}, {}),
    "files of a set": (AXOLOTL_SFT.replace("path: org/d", "path: org/d, data_files: [a/b.json]"), None,
                       {"data.path": "org/d"}, {ABSENT: {"datasets: data_files"}}),
    "one file in a list": (AXOLOTL_SFT.replace("path: org/d", "path: json, data_files: [d.json]"), None,
                           {"data.path": "d.json"}, {ABSENT: set()}),
    "grpo of ms-swift": (
        SWIFT_GRPO + "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 8 "
        "--max_completion_length 1024 --max_length 2048 --overlong_filter true --dynamic_sample true", None,
        {"loss": "grpo", "loss.beta": 0.04, "loss.normalize": "sequence", "rollout.temperature": 0.9,
         "rollout.n_samples": 8, "rollout.batch_size": 4, "train.batch_size": 32, "data.max_length": 3072,
         "data.too_long": "truncate", "rollout.overlong": "mask", "loss.filter": True, "reward": "sum",
         "reward.terms.format.function": "rewards:format"}, {}),
    "grpo of ms-swift otherwise": (
        SWIFT_GRPO + "--beta 0 --temperature 1.0 --loss_type dapo --advantage_estimator rloo --num_generations 4 "
        "--importance_sampling_level sequence --use_vllm true --vllm_mode colocate", None,
        {"loss": "gspo", "loss.beta": 0, "loss.normalize": "token", "rollout.temperature": 1.0, "data.drop_last": None,
         "rollout.engine": "vllm", "rollout.importance_cap": None}, {INSTEAD: {"advantage_estimator"}}),
    "a choice among few tokens": (SWIFT_GRPO + "--num_generations 4 --use_vllm true --top_k 50 --top_p 1.0", None,
                                  {"rollout.engine": "vllm", "rollout.top_k": 50, "rollout.top_p": 1.0}, {}),
    "a choice among few tokens without vllm": (SWIFT_GRPO + "--num_generations 4 --top_k 50", None,
                                               {"rollout.top_k": 50}, {INSTEAD: set()}),
    "an argument of another stage": (FACTORY + "kto_chosen_weight: 2.0\n", None, {"loss": "dpo"},
                                     {NEEDLESS: {"kto_chosen_weight"}}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text('{"d1": {"file_name": "d1.json"}}')
    (tmp_path / "data" / "d1.json").write_text("[]")
    (tmp_path / "two.yaml").write_text("num_processes: 8\nnum_machines: 2\ndeepspeed_config: {zero_stage: 3}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Files that are refused, and the cause.
REFUSED: Mapping[str, tuple[str, str]] = {
    "rows without answers": (OPENRLHF.replace("_dpo", "_sft") + "--input_key input",
                             "output_key: is missing, and OpenRLHF leaves out every row without an answer."),
    "an environment": (SWIFT.replace("dpo", "grpo") + "--use_gym_env true",
                       "use_gym_env=True: scores the answers, and is missing in rlexp. Give reward_funcs."),
    "a classifier": (SWIFT + "--task_type seq_cls", "task_type=seq_cls: trains seq_cls, which is missing in rlexp."),
    "rows that are tokenized": ("NPROC_PER_NODE=4 swift sft --model org/m --cached_dataset a/train",
                                "cached_dataset=a/train: has rows that `swift export` tokenized"),
    "parameters alone": (AXOLOTL + "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_parameters: [experts.w]\n",
                         "lora_target_parameters=['experts.w']: an adapter is on linear layers only"),
    "an agent": (RAY.partition("--reward")[0] + "--num_gpus 8 --agent_func_path agent.py",
                 "agent_func_path=agent.py: an agent scores the answers"),
    "megatron": ("megatron sft --model org/m --dataset org/d", "is for Megatron-SWIFT"),
    "megatron's yaml": ("model: org/m\ntensor_model_parallel_size: 2\n", "is for Megatron-SWIFT"),
    "v1": ("model: org/m\ntrain_dataset: rows.yaml\n", "the form of LLaMA-Factory's v1"),
    "images": ("python examples/scripts/sft_vlm.py --model_name_or_path org/m", "trains on images."),
    "a script": ("python examples/scripts/sft_gemma3.py --num_train_epochs 1", "is for TRL's script sft_gemma3.py"),
    "an older rloo": ("python examples/scripts/rloo/rloo.py --rloo_k 2", "is for TRL's rloo of TRL before 0.19"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_true_cause(case: str) -> None:
    text, said = REFUSED[case]
    with pytest.raises(ConvertError, match=re.escape(said)):
        conversion(text, None, 8)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (AXOLOTL.replace("org/m", "Qwen/Qwen2-VL-7B-Instruct"), ""),
        (AXOLOTL + "processor_type: AutoProcessor\n", "processor_type"),
        ("MAX_PIXELS=1003520 " + SWIFT, "MAX_PIXELS"),
        (SWIFT + "--freeze_vit true", "freeze_vit"),
        (FACTORY + "image_max_pixels: 262144\n", "image_max_pixels"),
    ],
)
def test_a_file_for_images_says_that_none_is_read(text: str, named: str) -> None:
    conv = conversion(text, None, 8)
    assert conv.notes[0].startswith("Images: ")
    assert not named or named in {line.name for line in conv.lines[Fate.ABSENT]}


def test_a_file_for_texts_says_nothing_of_images() -> None:
    for text in (AXOLOTL, FACTORY, SWIFT + "--freeze_vit false"):
        assert not [note for note in conversion(text, None, 8).notes if note.startswith("Images")]


@pytest.mark.parametrize("case", CASES)
def test_what_public_files_have_is_read(case: str) -> None:
    text, trainer, wanted, told = CASES[case]
    counted = re.search("NPROC|VISIBLE|nproc_per_node|config_file", text)
    conv = conversion(text, trainer, None if counted else 8)
    assert {key: values(conv).get(key) for key in wanted} == wanted
    for fate, names in told.items():
        assert names <= named(conv, fate), (fate, named(conv, fate))
        assert names or not conv.lines[fate]


def test_the_first_lines_say_what_is_trained_instead() -> None:
    text = text_of(conversion(SWIFT.replace("full", "adalora") + "--loss_type kto_pair"), "mine", "train.sh")
    head = text.partition("#\n")[0]
    assert "trains something else" in head.lower()
    assert "tuner_type: adalora" in head
    assert "loss_type: kto_pair" in head


def test_nothing_is_said_twice() -> None:
    text = MIX + "dataset_mixture: {datasets: [{id: a, weight: 0.5}, {id: b, weight: 0.5}]}\ndataset_text_field: x\n"
    for conv in (conversion(text, "sft", 8), conversion(AXOLOTL.replace("chat_template.default", "alpaca"), None, 8)):
        for lines in conv.lines.values():
            assert not [line for line in lines if lines.count(line) > 1]


def test_null_and_false_are_named_in_one_line() -> None:
    text = text_of(conversion(AXOLOTL + "wandb_name:\nload_in_8bit: false\nlora_r:\n", None, 8), "mine", "a.yaml")
    assert [line for line in text.splitlines() if "wandb_name" in line] == [
        "# Null, false, empty or 0, and nothing is asked for: lora_r, wandb_name, load_in_8bit."
    ]
