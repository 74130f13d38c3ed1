"""Build the sinks of a run, and describe its end. Rank 0 only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlexp.config.load import to_plain
from rlexp.config.schema import LoggerName
from rlexp.launch import run_folder
from rlexp.launch.rank_progress import deaths
from rlexp.launch.run_folder import derived_sizes
from rlexp.launch.stops import cause_of
from rlexp.run_files.checkpoint_folder import METRICS
from rlexp.run_files.metrics_jsonl import MetricRow, read_rows
from rlexp.run_files.rollouts_jsonl import ROLLOUTS
from rlexp.training.sinks.base import Ending, Sink, Sinks
from rlexp.training.sinks.baseline import Baseline
from rlexp.training.sinks.console import ConsoleSink
from rlexp.training.sinks.jsonl import JsonlSink, LastEvaluation, RolloutsSink
from rlexp.training.sinks.tensorboard import TensorBoardSink
from rlexp.training.sinks.trackio_run import TrackioSink
from rlexp.training.sinks.wandb_run import WandbSink, new_id
from rlexp.training.train.loop import Position, last_step
from rlexp.training.train.parts import TrainingRun

TAG = 64  # most characters of a tag of W&B


def build_sinks(run: TrainingRun, run_dir: Path, position: Position, curve: JsonlSink) -> Sinks:
    logger, rows = run.cfg.logger, read_rows(run_dir / METRICS)  # up to where the run goes on
    sinks: list[Sink] = [curve, RolloutsSink(run_dir / ROLLOUTS, position.step), LastEvaluation(run_dir)]
    if logger.progress:
        sinks.append(ConsoleSink(last_step(run, position), first_step=position.step + 1))
    match logger.name:
        case LoggerName.wandb:
            sinks.append(wandb_sink(run, run_dir, rows))
        case LoggerName.tensorboard:
            sinks.append(TensorBoardSink(run_dir, rows))
        case LoggerName.trackio:
            sinks.append(TrackioSink(logger, described(run, run_dir), run_id=run_id_of(run, run_dir), history=rows))
        case LoggerName.none:
            pass
    baseline = Baseline(Path(logger.baseline).expanduser()) if logger.baseline is not None else None
    return Sinks(sinks, baseline)


def run_id_of(run: TrainingRun, run_dir: Path) -> str:
    """Return the run's id; a new one is noted before anything is sent under it."""
    run_id = run_folder.read(run_dir).get("wandb_id") or new_id(run.cfg.logger, run_dir)
    run_folder.note(run_dir, wandb_id=run_id)
    return str(run_id)


def wandb_sink(run: TrainingRun, run_dir: Path, rows: Sequence[MetricRow]) -> Sink:
    cfg, precision = run.cfg, run.cfg.train.precision
    tags = [cfg.loss.name, cfg.model.called[:TAG], f"ring{run.world.ring.size}", precision.value]
    best = {cfg.checkpoint.best_metric: cfg.checkpoint.best}
    return WandbSink(cfg.logger, run_dir, described(run, run_dir), tags, best=best, precision=precision,
                     run_id=run_id_of(run, run_dir), history=rows)  # fmt: skip


def described(run: TrainingRun, run_dir: Path) -> dict[str, object]:
    """Return the configuration for dashboards: keys to group by are flat, without dots, which would read as levels."""
    axes = {f"axis/{key.replace('.', '_')}": value for key, value in run.cfg.logger.axes.items()}
    known = {"identity": run_folder.read(run_dir).get("identity")}
    return to_plain(run.cfg) | derived_sizes(run.cfg) | axes | known


def ending_of(error: BaseException, run: TrainingRun, run_dir: Path) -> Ending:
    """Describe the end of a process by an error. A rank that died of memory has left a note in the run's folder."""
    cause = run.phases.explained(error, run.world.rank) or cause_of(error)
    reason = str(cause) or type(cause).__name__
    facts: dict[str, float | int | str] = {}
    for death in deaths(run_dir)[:1]:
        facts = {f"memory/died_{what}": death[what] for what in ("step", "rank")} | {"memory/died_in": death["phase"]}
        facts |= {f"memory/{phase}_peak_bytes": peak for phase, peak in death["peaks"].items()}
        facts |= {f"memory/{phase}_tensors_peak_bytes": peak for phase, peak in death.get("tensors", {}).items()}
        if death["rank"] != run.world.rank:
            reason = f"rank {death['rank']} ran out of memory in its {death['phase']} phase, in step {death['step']}"
    return Ending(getattr(cause, "exit_code", 1), reason, facts)
