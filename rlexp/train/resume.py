"""A run's position, on its way to disk and back."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlexp.checkpoint.folder import METRICS, MODEL, POSITION
from rlexp.checkpoint.keeper import SCORE, Keeper
from rlexp.checkpoint.restore import restore
from rlexp.checkpoint.saver import Describe, Saver
from rlexp.config.identity import identity
from rlexp.config.load import to_plain
from rlexp.config.schema import Decay, Precision
from rlexp.engine.base import MOMENTS, shape_of, trained
from rlexp.errors import CheckpointError
from rlexp.launch import folder, stops
from rlexp.model.export import save_description
from rlexp.rollout.saved import write as write_samples
from rlexp.sinks.console import say
from rlexp.sinks.jsonl import JsonlSink, rewrite, write_lines
from rlexp.train.build import Run
from rlexp.train.loop import Position


def resume(run: Run, run_dir: Path) -> tuple[Position, str]:
    """Where the run goes on, with the engine and the curve set back to there; and a word on it. A collective call."""
    shapes = {name: shape_of(parameter) for name, parameter in trained(run.engine.policy).items()}
    first = run.world.rank == 0
    found = restore(run.cfg.resume.mode, run_dir, run.engine, shapes, run.world, say)
    if found is None:
        again = first and (run_dir / METRICS).exists()
        if again:  # it ended before its first checkpoint
            rewrite(run_dir / METRICS, None, 0)
        return Position(), "  no checkpoint here yet: begins at step 1\n" if again else ""
    path, saved = found
    position = Position(saved["step"], saved["total_tokens"])
    if run.rollouts is not None:
        run.rollouts.restore(path, saved["rollouts"], position.step)
    if not first:
        return position, ""
    rewrite(run_dir / METRICS, path / METRICS, position.step)
    notes = [*_changes(run, saved), *folder.read(run_dir).get("forced", [])]
    return position, "".join(f"  {line}\n" for line in (f"goes on from {path}, after step {position.step}", *notes))


def _changes(run: Run, saved: dict[str, Any]) -> list[str]:
    """What is otherwise than it was: the layout, which moves nothing, and the length of the run, which may."""
    then, here = saved["layout"], layout(run)  # a checkpoint of an older version has fewer names
    lines = [f"{name} was {was}, and is {here[name]}" for name, was in then.items() if was != here[name]]
    if saved["step"] > run.total_steps:
        lines.append(f"it has taken {saved['step']} steps, and {run.total_steps} were asked for")
    was, now, step = saved["schedule"]["total_steps"], run.total_steps, saved["step"] + 1
    if was != now and run.schedule.decay is Decay.constant:
        lines.append(f"the run was to end at step {was}, and ends at {now}; the learning rate does not depend on it")
    elif was != now:
        lines.append(
            f"the run was to end at step {was}, and ends at {now}: the learning rate, {run.schedule.at(step):.3g} at "
            f"step {step}, now falls until there. The steps before had the other schedule, so this is not the curve "
            f"that {now} steps from the start would draw"
        )
    return lines


def layout(run: Run) -> dict[str, Any]:
    """What may change when a run goes on."""
    cfg = run.cfg
    return {
        "world_size": run.world.size,
        "ring_size": run.world.ring.size,
        "attention": run.attention,
        "engine": run.engine.name,
        "precision": cfg.train.precision.value,
        "micro_batch_size": cfg.train.micro_batch_size,
        "packing": cfg.data.packing,
    }


def build_keeper(
    run: Run, run_dir: Path, position: Position, curve: JsonlSink | None, saved: Callable[[int, Path], None]
) -> Keeper:
    """`curve` is rank 0's; `saved` is told of every checkpoint that is there."""
    if run.world.rank == 0:
        check_space(run, run_dir)
    facts = {
        "parameters": {name: list(shape_of(parameter)) for name, parameter in trained(run.engine.policy).items()},
        "layout": layout(run),
    }
    known = folder.read(run_dir) if run.world.rank == 0 else {}
    if run.world.rank == 0 and "identity" not in known:  # run.json could not be written
        known["identity"] = identity(run.cfg)

    def describe(step: int, score: dict[str, float]) -> Describe:
        """Called between two steps; what it returns, while training goes on."""
        saved = position_of(run, position, known) | {"step": step, SCORE: score}
        lines = list(curve.lines) if curve else []
        unfinished = run.rollouts.unfinished(step) if run.rollouts is not None else {}

        def write(place: Path) -> list[Path]:
            rank, ranks = run.world.rank, run.world.size
            written = [write_samples(place, name, rank, ranks, mine) for name, mine in unfinished.items()]
            if rank == 0:
                (place / POSITION).write_text(json.dumps(saved, indent=1), encoding="utf-8")
                write_lines(place / METRICS, lines)
                save_description(run.engine.policy.model, run.tokenizer, place / MODEL)
                written += [place / POSITION, place / METRICS, *(place / MODEL).iterdir()]
            return written

        return write

    return Keeper(
        run.cfg.checkpoint,
        Saver(run.engine, run.world, run_dir, facts),
        run.world,
        run.device,
        run_dir,
        describe=describe,
        asked=stops.asked,
        say=say,
        saved=saved,
        saved_step=position.step,
    )


def position_of(run: Run, position: Position, known: dict[str, Any]) -> dict[str, Any]:
    """All that must be known to go on, beside weights and moments. Nothing random is kept: whatever draws numbers in
    a step draws them from (seed, step)."""
    return {
        "step": position.step,
        "epoch": position.step / run.steps_per_epoch,
        "seed": run.cfg.seed,
        "random": {"seeded_from": ["seed", "step"], "seed": run.cfg.seed, "step": position.step},
        "total_tokens": position.total_tokens,
        "rollouts": None if run.rollouts is None else run.rollouts.position(),
        "optimizer_steps": run.engine.steps,
        "schedule": dataclasses.asdict(run.schedule) | {"decay": run.schedule.decay.value},
        "wandb_id": known.get("wandb_id"),
        "identity": known.get("identity"),
        "layout": layout(run),
        "config": to_plain(run.cfg),
    }


def check_space(run: Run, run_dir: Path) -> None:
    """Before anything is computed that could not be saved."""
    keep = run.cfg.checkpoint
    if not keep.on_exit and keep.save_every is None:
        return
    sizes = [shape_of(parameter).numel() for parameter in trained(run.engine.policy).values()]
    bytes_each = (8 if run.cfg.train.precision is Precision.fp64 else 4) * (1 + len(MOMENTS))
    needed, free = sum(sizes) * bytes_each, shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"hydra.run.dir={run_dir}: has {free / 1e9:.3g} GB free, and a checkpoint of this run takes "
            f"{needed / 1e9:.3g} GB. Make room, give another folder, or do without: checkpoint.save_every=null "
            f"checkpoint.on_exit=false."
        )
