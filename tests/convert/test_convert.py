"""`python -m rlexp.convert`: files of other trainers become experiments that compose, and nothing is dropped silently.

The files in tests/files/foreign/ have the arguments of the trainers' own examples.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.keys import all_keys
from rlexp.convert.conversion import NOTHING, Conversion, ConvertError
from rlexp.convert.experiment import composed, overrides, text_of
from rlexp.convert.frameworks import FRAMEWORKS, converted
from rlexp.convert.read import plain, read
from rlexp.convert.rules import Fate
from rlexp.convert.trl import RULES
from tests.helpers import coming_from, warm
from tests.helpers.models import saved
from tests.helpers.paths import FILES

FOREIGN = FILES / "foreign"
# For each file: the trainer and the GPUs, where it does not say them, and what must come of it.
GIVEN: dict[str, tuple[str | None, int | None]] = {
    "trl_dpo.yaml": ("dpo", 8), "trl_grpo.yaml": ("grpo", None), "trl_gspo.sh": (None, None),
    "trl_rloo.yaml": (None, None), "trl_sft.sh": (None, None), "trl_kto.yaml": (None, 8), "trl_reward.sh": (None, 4),
    "openrlhf_dpo_ring.sh": (None, 8), "openrlhf_dapo.sh": (None, None), "openrlhf_ppo_slurm.sh": (None, None),
    "openrlhf_sft.sh": (None, 8), "openrlhf_rm.sh": (None, None),
    "axolotl_dpo.yaml": (None, 8), "axolotl_sft.yaml": (None, 8), "axolotl_reward.yaml": (None, 4),
    "swift_dpo.sh": (None, None), "swift_sft.sh": (None, None), "swift_kto.sh": (None, None),
    "llamafactory_dpo.yaml": (None, 8), "llamafactory_sft.yaml": (None, 8), "llamafactory_kto.yaml": (None, 8),
}  # fmt: skip
EXPECTED: dict[str, dict[str, Any]] = {
    "trl_dpo.yaml": {
        "loss.name": "dpo", "loss.beta": 0.1, "train.batch_size": 128, "train.micro_batch_size": 2, "train.grad_acc": 8,
        "train.max_steps": 1000, "train.epochs": None, "train.eval_every": 50, "train.precision": "bf16", "seed": 42,
        "data.max_length": 1024, "data.too_long": "truncate", "data.eval_split": "test", "data.drop_last": False,
        "optim.lr": 5e-7, "memory.checkpointing": True, "checkpoint.save_every": "500", "logger.name": "none",
        "adapter.name": "none", "reference.name": "model",
    },
    "trl_grpo.yaml": {
        "loss.name": "grpo", "loss.beta": 0.0, "loss.normalize": "token", "engine.name": "zero2", "train.epochs": 3,
        "train.batch_size": 32, "rollout.batch_size": 4, "rollout.n_samples": 8, "rollout.minibatches": 1,
        "reward.function": "rewards:accuracy_reward",
    },
    "trl_gspo.sh": {
        "loss.name": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4, "loss.normalize": "sequence",
        "engine.name": "zero3", "train.batch_size": 128, "rollout.batch_size": 64, "rollout.minibatches": 4,
        "rollout.max_new_tokens": 1024, "reward.name": "sum", "adapter.targets": ["q_proj", "v_proj"],
        "adapter.rank": 16, "adapter.alpha": 32.0, "adapter.dropout": 0.0,
    },
    "trl_rloo.yaml": {
        "loss.name": "rloo", "loss.beta": 0.03, "train.batch_size": 2048, "rollout.batch_size": 2048,
        "rollout.n_samples": 2, "rollout.minibatches": 2, "rollout.engine": "vllm", "reward.path": "org/reward",
    },
    "trl_sft.sh": {
        "loss.name": "sft", "optim.lr": 2e-5, "train.epochs": 1, "train.batch_size": 64, "train.eval_every": 100,
        "eval.before_training": True, "data.eval_split": "test", "data.max_length": 1024, "data.too_long": "truncate",
        "memory.checkpointing": True, "data.shuffle": True, "checkpoint.best_metric": "eval/mean_token_accuracy",
        "adapter.rank": 32, "adapter.alpha": 16.0, "adapter.targets": ["q_proj", "v_proj"],
    },
    "trl_kto.yaml": {
        "loss.name": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0, "loss.undesirable_weight": 1.33,
        "optim.lr": 5e-7, "train.batch_size": 32, "data.shuffle": False, "data.too_long": "truncate",
        "data.unpair": False, "logger.name": "wandb", "adapter.name": "lora", "adapter.targets": [],
        "reference.name": "adapter",
    },
    "trl_reward.sh": {
        "loss.name": "reward", "loss.center": 0.01, "loss.margin_weight": 1.0, "optim.lr": 1e-5, "launch.nproc": 4,
        "data.max_length": 2048, "data.too_long": "drop", "train.eval_every": 50,
        "model.chat_template": "template.jinja",
    },
    "openrlhf_dpo_ring.sh": {
        "loss.name": "dpo", "parallel.ring_size": 4, "parallel.dp_size": 2, "train.batch_size": 256,
        "train.grad_acc": 128,
        "engine.name": "zero3", "data.max_length": 8192, "optim.betas": [0.9, 0.95], "optim.lr": 5e-7,
        "checkpoint.save_every": None, "logger.name": "wandb", "data.packing": True,
    },
    "openrlhf_sft.sh": {
        "loss.name": "sft", "parallel.ring_size": 2, "train.batch_size": 256, "train.micro_batch_size": 2,
        "train.epochs": 1, "data.columns": {"prompt": "question", "completion": "response"},
        "data.max_samples": 500000, "data.template": "never", "data.packing": True, "optim.lr": 5e-6,
    },
    "openrlhf_rm.sh": {
        "loss.name": "reward", "loss.margin_weight": 1.0, "loss.center": 0.0, "launch.nproc": 8,
        "train.batch_size": 256, "data.max_length": 8192, "engine.name": "zero3", "optim.lr": 9e-6,
    },
    "openrlhf_dapo.sh": {
        "loss.name": "grpo", "loss.kl_in": "loss", "loss.kl": "k3", "loss.beta": 1e-3, "loss.clip_high": 0.27,
        "loss.filter": True, "loss.normalize": "token", "rollout.batch_size": 128, "rollout.n_samples": 8,
        "rollout.minibatches": 8, "checkpoint.save_every": "160", "data.columns": {"prompt": "context_messages"},
        "reward.function": "reward_func:rewards", "data.max_samples": 20000,
    },
    "openrlhf_ppo_slurm.sh": {
        "loss.name": "ppo", "loss.whiten": True, "loss.lam": 1.0, "loss.value_clip": 0.5, "loss.value_lr": 9e-6,
        "loss.kl_in": "reward", "loss.kl_target": None, "launch.nproc": 4, "launch.nodes": 2,
        "engine.offload": "optimizer",
        "data.max_length": 1536, "rollout.max_new_tokens": 512, "rollout.minibatches": 8,
    },
    "axolotl_dpo.yaml": {
        "loss.name": "dpo", "parallel.ring_size": 4, "train.batch_size": 16, "train.micro_batch_size": 2,
        "data.columns": {"prompt": "conversation"}, "optim.lr": 2e-4, "optim.decay": "cosine", "train.epochs": 4,
    },
    "axolotl_sft.yaml": {
        "loss.name": "sft", "parallel.ring_size": 2, "train.batch_size": 32, "train.max_steps": 200,
        "data.packing": True, "data.eval_size": 100, "train.eval_every": 50, "optim.warmup_steps": 10,
        "data.sources": {"source1": {"path": "teknium/GPT4-LLM-Cleaned"},
                         "source2": {"path": "org/talks", "columns": {"messages": "conversations"}}},
    },
    "axolotl_reward.yaml": {
        "loss.name": "reward", "loss.center": 0.01, "loss.margin_weight": 0.0, "train.batch_size": 32,
        "data.path": "argilla/distilabel-intel-orca-dpo-pairs", "data.packing": False, "data.too_long": "truncate",
    },
    "swift_dpo.sh": {
        "loss.name": "dpo", "parallel.ring_size": 2, "launch.nproc": 4, "train.batch_size": 8, "engine.name": "zero3",
        "optim.weight_decay": 0.1, "data.too_long": "drop", "data.max_length": 8192, "loss.sft_weight": 0.1,
    },
    "swift_sft.sh": {
        "loss.name": "sft", "launch.nproc": 2, "train.batch_size": 16, "data.max_length": 4096, "optim.lr": 1e-5,
        "data.max_samples": 2000, "data.packing": True, "eval.before_training": False,
    },
    "swift_kto.sh": {
        "loss.name": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0, "loss.undesirable_weight": 1.2,
        "train.batch_size": 16, "engine.name": "zero2", "data.too_long": "drop",
    },
    "llamafactory_dpo.yaml": {
        "loss.name": "dpo", "train.batch_size": 64, "engine.name": "zero3", "data.max_length": 2048,
        "data.path": "data/dpo_en_demo.json", "data.columns": {"prompt": "conversations"},
        "adapter.rank": 8, "adapter.alpha": 16.0, "adapter.targets": [], "reference.name": "adapter",
    },
    "llamafactory_sft.yaml": {
        "loss.name": "sft", "train.batch_size": 16, "engine.name": "zero3", "data.eval_size": 20,
        "train.eval_every": 100, "eval.before_training": True,
        "data.sources": {"source1": {"path": "data/identity.json"},
                         "source2": {"path": "data/alpaca_en_demo.json", "columns": {"prompt": "ask"}}},
    },
    "llamafactory_kto.yaml": {
        "loss.name": "kto", "loss.beta": 0.1, "loss.desirable_weight": 1.0, "loss.undesirable_weight": 1.5,
        "train.batch_size": 128, "data.path": "data/kto_en_demo.json", "data.columns": {"label": "kto_tag"},
    },
}  # fmt: skip
ABSENT: dict[str, set[str]] = {
    "trl_dpo.yaml": {"neftune_noise_alpha", "push_to_hub", "grad_scale"},
    "trl_grpo.yaml": set(),
    "trl_gspo.sh": set(),
    "trl_rloo.yaml": {"hub_token", "push_to_hub", "vllm_importance_sampling_mode"},
    "trl_sft.sh": {"eos_token"},
    "trl_kto.yaml": set(),
    "trl_reward.sh": set(),
    "openrlhf_dpo_ring.sh": set(),
    "openrlhf_sft.sh": set(),
    "openrlhf_rm.sh": set(),
    "openrlhf_dapo.sh": {"vllm.tensor_parallel_size"},
    "openrlhf_ppo_slurm.sh": {"normalize_reward"},
    "axolotl_dpo.yaml": {"optimizer"},
    "axolotl_sft.yaml": set(),
    "axolotl_reward.yaml": set(),
    "swift_dpo.sh": set(),
    "swift_sft.sh": set(),
    "swift_kto.sh": set(),
    "llamafactory_dpo.yaml": set(),
    "llamafactory_sft.yaml": set(),
    "llamafactory_kto.yaml": set(),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the rewards and rows that the files name are."""
    function = "def {}(prompts, answers, rows):\n    return [0.0] * len(answers)\n"
    (tmp_path / "rewards.py").write_text(function.format("accuracy_reward") + function.format("think_format_reward"))
    (tmp_path / "reward_func.py").write_text(function.format("rewards"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        json.dumps({
            "dpo_en_demo": {"file_name": "dpo_en_demo.json", "columns": {"messages": "conversations"}},
            "identity": {"file_name": "identity.json"},
            "alpaca_en_demo": {"file_name": "alpaca_en_demo.json", "columns": {"prompt": "ask"}},
            "kto_en_demo": {"file_name": "kto_en_demo.json", "columns": {"kto_tag": "kto_tag"}},
        })
    )  # fmt: skip
    for name in ("dpo_en_demo", "identity", "alpaca_en_demo", "kto_en_demo"):
        (tmp_path / "data" / f"{name}.json").write_text("[]")
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def conversion(file: str) -> Conversion:
    return converted(FOREIGN / file, *GIVEN[file])


def value(cfg: Config, key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        node = getattr(node, part)
    return getattr(node, "name", node) if not isinstance(node, str | dict | list) else node


@pytest.mark.parametrize("file", GIVEN)
def test_an_example_of_theirs_composes(file: str, folder: Path) -> None:
    conv = conversion(file)
    cfg = composed(text_of(conv, "mine", file), "mine", overrides(conv))
    assert {key: value(cfg, key) for key in EXPECTED[file]} == EXPECTED[file]
    assert {line.name for line in conv.lines[Fate.ABSENT]} == ABSENT[file]


@pytest.mark.parametrize("file", GIVEN)
def test_no_argument_is_dropped_silently(file: str, folder: Path) -> None:
    """Each is in the file that is written: behind a key, in the command, or with a reason."""
    conv = conversion(file)
    text = text_of(conv, "mine", file)
    origins = " ".join(each.origin for each in (*conv.values.values(), *conv.choices.values(), *conv.command.values()))
    for name in conv.given:
        told = {*conv.off, *(line.name for lines in conv.lines.values() for line in lines)}
        assert name in told or re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", origins), name
    assert not [line.name for lines in conv.lines.values() for line in lines if line.why == NOTHING]
    assert all(f"  {line.name}: " in text for lines in conv.lines.values() for line in lines)
    assert "SECRET" not in text
    assert "hf_abcdefgh" not in text


def test_every_key_that_a_rule_names_exists() -> None:
    """So that a key which is renamed is renamed here too."""
    keys = {*all_keys(), *KINDS, "hydra.run.dir", "engine", "optim", "logger"}
    for framework in FRAMEWORKS.values():
        for rule in framework.rules:
            for each in re.findall(r"[a-z_]+(?:\.[a-zA-Z_]+)+", rule.key):
                name = re.sub(r"\.(sources|terms)\.NAME.*|(\.columns|\.template_options)\..*", r".\1\2", each).replace(
                    "..", "."
                )
                assert name in keys, (rule.names, each)


# A file that leads to each loss: the trainer, and what such a file says beside the model and the rows.
LEADING: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"loss_type": "sigmoid"}),
    "dpo_norm": ("dpo", {"loss_type": "sigmoid_norm"}),
    "mpo": ("dpo", {"loss_type": "[sigmoid, bco_pair, sft]", "loss_weights": "[0.8, 0.2, 1.0]"}),
    **{
        name: ("dpo", {"loss_type": name, "label_smoothing": 0.1})
        for name in (
            "ipo",
            "apo_zero",
            "apo_down",
            "bco_pair",
            "hinge",
            "robust",
            "aot",
            "aot_unpaired",
            "exo_pair",
            "nca_pair",
            "sppo_hard",
            "discopop",
        )
    },
    "cpo": ("cpo", {"cpo_alpha": 0.5}),
    "simpo": ("cpo", {"loss_type": "simpo"}),
    "orpo": ("orpo", {}),
    "sft": ("sft", {"loss_type": "nll"}),
    "kto": ("kto", {"desirable_weight": 1.2}),
    "bco": ("bco", {}),
    "apo_zero_unpaired": ("kto", {"loss_type": "apo_zero_unpaired"}),
    "reward": ("reward", {"center_rewards_coefficient": 0.01}),
    "ppo": ("ppo", {"reward_model_path": "org/reward"}),
    "grpo": ("grpo", {"scale_rewards": "group"}),
    "dr_grpo": ("grpo", {"scale_rewards": "none"}),
    "gspo": ("grpo", {"importance_sampling_level": "sequence"}),
    "rloo": ("rloo", {}),
    "reinforce_pp": ("openrlhf", {"advantage_estimator": "reinforce"}),
}
# Keys that no argument of another trainer sets. A new key belongs into a rule of theirs, or into this list.
OURS_ALONE = {
    "adapter": "name",
    "checkpoint": "export_dtype host_memory_gib",
    "data": "bad_rows cache digits fill name revision seed share_prefix size unpair",
    "engine": "chosen name overrides",
    "eval": "buckets",
    "launch": (
        "collectives grace_seconds interface preflight rank_cpus rank_memory_gb ranks_per_gpu time_limit torch_threads"
    ),
    "logger": "artifacts axes baseline mode name tags",
    "loss": "kl_horizon name whiten",
    "memory": "count_tensors",
    "model": "freeze fused gguf heads hidden_size intermediate_size kv_heads layers name seed window",
    "optim": "name",
    "parallel": "backend chosen dp_size transport ulysses_size world_size",
    "reference": "name revision",
    "resume": "force mode",
    "reward": "ignore_case max_length most name pattern precision rule target text timeout_seconds trust_remote_code "
    "workers",
    "rollout": "micro_batch_size micro_batch_tokens sampling_ranks stop",
    "train": "grad_acc max_tokens_per_micro_batch stop_after",
}
# data_seed: theirs shuffles, ours is for generated rows. alpha: theirs is AlphaPO's, ours is an adapter's.
ALIKE = {"data_seed", "alpha"}


