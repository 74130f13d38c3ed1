"""What is to be evaluated, on which ranks, and what comes of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf, open_dict

from rlexp.base.engine_facts import ENGINES
from rlexp.base.errors import CheckpointError, ConfigError, UserError
from rlexp.base.file_hashes import files_of
from rlexp.config import sizes
from rlexp.config.checks.across_fields import refuse_nothing_held_out
from rlexp.config.load import OF_CURVE, composed, composed_like, from_hydra, refuse_other_groups
from rlexp.config.options import literals
from rlexp.config.resolvers import draws
from rlexp.config.schema import Config
from rlexp.config.schema.data import SourceConfig
from rlexp.launch import run_folder
from rlexp.launch.joining import prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.launch.preflight_check import laid_out
from rlexp.run_files.checkpoint_folder import named, read_position

Result = TypeVar("Result")
COLOCATED = {"mode": "colocated", "sampling_ranks": 0}
KEYS = {each.name for each in fields(SourceConfig)}
OF_A_SET = {"subset": None, "revision": None, "streaming": False}  # and not of a file
UNREWARDED = {"name": "rule", "rule": "length"}  # a reward that fits any rows, and runs no code


@dataclass(frozen=True)
class EvalJob:
    """What to evaluate: the configuration's model, or the newest whole checkpoint of a folder."""

    cfg: Config
    folder: Path | None = None  # a run's, or a checkpoint's


@dataclass(frozen=True)
class Evaluation:
    checkpoint: Path | None
    step: int  # of the checkpoint; 0 for a model
    values: dict[str, float]  # as a row has them
    held_out: int
    kind: str  # the name of one example
    layout: str


def job_of(words: Sequence[str]) -> EvalJob:
    """Compose an evaluation. Rows must be held out."""
    job = composed_job(words, "rlexp.eval")
    refuse_nothing_held_out(job.cfg, "rlexp.eval", "name another data set")
    return job


def composed_job(words: Sequence[str], command: str, *, reference: bool = False, rewarded: bool = True) -> EvalJob:
    """Compose the configuration: with a folder among the words, on the ground of the run's own. `reference`: a loss
    that draws keeps its reference model. Without `rewarded`, no answer gets a score."""
    folders, overrides = ([word for word in words if is_folder(word) is wanted] for wanted in (True, False))
    if len(folders) > 1:
        raise ConfigError(f"{' '.join(folders)}: is more than one folder. Give one run or checkpoint, and key=value.")
    if sizes.joined_world() is not None:
        raise ConfigError(
            f"{command}: starts its own ranks on this machine, and torchrun or srun has already started some. Run it "
            f"once, without them."
        )
    if folders:
        job = job_of_folder(folder_of(folders[0]), overrides, reference=reference, rewarded=rewarded)
    else:
        job = EvalJob(for_evaluation(composed(overrides), reference=reference))
    if job.cfg.rollout.sampling_ranks:
        raise ConfigError(
            f"rollout.sampling_ranks={job.cfg.rollout.sampling_ranks}: an evaluation generates its answers on the "
            f"ranks that would train. Give rollout.mode=colocated rollout.sampling_ranks=0."
        )
    return job


def is_folder(word: str) -> bool:
    """Return whether a word names a folder, whose name may look like a key's."""
    return "=" not in word or os.path.isdir(os.path.expanduser(word))  # which refuse no word, however long


def folder_of(word: str) -> Path:
    return Path(os.path.expanduser(word))  # Path.expanduser raises for `~data`, which is no user's home


def job_of_folder(folder: Path, overrides: Sequence[str], *, reference: bool = False, rewarded: bool = True) -> EvalJob:
    given = {each.partition("=")[0] for each in overrides}
    if "model.freeze" in given:
        raise ConfigError(
            "model.freeze: beside a run or checkpoint it would say what that run trained, and an evaluation trains "
            "nothing. Leave it out."
        )
    checkpoints = named(folder)
    config = config_in(checkpoints)
    refuse_other_groups(config)
    for group in ("model", "reference"):  # a hub model's branch may have moved since the run was started
        commit = run_folder.commits(checkpoints[0]).get(f"{group}.path")
        if commit is not None and not given & {group, f"{group}.path", f"{group}.revision"}:
            config[group]["revision"] = commit
    config["rollout"] |= COLOCATED  # what is drawn of held-out prompts does not depend on it
    if not rewarded:
        config["reward"] = UNREWARDED
    try:
        like = composed_like(config, overrides)
        if "eval.buckets" not in given and not draws(like.loss.name):
            stored = config.get("eval")
            like.eval.buckets = literals(stored.get("buckets", []) if isinstance(stored, Mapping) else [])
        return EvalJob(for_evaluation(like, reference=reference), folder)
    except UserError as error:
        values = {f"{group}.{leaf}": value for group in OF_CURVE for leaf, value in config.get(group, {}).items()}
        blamed = [key for key, value in values.items() if str(error).startswith(f"{key}={value}:")]
        if not blamed or blamed[0] in given:
            raise
        raise type(error)(f"{error} The run in {folder} had this value; {blamed[0]}=VALUE replaces it.") from None


