"""Files that are refused, in one message which names the cause and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlexp.base.errors import UserError
from rlexp.convert.conversion import ConvertError
from rlexp.convert.frameworks import converted
from tests.convert.tables import Table, cases, conversion, of_eight
from tests.convert.texts import AXOLOTL, AXOLOTL_LORA, FACTORY, FACTORY_LORA, GRPO, OPENRLHF, RAY, SWIFT, TRL

SHARED = ("reward_funcs: [a.b]", "mask_truncated_completions: true\nnum_generations: 4", "epsilon_high: 0.3",
          "truncation_mode: keep_start", "precompute_ref_log_probs: true", "packing: true")  # fmt: skip
UNKNOWN = ("", "just words", "[1, 2]", "a: [1", "key: value", "python train.py --lr 3", "\0")
REFUSED: Table = {
    TRL: {**dict.fromkeys(SHARED, "does not say which trainer it is for. Say --trainer dpo, or one of ")},
    (TRL, "gkd"): {"": "gkd, or one of that name in a fork, which rlexp does not have. It has dpo, "},
    (OPENRLHF, "sft"): {"": "--trainer=sft: "},
    # a value
    (TRL, "dpo"): {
        "per_device_train_batch_size: auto": "per_device_train_batch_size=auto: must be a whole",
        "num_train_epochs: many": "num_train_epochs=many: must be a number of at least 0. For ",
        "lr_scheduler_type: [cosine]": "lr_scheduler_type=['cosine']: must be a text.",
        "datasets: x": "datasets=x: must be a list of mappings",
        "deepspeed: {zero_optimization: {stage: auto}}": "zero_optimization.stage=auto must",
        "loss_type: [sigmoid, sft]\nloss_weights: [1.0]": "loss_weights=[1.0]: has 1 weights for 2 losses.",
        "loss_weights: [-1.0]": "loss_weights=[-1.0]: must be a list of numbers of at least 0.",
        "loss_weights: [0]": "loss_weights=[0]: all weights are 0. Give a loss a weight above 0."},
    (TRL, "kto"): {"desirable_weight: x": "desirable_weight=x: must be a number. For example: "},
    (TRL, "sft"): {"packing: bfd": "packing=bfd: must be true or false."},
    (TRL, "reward"): {"center_rewards_coefficient: [1]": "center_rewards_coefficient=[1]: must be a number."},
    (GRPO, "grpo"): {"num_generations: 0": "num_generations=0: must be a whole number of at least 1. For "},
    (TRL, "grpo"): {"reward_funcs: [a.b, a.c]\nreward_weights: [1.0]": "has 1 weights for 2 rewards."},
    (GRPO, "rloo"): {"rloo_k: 0": "rloo_k=0: must be", "rloo_k: 3": "rloo_k=3: does not divide the 64 answers"},
    RAY: {
        "--eps_clip_low_high 0.2": "eps_clip_low_high=0.2: must be two numbers. For example: ",
        "--train_batch_size 0": "train_batch_size=0: must be a whole number of at least 1. For ",
        "--train.batch_size 100": "train.batch_size=100: does not divide the 1024 answers"},
    OPENRLHF.replace("org/d", "b,c"): {"--dataset_probs 0.5": "dataset_probs=0.5: must be 2 numbers"},
    SWIFT: {
        "--dataset org/d#abc": "dataset=org/d#abc: must be a path or a name",
        "--dataset --beta 0.1": "dataset: has no value. Give one.",
        "--rope_scaling '{type: ['": "rope_scaling={type: [: must be a mapping. For example",
        "--task_type seq_cls": "task_type=seq_cls: trains seq_cls, which is missing in rlexp.",
        "--sft_type lora": "sft_type=lora: is an argument of ms-swift before 3, which is not converted."},
    AXOLOTL.partition("datasets")[0]: {"datasets: [org/d]": "datasets=['org/d']: must be a list of mappings"},
    FACTORY_LORA: {
        "lora_rank: 0": "lora_rank=0: must be a whole number of at least 1.",
        "lora_target: lm_head": "lora_target=lm_head: names the head or embeddings alone, which"},
    AXOLOTL: {
        "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_parameters: [experts.w]":
            "lora_target_parameters=['experts.w']: an adapter is on linear layers only",
        "context_parallel_size: 3": "context_parallel_size=3: does not divide the 8 GPUs. "},
    **{FACTORY.replace("d1", name): {"": f"dataset={name}: "} for name in ("d4", "d5", "d6")},
    # something that is missing
    AXOLOTL_LORA.replace("lora_r: 32\n", ""): {
        "": "lora_r: is missing, and axolotl has no default. Add it to the file"},
    AXOLOTL_LORA.replace("lora_target_linear: true\n", ""): {"": "lora_target_modules: is missing, and nothing says "},
    "swift sft --dataset org/d": {
        "": "model: is missing, and it names the model that is trained. Add it to the command"},
    "deepspeed --module openrlhf.cli.train_dpo --seed 1": {"": "pretrain: is missing, and it names "},
    OPENRLHF.replace("dpo", "sft"): {
        "--input_key input": "output_key: is missing, and OpenRLHF leaves out every row without an answer."},
    # something that no file here means
    SWIFT.replace("dpo", "grpo"): {
        "--use_gym_env true": "use_gym_env=True: scores the answers, and is missing in rlexp. Give reward_funcs."},
    RAY.partition("--reward")[0]: {
        "--agent_func_path agent.py": "agent_func_path=agent.py: an agent scores the answers"},
    FACTORY: {
        "do_predict: true": "do_predict=True: does that alone, and trains nothing.",
        "dataset_dir: nowhere": "dataset_info.json, and there is none here"},
    "": {
        **dict.fromkeys(UNKNOWN, "is none of the files that can be converted"),
        "NPROC_PER_NODE=4 swift sft --model org/m --cached_dataset a/train":
            "cached_dataset=a/train: has rows that `swift export` tokenized",
        "megatron sft --model org/m --dataset org/d": "is for Megatron-SWIFT",
        "model: org/m\ntensor_model_parallel_size: 2\n": "is for Megatron-SWIFT",
        "model: org/m\ntrain_dataset: rows.yaml\n": "the form of LLaMA-Factory's v1",
        "base_model: org/m\nrl: grpo\n": "rlexp has it: loss=grpo, whose keys ",
        "python examples/scripts/sft_vlm.py --model_name_or_path org/m": "trains on images.",
        "python examples/scripts/sft_gemma3.py --num_train_epochs 1": "is for TRL's script sft_gemma3.py",
        "python examples/scripts/rloo/rloo.py --rloo_k 2": "is for TRL's rloo of TRL before 0.19",
        "accelerate launch --num_processes 8 \\\n  my/train.py --learning_rate 1e-6 --output_dir out":
            "line 1 starts my/train.py, a program of its own, whose code decides what is trained. Write its arguments",
        "cd /x\ntorchrun src/grpo.py --config recipes/a.yaml":
            "whose code decides what is trained. If it reads recipes/a.yaml as TRL does: python -m rlexp.convert ",
        f"for s in 1 2; do {SWIFT} --seed $s; done": "Say which one is meant by the loop's variable: --set s=VALUE.",
        "llamafactory-cli train $1": "the yaml file=$1: only bash knows what $1 is.",
        "llamafactory-cli train cfg/$1.yaml": "the yaml file=cfg/$1.yaml: only bash knows what $1 is. Give the "},
}  # fmt: skip


@pytest.mark.parametrize(("text", "trainer", "message"), cases(REFUSED))
@pytest.mark.usefixtures("folder")
def test_a_refusal_names_the_cause(text: str, trainer: str | None, message: str) -> None:
    with pytest.raises(ConvertError) as error:
        of_eight(text, trainer)
    assert message in str(error.value)


@pytest.mark.usefixtures("folder")
def test_what_the_command_must_say_is_asked_for() -> None:
    with pytest.raises(ConvertError, match=r"does not say how many GPUs there are. Say how many: --gpus=8."):
        conversion(FACTORY)
    with pytest.raises(UserError, match=r"--trainer trl==x: must be one of trl, ms-swift, "):
        of_eight(GRPO, ["grpo", "trl==x"])
    with pytest.raises(ConvertError, match="a version of axolotl"):
        of_eight(GRPO, ["grpo", "axolotl==0.5"])


WRONG_FILES: dict[str, tuple[bytes | None, str]] = {
    "a folder": (None, "cannot be read (Is a directory). Give a file."),
    "no text": (bytes(range(256)), "is no text, and is none of the files that can be converted. These are: "),
    "50 MB": (b"a: 1\n" * 10_000_000, "is larger than 256 KiB, and is none of the files that can be converted."),
    "100,000 aliases": (f"a: &a 1\nb: [{'*a,' * 100_000}]\n".encode(), "is larger than 256 KiB, and is none of the "),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_one_message(name: str, tmp_path: Path) -> None:
    content, message = WRONG_FILES[name]
    file = tmp_path / "recipe.yaml"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(ConvertError) as error:
        converted(file, "dpo", 8)
    assert str(error.value).startswith(f"{file}: {message}")