@pytest.mark.parametrize("loss", KINDS["loss"])
def test_a_file_leads_to_every_loss(loss: str, folder: Path) -> None:
    """A loss that is new here has a name in other trainers too: one of their files must lead to it."""
    assert loss in LEADING, f"no file of another trainer leads to loss={loss}: give it one in LEADING, and a rule"
    trainer, said = LEADING[loss]
    if trainer == "openrlhf":
        words = ["--pretrain org/model --prompt_data org/prompts --remote_rm_url reward_func.py --num_gpus 8"]
        words += [f"--{name} {value}" for name, value in said.items()]
        (folder / "theirs.sh").write_text(f"python -m openrlhf.cli.train_ppo_ray {' '.join(words)}\n")
        conv = converted(folder / "theirs.sh", None, 8)
    else:
        lines = ["model_name_or_path: org/model", "dataset_name: org/rows", "reward_funcs: rewards.accuracy_reward"]
        lines += [f"{name}: {value}" for name, value in said.items()]
        (folder / "theirs.yaml").write_text(
            "\n".join(lines if trainer in ("grpo", "rloo") else [*lines[:2], *lines[3:]])
        )
        conv = converted(folder / "theirs.yaml", trainer, 8)
    assert conv.choices["loss"].value == loss
    assert composed(text_of(conv, "mine", "theirs"), "mine", overrides(conv)).loss.name == loss