def config_in(checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Return the configuration of the newest checkpoint in which it can be read: a later one may be damaged."""
    for path in checkpoints[:-1]:
        try:
            return _config_in(path)
        except CheckpointError:
            continue
    return _config_in(checkpoints[-1])


def _config_in(checkpoint: Path) -> dict[str, Any]:
    config = dict(read_position(checkpoint).get("config", {}))
    if not isinstance(config.get("rollout"), Mapping) or not isinstance(config.get("model"), Mapping):
        raise CheckpointError(f"{checkpoint}: has no configuration that rlexp has written.")
    return config


def for_evaluation(composed: DictConfig, *, reference: bool = False) -> Config:
    """Leave out what training alone needs, and check the rest."""
    fit_layout(composed)
    hold_out_alone(composed)
    if not reference and draws(composed.loss.name):  # a model to compare with is not asked of held-out prompts
        composed.reference.path = composed.reference.revision = None
    return from_hydra(composed)


# ---- the ranks, also of other commands that look at a trained model ----


def on_ranks(work: Callable[..., Result], job: Any) -> Result:
    """Run `work` on ranks of this machine, with the job and an empty folder, and return what rank 0 returns."""
    job = replace(job, cfg=(cfg := laid_out(job.cfg)))
    prepare_environment(cfg.launch)
    deepspeed = ("deepspeed",) if ENGINES[cfg.engine.name.value].loads_pieces else ()
    with tempfile.TemporaryDirectory(prefix="rlexp-eval-") as folder:
        return run_ranks(
            work, cfg.parallel.world_size, (job, folder), device=cfg.launch.device.value,
            preload=(*PRELOAD, *deepspeed),
        )[0]  # fmt: skip


# ---- what only training needs is not asked for ----


def fit_layout(cfg: DictConfig) -> None:
    """Let the train batch, and the rollout of which it is a part, fit the layout: an evaluation uses neither."""
    for key, resolver, given in (
        ("train.batch_size", "rlexp_fitting_batch", "${train.micro_batch_size},${parallel.dp_size}"),
        ("rollout.batch_size", "rlexp_fitting_rollout", "${rollout.n_samples},${train.batch_size}"),
    ):
        OmegaConf.update(cfg, key, f"${{{resolver}:{OmegaConf.select(cfg, key)},{given}}}")


def hold_out_alone(cfg: DictConfig) -> None:
    """Let rows that are held out in a place of their own be enough: those to train on need not be there."""
    data = cfg.data
    if "eval_path" not in data:
        return
    if OmegaConf.is_missing(data, "path") and data.eval_path is None:
        raise ConfigError("data.eval_path: has no value. Give the rows to evaluate: data.eval_path=FILE.")
    sources = data.get("sources") or {}
    for source in (data, *(each for each in sources.values() if isinstance(each, DictConfig))):
        place = source.get("eval_path")
        if isinstance(place, str):  # else none, or one that is refused where sources are checked
            # A set's split, subset and revision may be of the rows to train on, or of these.
            of_rows = {"split": "train"} | (OF_A_SET if files_of(place) else {})
            with open_dict(source):
                source.update({"path": place} | {key: value for key, value in of_rows.items() if key in source})
    held_out = {name: each for name, each in sources.items() if not _trained_on_alone(each)}
    if held_out:
        data.sources = held_out


def _trained_on_alone(source: Any) -> bool:
    """Return whether no row of a source is held out. One that is not written as it should be is refused later."""
    return (
        isinstance(source, DictConfig) and source.keys() <= KEYS and not (source.keys() & {"eval_path", "eval_split"})
    )
