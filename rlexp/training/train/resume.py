"""Save a run's position, and take it up again."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlexp.base.errors import CheckpointError
from rlexp.config.checks.micro_batches import at_once, shares
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.identity import ENDING, identity
from rlexp.config.load import to_plain
from rlexp.config.schema import LoraConfig, ModelConfig
from rlexp.config.schema.cadence import save_cadence
from rlexp.config.schema.models import Precision
from rlexp.config.sizes import ranks_of_machine
from rlexp.launch import run_folder
from rlexp.run_files.checkpoint_folder import METRICS, MODEL, POSITION, latest_first
from rlexp.run_files.metrics_jsonl import rewrite, write_lines
from rlexp.training.checkpoint.keeper import SCORE, Keeper
from rlexp.training.checkpoint.restore import restore
from rlexp.training.checkpoint.saver import Describe, Saver
from rlexp.training.engine.base import MOMENTS
from rlexp.training.model.export import describe_adapter, save_description
from rlexp.training.model.prepared import commit_of
from rlexp.training.sinks.console import say
from rlexp.training.sinks.jsonl import JsonlSink
from rlexp.training.train.loop import Position
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.schedule import warm_up_of
from rlexp.training.train.task import Task
from rlexp.training.world.objects import rank0_does

TASK, TASK_BEFORE = "task", "rollouts"  # the key of the task's part of a position, and its name in older checkpoints


def resume(task: Task, run_dir: Path) -> tuple[Position, str]:
    """Set engine, task and curve back to the newest checkpoint; return its position, and a note. A collective call."""
    run = task.run
    first = run.world.rank == 0
    restored = restore(run.cfg.resume.mode, run_dir, run.engine, run.world, say)
    if restored is None:
        again = first and (run_dir / METRICS).exists()
        if again:  # it ended before its first checkpoint
            rewrite(run_dir / METRICS, None, 0)
        return Position(), "  no checkpoint here yet: begins at step 1\n" if again else ""
    path, saved = restored
    position = Position(saved["step"], saved["total_tokens"])
    task.restore(path, saved_task(saved), position.step)
    keep_warm_up(task, saved)
    run = task.run
    if not first:
        return position, ""
    rewrite(run_dir / METRICS, path / METRICS, position.step)
    notes = [*_changes(run, saved), *run_folder.read(run_dir).get("forced", [])]
    return position, "".join(f"  {line}\n" for line in (f"continues from {path}, after step {position.step}", *notes))


def keep_warm_up(task: Task, saved: Mapping[str, Any]) -> None:
    """Keep the steps to which a share came when the run was started: of a longer run it would be more."""
    ratio, steps = task.run.cfg.optim.warmup_ratio, saved["schedule"]["warmup_steps"]
    if ratio is not None and ratio == saved["config"]["optim"].get("warmup_ratio"):
        task.run = dataclasses.replace(task.run, schedule=dataclasses.replace(task.run.schedule, warmup_steps=steps))


def saved_task(saved: Mapping[str, Any]) -> Any:
    """Return the task's part of a checkpoint's position."""
    return saved.get(TASK, saved.get(TASK_BEFORE))


def versions_of(task: Task) -> dict[str, str]:
    """Return the commits of the hub's sets, and of those of its models whose weights no checkpoint holds: a frozen
    model's, and a reference's. They are given by the keys of their paths."""
    cfg = task.run.cfg
    models: dict[str, ModelConfig] = {}
    if task.wanted.reference or cfg.model.freeze or isinstance(cfg.adapter, LoraConfig):
        models["model.path"] = cfg.model
    if cfg.reference.path is not None:
        models["reference.path"] = model_of_reference(cfg)
    commits = {key: commit for key, model in models.items() if (commit := commit_of(model)) is not None}
    return {**task.examples.versions, **commits}


def refuse_other_versions(run_dir: Path, now: Mapping[str, str], force: Sequence[str]) -> None:
    """Refuse a set or model of the hub that has changed since: other samples, or other frozen weights, would follow."""
    before = run_folder.read(run_dir).get("data", {}).get("versions", {})
    for key, commit in now.items():
        if before.get(key, commit) != commit and not {key, key.partition(".")[0]} & set(force):
            pin = f"{re.sub('(eval_)?path$', '', key)}revision"
            what, part = ("set", "rows") if key.startswith("data.") else ("model", "weights")
            raise CheckpointError(
                f"{key}: the {what} on the hub was at commit {before[key][:12]} when the run in {run_dir} was started, "
                f"and is at {commit[:12]}. Its {part} may have changed. Give {pin}={before[key]} "
                f"resume.force=[{pin}] to continue with the old ones, or say resume.force=[{key}]."
            )


def _changes(run: TrainingRun, saved: dict[str, Any]) -> list[str]:
    """Say what has changed: the layout, which moves no curve, and the length of the run, which may move it."""
    then, here = saved["layout"], layout(run)  # a checkpoint of an older version has fewer names
    lines = [f"{name} was {was}, and is {here[name]}" for name, was in then.items() if was != here[name]]
    if saved["step"] > run.total_steps:
        lines.append(f"it has taken {saved['step']} steps, and {run.total_steps} were asked for")
    was, now, step = saved["schedule"]["total_steps"], run.total_steps, saved["step"] + 1
    if was != now and run.schedule.decay.value not in ENDING:
        lines.append(f"the run was to end at step {was}, and ends at {now}; the learning rate does not depend on it")
    elif was != now:
        lines.append(
            f"the run was to end at step {was}, and ends at {now}: the learning rate, {run.schedule.at(step):.3g} at "
            f"step {step}, now falls until there. The steps before had the other schedule, so this is not the curve "
            f"that {now} steps from the start would draw"
        )
    ratio, kept = run.cfg.optim.warmup_ratio, run.schedule.warmup_steps
    if ratio is not None and (anew := warm_up_of(now, ratio)) != kept:
        lines.append(f"the warm-up keeps its {kept} steps; of a run of {now} steps from the start it would be {anew}")
    return lines


def layout(run: TrainingRun) -> dict[str, Any]:
    """Return what may change when a run goes on."""
    cfg = run.cfg
    return {
        "world_size": run.world.size,
        "ring_size": run.world.ring.size,
        "attention": run.attention,
        "engine": run.engine.name,
        "precision": cfg.train.precision.value,
        "micro_batch_size": cfg.train.micro_batch_size,
        "max_tokens_per_micro_batch": at_once(cfg).tokens,
        "packing": cfg.data.packing,
        "share_prefix": shares(cfg),
    }


def build_keeper(
    task: Task, run_dir: Path, position: Position, curve: JsonlSink | None, saved: Callable[[int, Path], None]
) -> Keeper:
    """Build what saves checkpoints. Rank 0 gives its `curve`; `saved` is called for every complete checkpoint."""
    run = task.run
    rank0_does(lambda: check_space(run, run_dir, task.steps_per_epoch), run.world.size)
    most = run.cfg.checkpoint.host_memory_gib  # for the copies of a machine's ranks; None: as much as they need
    share = None if most is None else int(most * (1 << 30) / ranks_of_machine(run.cfg))
    shapes = {name: list(shape) for name, shape in run.engine.shapes().items()}
    known = run_folder.read(run_dir) if run.world.rank == 0 else {}
    if run.world.rank == 0 and "identity" not in known:  # run.json could not be written
        known["identity"] = identity(run.cfg)

    def describe(step: int, score: dict[str, float]) -> Describe:
        """Collect the state between two steps; the function returned writes it while training goes on."""
        saved = position_of(task, position, known) | {"step": step, SCORE: score}
        lines = list(curve.lines) if curve else []
        write_task = task.writer(step)

        def write(place: Path) -> list[Path]:
            written = write_task(place)
            if run.world.rank == 0:
                (place / POSITION).write_text(json.dumps(saved, indent=1), encoding="utf-8")
                write_lines(place / METRICS, lines)
                save_description(run.engine.policy.model, run.tokenizer, place / MODEL)
                if run.engine.policy.adapter is not None:
                    describe_adapter(run.engine.policy.adapter, place / MODEL)
                written += [place / POSITION, place / METRICS, *(place / MODEL).iterdir()]
            return written

        return write

    return Keeper(
        run.cfg.checkpoint,
        Saver(run.engine, run.world, run_dir, {"parameters": shapes, "layout": layout(run)}, share),
        run.world,
        run.device,
        run_dir,
        describe=describe,
        say=say,
        saved=saved,
        steps_per_epoch=task.steps_per_epoch,
        within=run.phases.between,
        saved_step=position.step,
    )


def position_of(task: Task, position: Position, known: dict[str, Any]) -> dict[str, Any]:
    """Return all that is needed to go on, beside weights and moments.

    No random state is kept: whatever draws numbers in a step draws them from (seed, step).
    """
    run = task.run
    return {
        "step": position.step,
        "epoch": position.step / task.steps_per_epoch,
        "seed": run.cfg.seed,
        "total_tokens": position.total_tokens,
        TASK: task.position(),
        "optimizer_steps": run.engine.steps,
        "schedule": dataclasses.asdict(run.schedule) | {"decay": run.schedule.decay.value},
        "wandb_id": known.get("wandb_id"),
        "identity": known.get("identity"),
        "layout": layout(run),
        "config": to_plain(run.cfg),
    }


def check_space(run: TrainingRun, run_dir: Path, steps_per_epoch: int) -> None:
    """Refuse to begin when the checkpoints would not fit on the disk: a new one is there before an old one goes."""
    keep = run.cfg.checkpoint
    if not keep.on_exit and keep.save_every is None:
        return
    sizes = [shape.numel() for shape in run.engine.shapes().values()]
    bytes_each = (8 if run.cfg.train.precision is Precision.fp64 else 4) * (1 + len(MOMENTS))
    saves = save_cadence(keep.save_every).times(run.total_steps, steps_per_epoch)
    held = len(latest_first(run_dir)[: keep.keep_last])
    more = min(keep.keep_last - held, saves) + 1  # beside those that are held already
    needed, free = more * sum(sizes) * bytes_each, shutil.disk_usage(run_dir).free
    if needed > free:
        what = "a checkpoint of this run takes" if more == 1 else f"{more} checkpoints of this run take"
        fewer = ", keep fewer (checkpoint.keep_last=1)" if more > 2 else ""
        late = "save at the end alone (checkpoint.save_every=null), " if more > 1 and keep.on_exit else ""
        raise CheckpointError(
            f"hydra.run.dir={run_dir}: has {free / 1e9:.3g} GB free, and {what} {needed / 1e9:.3g} GB. Make room, give "
            f"another folder{fewer}, {late}or do without: checkpoint.save_every=null checkpoint.on_exit=false."
        )