def test_every_key_is_in_a_rule_or_ours_alone() -> None:
    named = {key.partition("=")[0] for each in FRAMEWORKS.values() for rule in each.rules
             for key in re.split(", | or ", rule.key)}  # fmt: skip
    named |= {"data.columns", "data.template_options", "data.sources", "reward.terms"} & {
        ".".join(key.split(".")[:2]) for key in named
    }
    keys = {key for key in all_keys() if "." in key and not key.startswith("hardware.")}
    ours = {f"{group}.{leaf}" for group, leaves in OURS_ALONE.items() for leaf in leaves.split()}
    assert keys - named == ours
    assert not ours & named


def test_what_is_called_absent_is_absent() -> None:
    """It fails where rlexp has come to have a key of the name that a rule calls missing."""
    ours = {"_".join(key.split(".")[start:]) for key in all_keys() for start in (0, 1)}
    for each in FRAMEWORKS.values():
        names = {name.replace(".", "_") for rule in each.rules if rule.fate is Fate.ABSENT for name in rule.names}
        assert names & ours <= ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_every_argument_of_trl_has_a_rule(name: str) -> None:
    trl = pytest.importorskip("trl")
    known = {each for rule in RULES if not rule.trainers or name.lower() in rule.trainers for each in rule.names}
    kinds = (getattr(trl, f"{name}Config"), trl.ScriptArguments, trl.ModelConfig)
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} <= known


