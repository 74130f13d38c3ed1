"""What is to be evaluated, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.checks.evaluation import refuse_nothing_held_out
from rlexp.config.load import compose_config, compose_like
from rlexp.config.schema import KINDS, Config
from rlexp.config.schema.losses import LossConfig
from rlexp.run_files.checkpoint_folder import named, read_position

FITTING = "train.batch_size='${rlexp_fitting_batch:${train.micro_batch_size},${parallel.dp_size}}'"
COLOCATED = {"mode": "colocated", "sampling_ranks": 0}


@dataclass(frozen=True)
class EvalJob:
    """What to evaluate: the configuration's model, or that of a checkpoint."""

    cfg: Config
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Evaluation:
    step: int  # of the checkpoint; 0 for a model
    values: dict[str, float]  # as a row has them
    held_out: int
    kind: str  # the name of one example
    layout: str


def on_any_layout(overrides: Sequence[str], loss: str) -> list[str]:
    """Let the train batch, which an evaluation does not use, fit the layout. That of a loss that draws is a part of a
    rollout, and stays. `loss` is the one that is taken if none is given."""
    given = dict(each.partition("=")[::2] for each in overrides)
    losses: dict[str, type[LossConfig]] = KINDS["loss"]
    if losses.get(given.get("loss", loss), LossConfig).draws:
        return list(overrides)
    return [*(each for each in overrides if not each.startswith("train.batch_size=")), FITTING]


def rows_alone(overrides: Sequence[str]) -> list[str]:
    """Let the held-out rows be enough: those to train on are not read."""
    given = {each.partition("=")[0] for each in overrides}
    enough = "data.eval_path" in given and "data.path" not in given
    return [*overrides, "data.path=${data.eval_path}"] if enough else list(overrides)


def job_of(words: Sequence[str]) -> EvalJob:
    """Compose the configuration: with a folder among the words, on the ground of the run's own."""
    folders, overrides = ([word for word in words if ("=" in word) is keyed] for keyed in (False, True))
    if len(folders) > 1:
        raise ConfigError(f"{' '.join(folders)}: is more than one folder. Give one run or checkpoint, and key=value.")
    if sizes.joined_world() is not None:
        raise ConfigError(
            "rlexp.eval: starts its own ranks on this machine, and torchrun or srun has already started some. Run it "
            "once, without them."
        )
    if not folders:
        job = EvalJob(compose_config(rows_alone(on_any_layout(overrides, "dpo"))))
    else:
        checkpoint = named(Path(folders[0]).expanduser())[0]
        config = read_position(checkpoint)["config"]
        config["rollout"] |= COLOCATED  # what is drawn of held-out prompts does not depend on it
        if config["data"]["name"] == "jsonl" and config["data"]["eval_path"]:  # the run's own file may be gone
            config["data"]["path"] = config["data"]["eval_path"]
        overrides = on_any_layout(overrides, config["loss"]["name"])
        job = EvalJob(compose_like(config, rows_alone(overrides)), checkpoint)
    if job.cfg.rollout.sampling_ranks:
        raise ConfigError(
            f"rollout.sampling_ranks={job.cfg.rollout.sampling_ranks}: an evaluation draws its answers on the "
            f"ranks that would train. Give rollout.mode=colocated rollout.sampling_ranks=0."
        )
    refuse_nothing_held_out(job.cfg, "rlexp.eval", "name another data set")
    return job
