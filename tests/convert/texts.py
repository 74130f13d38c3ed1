"""Files of other trainers as short texts, and what becomes of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlexp.convert.conversion import Conversion
from rlexp.convert.experiment import text_of
from rlexp.convert.frameworks import converted
from rlexp.convert.rules import Fate

# A file with the least of each trainer: its arguments follow.
TRL = "model_name_or_path: org/m\ndataset_name: org/d\nnum_processes: 8\n"
GRPO = TRL + "reward_funcs: [a.b]\n"
PPO = TRL + "reward_model_path: org/r\n"
AXOLOTL = "base_model: org/m\nrl: dpo\nlearning_rate: 1e-5\ndatasets: [{path: org/d, type: chat_template.default}]\n"
FACTORY = "model_name_or_path: org/m\nstage: dpo\nfinetuning_type: full\ndataset: d1\n"
OPENRLHF = "deepspeed --module openrlhf.cli.train_dpo --pretrain org/m --dataset org/d "
RAY = "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --prompt_data org/p --reward_pretrain org/r "
SWIFT = "NPROC_PER_NODE=4 swift rlhf --rlhf_type dpo --model org/m --tuner_type full --dataset org/d "
# The same with an adapter; ms-swift and LLaMA-Factory have one by default.
TRL_LORA = TRL + "use_peft: true\n"
AXOLOTL_LORA = AXOLOTL + "adapter: lora\nlora_r: 32\nlora_alpha: 64\nlora_dropout: 0.05\nlora_target_linear: true\n"
FACTORY_LORA = FACTORY.replace("finetuning_type: full\n", "")
SWIFT_LORA = SWIFT.replace("--tuner_type full ", "")
COMMAND = "trl dpo --model_name_or_path org/m --dataset_name org/d "
AXOLOTL_SFT = AXOLOTL.replace("rl: dpo\n", "").replace("chat_template.default", "chat_template")
SWIFT_SFT = SWIFT.replace("rlhf --rlhf_type dpo", "sft")


def conversion(text: str, trainer: str | Sequence[str] | None = None, gpus: int | None = None) -> Conversion:
    """Convert a text as a file. Other files are looked for where the test runs."""
    handle, name = tempfile.mkstemp(dir=Path.cwd(), text=True)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    try:
        return converted(Path(name), trainer, gpus)
    finally:
        Path(name).unlink()


def written(conv: Conversion) -> str:
    return text_of(conv, "mine", "theirs")


def values(conv: Conversion) -> dict[str, object]:
    """Return our keys and options with their values."""
    return {key: each.value for key, each in (*conv.choices.items(), *conv.values.items(), *conv.command.items())}


def named(conv: Conversion, *fates: Fate) -> set[str]:
    """Return the arguments of these fates. What is null or false needs nothing."""
    off = conv.off if Fate.NEEDLESS in fates else []
    return {*off, *(line.name for fate in fates for line in conv.lines[fate])}