@pytest.mark.parametrize(
    ("file", "trainer", "gpus", "said"),
    [
        ("trl_grpo.yaml", None, None, "does not say which trainer it is for. Say --trainer dpo, or one of "),
        ("trl_dpo.yaml", "dpo", None, "does not say how many GPUs there are. Say how many: --gpus=8."),
        (
            "trl_grpo.yaml",
            "gkd",
            None,
            "is for TRL's gkd, or one of that name in a fork, which rlexp does not have. It has dpo, ",
        ),
        ("openrlhf_dapo.sh", "dpo", None, "--trainer=dpo: "),
        ("axolotl_dpo.yaml", None, 6, "context_parallel_size=4: does not divide the 6 GPUs. "),
        ("llamafactory_dpo.yaml", None, 8, "dataset_info.json, and there is none here"),
    ],
)
def test_what_is_missing_is_said(file: str, trainer: str | None, gpus: int | None, said: str, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConvertError, match=re.escape(said)):
        converted(FOREIGN / file, trainer, gpus)


@pytest.mark.parametrize("content", ["", "just words", "[1, 2]", "a: [1", "key: value", "python train.py --lr 3", "\0"])
def test_an_unknown_file_is_one_message(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content, encoding="utf-8")
    with pytest.raises(ConvertError, match="is none of the files that can be converted"):
        read(tmp_path / "file")


