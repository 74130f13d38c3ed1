"""All keys of the schema, and the nearest one to a key that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence

from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.launcher_keys import LocalJobs, SlurmJobs

LAUNCHER = "hydra.launcher."
PAGE = "docs/keys.md"
APPENDED = ("experiment", "sweep")  # groups outside the defaults list
NAMED = 4  # of the options that have a key
GONE = {  # keys of older versions, with what stands for them now
    "model.suggested_lr": "is gone: optim.lr follows from the loss and from what is trained. Say optim.lr=RATE.",
}
# names of other trainers that spelling leads nowhere, or astray, by our key; their values mean the same here
_THEIRS = {
    "optim.lr": ("learning_rate",),
    "loss.beta": ("kl_coef", "pref_beta"),
    "model.path": ("base_model",),
    "data.path": ("dataset", "datasets", "dataset_name", "train_file"),
    "data.max_length": ("cutoff_len", "sequence_len"),
    "rollout.max_new_tokens": ("max_completion_length",),
    "rollout.n_samples": ("num_generations",),
    "train.eval_every": ("eval_steps",),
    "checkpoint.save_every": ("save_steps",),
    "checkpoint.keep_last": ("save_total_limit",),
    "adapter.rank": ("lora_r", "lora_rank"),
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.targets": ("lora_target_modules",),
    "parallel.ring_size": ("sequence_parallel_size", "context_parallel_size"),
    "hydra.run.dir": ("output_dir",),
}
THEIRS = {name: key for key, names in _THEIRS.items() for name in names}
_DECAY = "Say optim.decay=linear, cosine or constant."
_LOSS = "Say loss=OPTION, as loss=ipo."
_ZERO = "Say engine=zero1, zero2, zero3 or fsdp2."
_WANDB = "Say logger=wandb, or logger=none."
MEANT = {  # names of other trainers whose values mean something else here
    "lr_scheduler_type": _DECAY,
    "lr_scheduler": _DECAY,
    "per_device_train_batch_size": "Say train.batch_size=N, the samples of a step over all GPUs.",
    "gradient_accumulation_steps": "train.batch_size counts the samples of a step: micro-batch × accumulation × GPUs.",
    "loss_type": _LOSS,
    "rl": _LOSS,
    "bf16": "Say train.precision=bf16.",
    "torch_dtype": "Say train.precision=bf16 or fp32.",
    "use_peft": "Say adapter=lora.",
    "report_to": _WANDB,
    "use_wandb": _WANDB,
    "zero_stage": _ZERO,
    "deepspeed": _ZERO,
    "attn_implementation": "rlexp takes the fastest kernel; parallel.kernel=NAME chooses one.",
    "resume_from_checkpoint": "Say hydra.run.dir=FOLDER, the run's: it continues from its newest checkpoint.",
}


def all_keys() -> dict[str, tuple[str, ...]]:
    """Return each key with the options that have it (`data=jsonl`); with none if the key always exists."""
    keys: dict[str, tuple[str, ...]] = {}
    hints = typing.get_type_hints(Config)
    for top in dataclasses.fields(Config):
        keys[top.name] = ()
        if not dataclasses.is_dataclass(hints[top.name]):
            continue
        kinds = KINDS.get(top.name, {"": hints[top.name]})
        for kind, node in kinds.items():
            for leaf in dataclasses.fields(node):
                name = f"{top.name}.{leaf.name}"
                keys[name] = (*keys.get(name, ()), *([f"{top.name}={kind}"] if kind else []))
    every = {group: {f"{group}={kind}" for kind in kinds} for group, kinds in KINDS.items()}
    return {key: () if set(owners) == every.get(key.partition(".")[0]) else owners for key, owners in keys.items()}


def launcher_keys() -> list[str]:
    fields = [*dataclasses.fields(SlurmJobs), *dataclasses.fields(LocalJobs)]
    return list(dict.fromkeys(f"{LAUNCHER}{field.name}" for field in fields))


def about_unknown(key: str) -> str:
    """Explain in one line why a key cannot be set: where it belongs, or the nearest key."""
    if key.startswith(LAUNCHER):
        near = suggestion(key, launcher_keys()) or f" {PAGE} lists the keys of launchers."
        return f"{key}: no such key.{near} Give other options of sbatch in {LAUNCHER}additional_parameters."
    keys = all_keys()
    if key in GONE:
        return f"{key}: {GONE[key]}"
    if key in APPENDED:
        return f"{key}: is appended to the configuration: say +{key}=NAME."
    leaf = key.rpartition(".")[2]
    if not keys.get(key) and leaf in {**THEIRS, **MEANT}:
        return f"{key}: no such key. {MEANT.get(leaf) or f'rlexp calls it {THEIRS[leaf]}.'}"
    if keys.get(key):
        owners = keys[key]
        named = owners if len(owners) <= NAMED else (*owners[: NAMED - 1], f"{len(owners) - NAMED + 1} others")
        return f"{key}: belongs to {enumerated(named)}. Say {owners[0]} {key}=VALUE."
    group = key.partition(".")[0]
    which = f"all keys of {group}" if group in keys and group != key else "all keys"
    return f"{key}: no such key.{suggestion(key, [*keys, *APPENDED]) or f' {PAGE} lists {which}.'}"


def enumerated(names: Sequence[str]) -> str:
    """Write names as `one, two and three`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def suggestion(word: str, candidates: list[str]) -> str:
    """Find the nearest key by spelling: by the whole key, or by its last part if the group is wrong or missing."""
    others = [candidate for candidate in candidates if not word.startswith(f"{candidate}.") and word != candidate]
    own, likes = word.rpartition("."), difflib.get_close_matches(word, others, n=3, cutoff=0.6)
    # A group that both share says nothing of the key in it: train.foo is not near train.epochs.
    close = [
        each for each in likes if each.rpartition(".")[0] != own[0] or _alike(each.rpartition(".")[2], own[2]) >= 0.5
    ]
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(others)}  # of two groups, the first
    leaf = difflib.get_close_matches(own[2], list(leaves), n=1, cutoff=0.75)
    if leaf and (not close or _alike(word, close[0]) < 0.8):
        close = [leaves[leaf[0]]]
    return f" Did you mean {close[0]}?" if close else ""


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
