"""`python -m rlexp.convert`: the trainers' own examples become experiments that compose, nothing is dropped silently,
and the pages have the rules. The files in tests/files/foreign/ have the arguments of the trainers' own examples."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlexp.config.schema import Config
from rlexp.convert.experiment import text_of
from rlexp.convert.frameworks import FRAMEWORKS, converted
from tests.convert.tables import ABSENT, experiment_of
from tests.convert.test_values import unaccounted
from tests.helpers import coming_from, warm
from tests.helpers.models import saved
from tests.helpers.paths import FILES

FOREIGN = FILES / "foreign"
# For each file: the trainer and the GPUs, where it does not say them, and what must come of it.
EXAMPLES: dict[str, tuple[str | None, int | None, dict[Any, Any]]] = {
    "trl_dpo.yaml": ("dpo", 8, {"loss.name": "dpo", "loss.beta": 0.1, "train.batch_size": 128,
        "train.micro_batch_size": 2, "train.grad_acc": 8, "train.max_steps": 1000, "train.epochs": None,
        "train.eval_every": 50, "train.precision": "bf16", "seed": 42, "data.max_length": 1024,
        "data.too_long": "truncate", "data.eval_split": "test", "data.drop_last": False, "optim.lr": 5e-7,
        "memory.checkpointing": True, "checkpoint.save_every": "500", "logger.name": "none", "adapter.name": "none",
        "reference.name": "model", ABSENT: {"neftune_noise_alpha", "push_to_hub", "grad_scale"}}),
    "trl_grpo.yaml": ("grpo", None, {"loss.name": "grpo", "loss.beta": 0.0, "loss.normalize": "token",
        "engine.name": "zero2", "train.epochs": 3, "train.batch_size": 32, "rollout.batch_size": 4,
        "rollout.n_samples": 8, "rollout.minibatches": 1, "reward.function": "rewards:accuracy_reward"}),
    "trl_gspo.sh": (None, None, {"loss.name": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4,
        "loss.normalize": "sequence", "engine.name": "zero3", "train.batch_size": 128, "rollout.batch_size": 64,
        "rollout.minibatches": 4, "rollout.max_new_tokens": 1024, "reward.name": "sum", "adapter.rank": 16}),
    "trl_rloo.yaml": (None, None, {"loss.name": "rloo", "loss.beta": 0.03, "train.batch_size": 2048,
        "rollout.batch_size": 2048, "rollout.n_samples": 2, "rollout.minibatches": 2, "rollout.engine": "vllm",
        "reward.path": "org/reward", ABSENT: {"hub_token", "push_to_hub", "vllm_importance_sampling_mode"}}),
    "trl_sft.sh": (None, None, {"loss.name": "sft", "optim.lr": 2e-5, "train.epochs": 1, "train.batch_size": 64,
        "train.eval_every": 100, "eval.before_training": True, "data.eval_split": "test", "data.max_length": 1024,
        "memory.checkpointing": True, "data.shuffle": True, "checkpoint.best_metric": "eval/mean_token_accuracy",
        "adapter.alpha": 16.0, ABSENT: {"eos_token"}}),
    "trl_kto.yaml": (None, 8, {"loss.name": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0,
        "loss.undesirable_weight": 1.33, "optim.lr": 5e-7, "train.batch_size": 32, "data.shuffle": False,
        "data.unpair": False, "logger.name": "wandb", "adapter.name": "lora", "reference.name": "adapter"}),
    "trl_reward.sh": (None, 4, {"loss.name": "reward", "loss.center": 0.01, "loss.margin_weight": 1.0,
        "launch.nproc": 4, "data.max_length": 2048, "data.too_long": "drop", "train.eval_every": 50,
        "model.chat_template": "template.jinja"}),
    "openrlhf_dpo_ring.sh": (None, 8, {"loss.name": "dpo", "parallel.ring_size": 4, "parallel.dp_size": 2,
        "train.batch_size": 256, "train.grad_acc": 128, "engine.name": "zero3", "data.max_length": 8192,
        "optim.betas": [0.9, 0.95], "optim.lr": 5e-7, "checkpoint.save_every": None, "data.packing": True}),
    "openrlhf_sft.sh": (None, 8, {"loss.name": "sft", "parallel.ring_size": 2, "train.batch_size": 256,
        "train.micro_batch_size": 2, "train.epochs": 1,
        "data.columns": {"prompt": "question", "completion": "response"}, "data.max_samples": 500000,
        "data.template": "never", "optim.lr": 5e-6}),
    "openrlhf_rm.sh": (None, None, {"loss.name": "reward", "loss.margin_weight": 1.0, "loss.center": 0.0,
        "launch.nproc": 8, "train.batch_size": 256, "data.max_length": 8192, "engine.name": "zero3", "optim.lr": 9e-6}),
    "openrlhf_dapo.sh": (None, None, {"loss.name": "grpo", "loss.kl_in": "loss", "loss.kl": "k3", "loss.beta": 1e-3,
        "loss.clip_high": 0.27, "loss.filter": True, "loss.normalize": "token", "rollout.batch_size": 128,
        "rollout.n_samples": 8, "rollout.minibatches": 8, "checkpoint.save_every": "160",
        "data.columns": {"prompt": "context_messages"}, "reward.function": "reward_func:rewards",
        "data.max_samples": 20000, ABSENT: {"vllm.tensor_parallel_size"}}),
    "openrlhf_ppo_slurm.sh": (None, None, {"loss.name": "ppo", "loss.whiten": True, "loss.lam": 1.0,
        "loss.value_clip": 0.5, "loss.value_lr": 9e-6, "loss.kl_in": "reward", "loss.kl_target": None,
        "launch.nproc": 4, "launch.nodes": 2, "engine.offload": "optimizer", "data.max_length": 1536,
        "rollout.max_new_tokens": 512, "rollout.minibatches": 8, ABSENT: {"normalize_reward"}}),
    "axolotl_dpo.yaml": (None, 8, {"loss.name": "dpo", "parallel.ring_size": 4, "train.batch_size": 16,
        "data.columns": {"prompt": "conversation"}, "optim.lr": 2e-4, "train.epochs": 4, ABSENT: {"optimizer"}}),
    "axolotl_sft.yaml": (None, 8, {"loss.name": "sft", "parallel.ring_size": 2, "train.batch_size": 32,
        "train.max_steps": 200, "data.packing": True, "data.eval_size": 100, "train.eval_every": 50,
        "optim.warmup_steps": 10, "data.sources": {"source1": {"path": "teknium/GPT4-LLM-Cleaned"},
        "source2": {"path": "org/talks", "columns": {"messages": "conversations"}}}}),
    "axolotl_reward.yaml": (None, 4, {"loss.name": "reward", "loss.center": 0.01, "loss.margin_weight": 0.0,
        "train.batch_size": 32, "data.path": "argilla/distilabel-intel-orca-dpo-pairs", "data.packing": False,
        "data.too_long": "truncate", "train.micro_batch_size": 2}),
    "swift_dpo.sh": (None, None, {"loss.name": "dpo", "parallel.ring_size": 2, "launch.nproc": 4, "train.batch_size": 8,
        "optim.weight_decay": 0.1, "data.too_long": "drop", "data.max_length": 8192, "loss.sft_weight": 0.1}),
    "swift_sft.sh": (None, None, {"loss.name": "sft", "launch.nproc": 2, "train.batch_size": 16,
        "data.max_length": 4096, "data.max_samples": 2000, "data.packing": True, "eval.before_training": False}),
    "swift_kto.sh": (None, None, {"loss.name": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0,
        "loss.undesirable_weight": 1.2, "train.batch_size": 16, "engine.name": "zero2", "data.too_long": "drop"}),
    "llamafactory_dpo.yaml": (None, 8, {"loss.name": "dpo", "train.batch_size": 64, "engine.name": "zero3",
        "data.max_length": 2048, "data.path": "data/dpo_en_demo.json", "data.columns": {"prompt": "conversations"},
        "adapter.rank": 8, "reference.name": "adapter"}),
    "llamafactory_sft.yaml": (None, 8, {"loss.name": "sft", "train.batch_size": 16, "engine.name": "zero3",
        "data.eval_size": 20, "train.eval_every": 100, "eval.before_training": True,
        "data.sources": {"source1": {"path": "data/identity.json"},
        "source2": {"path": "data/alpaca_en_demo.json", "columns": {"prompt": "ask"}}}}),
    "llamafactory_kto.yaml": (None, 8, {"loss.name": "kto", "loss.desirable_weight": 1.0,
        "loss.undesirable_weight": 1.5, "train.batch_size": 128, "data.path": "data/kto_en_demo.json",
        "data.columns": {"label": "kto_tag"}}),
}  # fmt: skip


def value(cfg: Config, key: str) -> Any:
    node = functools.reduce(getattr, key.split("."), cfg)
    return getattr(node, "name", node) if not isinstance(node, str | dict | list) else node


@pytest.mark.parametrize("file", EXAMPLES)
def test_an_example_of_theirs_composes(file: str, folder: Path) -> None:
    trainer, gpus, wanted = EXAMPLES[file]
    conv = converted(FOREIGN / file, trainer, gpus)
    cfg = experiment_of(conv)
    ours = {key: value(cfg, key) for key in wanted if key is not ABSENT}
    assert {ABSENT: set(), **wanted} == {ABSENT: {line.name for line in conv.lines[ABSENT]}, **ours}


@pytest.mark.parametrize("file", EXAMPLES)
def test_no_argument_is_dropped_silently(file: str, folder: Path) -> None:
    """Each is in the file that is written: behind a key, in the command, or with a reason."""
    conv = converted(FOREIGN / file, *EXAMPLES[file][:2])
    text = text_of(conv, "mine", file)
    assert unaccounted(conv) == set()
    assert all(f"  {line.name}: " in text for lines in conv.lines.values() for line in lines)
    assert not re.search("SECRET|hf_abcdefgh", text)


def command(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return warm.run("rlexp.convert", words.split(), folder)


def test_the_command_writes_an_experiment_that_trains(folder: Path) -> None:
    """From the file to a run: on CPU, with a small model and our own pairs in place of the hub's."""
    theirs = f"{FOREIGN}/trl_dpo.yaml --gpus 1 --trainer dpo"
    done = command(f"{theirs} --name mine", folder)
    assert done.returncode == 0, done.stderr
    assert "missing: neftune_noise_alpha, push_to_hub, grad_scale" in done.stderr
    assert done.stderr.endswith(
        "wrote conf/experiment/mine.yaml\ntrain by it: python -m rlexp +experiment=mine hydra.run.dir=Qwen2-0.5B-DPO\n"
    )
    for name in ("mine", "dog"):  # one that was written just now, and one of ours
        again = command(f"{theirs} --name {name}", folder)
        assert again.returncode == 1
        assert f"--name={name}: there is such an experiment, " in again.stderr
    assert not (folder / "conf" / "experiment" / "dog.yaml").exists()
    rows = [{"prompt": f"{n} and one?", "chosen": str(n + 1), "rejected": "no"} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = "data.path=rows.jsonl data.eval_split=null hydra.run.dir=run train.max_steps=1 train.eval_every=null"
    words = f"+experiment=mine model.path={saved(folder / 'small')} {small} launch.device=cpu checkpoint.export=false"
    run = warm.run("rlexp", words.split(), folder)
    assert run.returncode == 0, run.stderr
    assert "batch 16 = 1 replica × micro-batch 2 × 8 accumulation steps" in run.stdout + run.stderr


def test_what_cannot_run_as_it_is_says_why(tmp_path: Path) -> None:
    done = command(f"{FOREIGN}/trl_grpo.yaml --trainer grpo", tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("# @package _global_")
    assert "it does not run: reward.function=rewards:accuracy_reward: there is no module rewards" in done.stderr
    wrong = command("nothing.yaml", tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr == "rlexp: nothing.yaml: cannot be read (No such file or directory). Give a file.\n"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_pages_have_the_rules(framework: str) -> None:
    page = (coming_from.FOLDER / coming_from.name_of(framework)).read_text(encoding="utf-8")
    assert page == coming_from.page_of(framework), "run: python -m tests.helpers.coming_from"


def test_the_example_of_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    page = (coming_from.ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    theirs, ours = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "recipe.yaml"
    file.write_text(theirs, encoding="utf-8")
    assert text_of(converted(file, "dpo", 8), "mine", file.name, verbose=False) == ours
