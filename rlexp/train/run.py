"""A rank's whole life once it has joined: build, train, export, close."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from rlexp import __version__
from rlexp.config.load import to_plain
from rlexp.config.schema import Config, LoggerName
from rlexp.launch import folder
from rlexp.launch.folder import derived_sizes
from rlexp.launch.local import heard
from rlexp.sinks.base import Sink, Sinks
from rlexp.sinks.console import ConsoleSink, say
from rlexp.sinks.jsonl import JsonlSink
from rlexp.train.build import Run, build
from rlexp.train.loop import train_loop


def train(cfg: Config, run_dir: Path) -> None:
    run = build(cfg)
    first = run.world.rank == 0
    sinks = Sinks(build_sinks(run, run_dir) if first else [])
    if first:
        folder.note(run_dir, **ledger(run))
        say(header(run, run_dir))
    exit_code = 1
    try:
        train_loop(run, sinks)
        if cfg.checkpoint.export:
            run.engine.export(run_dir / "model")
            if first:
                run.tokenizer.save_pretrained(run_dir / "model")
        exit_code = 0
    except BaseException as error:
        exit_code = getattr(heard(error), "exit_code", 1)
        raise
    finally:
        sinks.close(exit_code)
    if first:
        say(footer(run, run_dir))
    dist.barrier()
    dist.destroy_process_group()


def ledger(run: Run) -> dict[str, object]:
    """What run.json should say of the data and the length of the run."""
    return {
        "steps": run.total_steps,
        "parameters": run.parameters,
        "data": {
            "pairs": len(run.pairs),
            "eval_pairs": len(run.eval_pairs),
            "not_as_read": dict(run.dropped),
            "eval_not_as_read": dict(run.eval_dropped),
        },
    }


def agreed_folder(run_dir: Path | None) -> Path:
    """Rank 0's run folder, on every rank of a world that a launcher made."""
    folders = [None if run_dir is None else str(run_dir)]
    dist.broadcast_object_list(folders, src=0)
    assert folders[0] is not None
    return Path(folders[0])


def build_sinks(run: Run, run_dir: Path) -> list[Sink]:
    logger = run.cfg.logger
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl")]
    if logger.progress:
        sinks.append(ConsoleSink(run.total_steps))
    if logger.name is LoggerName.wandb:
        from rlexp.sinks.wandb_run import WandbSink

        tags = [
            run.cfg.loss.name,
            run.cfg.model.name,
            f"ring{run.world.ring.size}",
            run.cfg.train.precision.value,
        ]
        config = to_plain(run.cfg) | derived_sizes(run.cfg)  # flat keys too: W&B groups by those alone
        sinks.append(WandbSink(logger, run_dir, config, tags))
    return sinks


def header(run: Run, run_dir: Path) -> str:
    cfg, world = run.cfg, run.world
    replicas = f"{world.dp_size} replica{'s' * (world.dp_size > 1)}"
    dropped = "".join(f"\n  {count} pairs: {reason}" for reason, count in sorted(run.dropped.items()))
    return (
        f"rlexp {__version__}  {cfg.loss.name} on {cfg.model.name} ({run.parameters:,} parameters, "
        f"{cfg.train.precision.value}), engine {run.engine.name}\n"
        f"  ring of {world.ring.size} ({run.layout.name}, {run.kernel.name}) × {replicas} = "
        f"{world.size} rank{'s' * (world.size > 1)} on {run.device.type}\n"
        f"  batch {cfg.train.batch_size} = {replicas} × micro-batch {cfg.train.micro_batch_size} × "
        f"{cfg.train.grad_acc} accumulation step{'s' * (cfg.train.grad_acc > 1)}\n"
        f"  {len(run.pairs):,} pairs, {run.total_steps} steps, {run.sampler.steps_per_epoch} an epoch{dropped}\n"
        f"  {run_dir}\n"
    )


def footer(run: Run, run_dir: Path) -> str:
    model = ", trained model in model/" if run.cfg.checkpoint.export else ""
    wandb = ", W&B run in wandb/" if run.cfg.logger.name is LoggerName.wandb else ""
    return f"done: {run_dir}  (curve in metrics.jsonl{wandb}{model})\n"