def test_texts_that_stand_for_numbers() -> None:
    assert [plain(each) for each in ("5e-7", "3", "True", "none", "train[:5%]", "-1", "1.0")] == [
        5e-7, 3, True, None, "train[:5%]", -1, 1.0
    ]  # fmt: skip


def test_a_share_of_the_steps_is_counted_where_they_are_known(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    lines = [
        "model_name_or_path: org/model",
        "dataset_name: org/pairs",
        "warmup_ratio: 0.1",
        "max_steps: 250",
        "beta: 0.2",
    ]
    file.write_text("\n".join([*lines, "save_steps: 0.2", "num_processes: 2"]))
    conv = converted(file, "dpo", None)
    assert conv.values["optim.warmup_ratio"].value == 0.1
    assert conv.values["checkpoint.save_every"].value == "50"
    file.write_text("\n".join([*lines[:3], "num_processes: 2", "num_train_epochs: 0.5"]))
    conv = converted(file, "dpo", None)
    assert {line.name for line in conv.lines[Fate.OTHER]} == {"num_train_epochs"}
    assert conv.values["train.epochs"].value == 1


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return warm.run("rlexp.convert", args, folder)


def test_the_command_writes_an_experiment_that_trains(folder: Path) -> None:
    """From the file to a run: on CPU, with a small model and our own pairs in place of the hub's."""
    done = command(folder, str(FOREIGN / "trl_dpo.yaml"), "--gpus", "1", "--trainer", "dpo", "--name", "mine")
    assert done.returncode == 0, done.stderr
    assert "missing: neftune_noise_alpha, push_to_hub, grad_scale" in done.stderr
    assert done.stderr.endswith(
        "wrote conf/experiment/mine.yaml\ntrain by it: python -m rlexp +experiment=mine hydra.run.dir=Qwen2-0.5B-DPO\n"
    )
    again = command(folder, str(FOREIGN / "trl_dpo.yaml"), "--gpus", "1", "--trainer", "dpo", "--name", "mine")
    assert again.returncode == 1
    assert "--name=mine: there is such an experiment, " in again.stderr
    ours = command(folder, str(FOREIGN / "trl_dpo.yaml"), "--name", "dog")
    assert "--name=dog: there is such an experiment, " in ours.stderr
    assert not (folder / "conf" / "experiment" / "dog.yaml").exists()
    rows = [{"prompt": f"{n} and one?", "chosen": str(n + 1), "rejected": "no"} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (f"model.path={saved(folder / 'small')}", "data.path=rows.jsonl", "data.eval_split=null",
             "hydra.run.dir=run", "train.max_steps=1", "train.eval_every=null", "launch.device=cpu",
             "checkpoint.export=false")  # fmt: skip
    run = warm.run("rlexp", ["+experiment=mine", *small], folder)
    assert run.returncode == 0, run.stderr
    assert "batch 16 = 1 replica × micro-batch 2 × 8 accumulation steps" in run.stdout + run.stderr


def test_what_cannot_run_as_it_is_says_why(tmp_path: Path) -> None:
    done = command(tmp_path, str(FOREIGN / "trl_grpo.yaml"), "--trainer", "grpo")
    assert done.returncode == 1
    assert done.stdout.startswith("# @package _global_")
    assert (
        "as it is, it does not run: reward.function=rewards:accuracy_reward: there is no module rewards" in done.stderr
    )
    wrong = command(tmp_path, "nothing.yaml")
    assert (wrong.returncode, wrong.stderr) == (1, "rlexp: nothing.yaml: cannot be read (No such file or directory).\n")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_pages_have_the_rules(framework: str) -> None:
    page = coming_from.FOLDER / coming_from.name_of(framework)
    wanted = coming_from.page_of(framework)
    assert page.read_text(encoding="utf-8") == wanted, "run: python -m tests.helpers.coming_from"


def test_the_example_of_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    page = (coming_from.ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    theirs, ours = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    file = tmp_path / "recipe.yaml"
    file.write_text(theirs, encoding="utf-8")
    assert text_of(converted(file, "dpo", 8), "mine", file.name, verbose=False) == ours
