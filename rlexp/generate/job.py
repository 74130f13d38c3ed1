"""What is to be generated: by which weights, to which prompts, beside whose answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rlexp.base.errors import CheckpointError, ConfigError
from rlexp.config.checks.across_fields import refuse_nothing_held_out
from rlexp.config.options import quoted
from rlexp.config.resolvers import draws
from rlexp.config.schema import Config, LoraConfig
from rlexp.config.schema.losses import RewardModelConfig
from rlexp.config.schema.rollouts import RolloutEngine
from rlexp.eval.job import composed_job, config_in, folder_of, is_folder
from rlexp.run_files.checkpoint_folder import named

COMMAND = "rlexp.generate"
ROWS = 4  # held-out rows that are answered, where nobody says how many
NEW_TOKENS = 256  # of an answer at most, where neither the user nor the run says how many
OF_MODEL = "config.json"
OF_ADAPTER = "adapter_config.json"


class Beside(Enum):
    """Whose answers are shown beside those of the trained model."""

    start = "start"  # the weights before training, or the model without its adapter
    reference = "reference"  # the model in reference.path
    none = "none"


@dataclass(frozen=True)
class GenerateJob:
    cfg: Config
    folder: Path | None  # a run's, or a checkpoint's; None: the configuration's model
    beside: Beside
    given: bool  # the prompts were typed or are in a file; else they are those of held-out rows
    rows: int | None  # the first so many; None: all
    room: int  # tokens for an answer that data.max_length holds beside a prompt; which rows are held out depends on it


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: list[int]
    stopped: bool  # by a token or text that ends an answer, not by rollout.max_new_tokens


@dataclass(frozen=True)
class Answered:
    """A prompt with its answers."""

    origin: str
    prompt: str
    answers: list[Reply]
    beside: list[Reply]  # of the start, or of the reference


def job_of(
    words: Sequence[str],
    folder: Path,
    *,
    prompts: Sequence[str] = (),
    file: Path | None = None,
    rows: int | None = None,
    samples: int | None = None,
    beside: Beside | None = None,
) -> GenerateJob:
    """Compose the configuration. `folder` is a temporary one, for prompts that are typed."""
    of_run = any(map(is_folder, words))
    if not of_run and not prompts and file is None and not any(word.startswith("data") for word in words):
        raise ConfigError(
            f"{COMMAND}: there is no prompt. Type one (--prompt TEXT), or name a file of prompts (--prompts FILE) or "
            f"of held-out rows (data.eval_path=FILE)."
        )
    asked = data_of(folder, prompts, file)
    try:
        job = composed_job([*words, *asked], COMMAND, reference=beside is Beside.reference, rewarded=False)
    except CheckpointError as error:
        raise CheckpointError(explained_folder(next(filter(is_folder, words)), str(error))) from None
    cfg, given = job.cfg, bool(asked)
    if isinstance(cfg.loss, RewardModelConfig):
        raise ConfigError(
            f"loss=reward: its model gives a score to an answer, and generates none. Give another run, or a model: "
            f"{COMMAND} model=hf model.path=FOLDER."
        )
    if not given:
        refuse_nothing_held_out(cfg, COMMAND, "type a prompt: --prompt TEXT")
    limited = any(word.startswith("rollout.max_new_tokens=") for word in words)
    room = room_of(cfg, job.folder)
    most = cfg.rollout.max_new_tokens if room or limited else NEW_TOKENS
    likeliest = {"n_samples": 1, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    how: dict[str, Any] = likeliest if samples is None else {"n_samples": samples}
    rollout = replace(cfg.rollout, engine=RolloutEngine.native, max_new_tokens=most, **how)
    data = replace(cfg.data, unpair=cfg.data.unpair and not given)
    return GenerateJob(
        replace(cfg, rollout=rollout, data=data), job.folder, beside_of(cfg, beside, of_run=of_run), given,
        rows or (None if given else ROWS), room,
    )  # fmt: skip


def room_of(cfg: Config, folder: Path | None) -> int:
    """Return the room for an answer that training had: not that of an answer whose limit is typed here, by which other
    rows would be dropped as too long, and so other rows held out."""
    if not draws(cfg.loss.name):
        return 0
    trained = {} if folder is None else config_in(named(folder)).get("rollout", {})
    return int(trained.get("max_new_tokens", cfg.rollout.max_new_tokens))


def data_of(folder: Path, prompts: Sequence[str], file: Path | None) -> list[str]:
    """Return the keys that name the prompts as held-out rows. Those of a text become rows in a file of this command's
    own, which is tokenized beside it."""
    if not all(map(str.strip, prompts)):
        raise ConfigError("--prompt: one is empty. Type a text.")
    if prompts:
        return _written(folder / "prompt", prompts)
    if file is None:
        return []
    if file.suffix != ".txt":
        return ["data=jsonl", f"data.eval_path={quoted(str(file))}"]
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--prompts={file}: cannot be read ({reason}). Give a text file, or rows.") from None
    if not any(map(str.strip, lines)):
        raise ConfigError(f"--prompts={file}: has no prompt. Write one on each line.")
    return _written(folder / file.name, lines)


def _written(place: Path, prompts: Sequence[str]) -> list[str]:
    """Write a row for each prompt, on its line, and return the keys that read them; a line without a text has none."""
    rows = (json.dumps({"prompt": prompt}) if prompt.strip() else "" for prompt in prompts)
    place.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return ["data=jsonl", f"data.eval_path={quoted(str(place))}", f"data.cache={quoted(str(place.parent))}",
            "data.workers=1", "data.columns={}"]  # fmt: skip


def explained_folder(folder: str, problem: str) -> str:
    """Add what to type instead of a folder that is no run with a checkpoint."""
    place = folder_of(folder)
    for each in (place, place / "model"):
        if (each / OF_ADAPTER).is_file():
            return f"{problem} {each} holds an adapter: model=hf model.path=NAME adapter=lora adapter.path={each}."
        if (each / OF_MODEL).is_file():
            return f"{problem} {each} holds a model: model=hf model.path={each}."
    return problem if not place.is_dir() else f"{problem} Give the folder that `python -m rlexp` printed."


def beside_of(cfg: Config, asked: Beside | None, *, of_run: bool) -> Beside:
    has_start = of_run or (isinstance(cfg.adapter, LoraConfig) and cfg.adapter.path is not None)
    if asked is Beside.start and not has_start:
        raise ConfigError(
            "--beside=start: a model alone has no other model that it started from. Give a run, or an adapter "
            "(adapter=lora adapter.path=FOLDER)."
        )
    if asked is Beside.reference and cfg.reference.path is None:
        raise ConfigError(
            "--beside=reference: reference.path has no value. Give the model to show beside: reference.path=FOLDER."
        )
    otherwise = Beside.none if cfg.reference.path is None else Beside.reference
    return asked or (Beside.start if has_start else otherwise)
