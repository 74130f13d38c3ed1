"""Run the product's own `build` and `train_loop` and record what every rank computes.

`build` has two seams, for a task of one's own and for the probe; the product knows nothing else of the recording. The
recorded task is the product's, with parts of it behind proxies: `trace_rows.py` for answers that the rows give,
`trace_samples.py` for samples that the policy draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.training.rollout import bridge as bridges
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.train.build import build
from rlexp.training.train.offline_task import OfflineTask
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.sampling_rank import sample_for
from rlexp.verify.kept import Watch
from rlexp.verify.recorder import run_recorded
from rlexp.verify.records import TensorFiles, Trace
from rlexp.verify.trace_rows import RowsRecorder, recorded_task
from rlexp.verify.trace_samples import SampleRecorder, recorded_rollouts


@dataclass(frozen=True)
class TraceJob:
    """A configuration to run and record. Rank 0 writes gradients and weights to `folder`."""

    cfg: Config
    held_out: int
    folder: Path
    counted: bool = False  # whether to count what a rank keeps for the backward pass


def trace_rank(spec: RankSpec, jobs: Sequence[TraceJob]) -> list[Trace]:
    """Record every job in one world of ranks. A rank that only samples records nothing."""
    cfg = jobs[0].cfg
    sampling = cfg.rollout.sampling_ranks
    store = join(spec, cfg.launch, sampling)
    bridge = bridges.build(store, spec.rank, spec.world_size - sampling, sampling) if sampling else None
    if bridge is not None and bridge.samples:
        for job in jobs:
            sample_for(job.cfg, bridge)
        return []
    found = [trace(spec.rank, job, bridge) for job in jobs]
    leave_world()
    return found


def trace(rank: int, job: TraceJob, bridge: Bridge | None = None) -> Trace:
    watch = Watch(job.cfg) if job.counted and job.cfg.parallel.ring_size > 1 else None
    made = Trace(rank, job.cfg.parallel.ring_size), TensorFiles(job.folder), watch
    if job.cfg.loss.draws:
        return trace_samples(job, bridge, SampleRecorder(*made))
    return trace_rows(job, RowsRecorder(*made))


def trace_rows(job: TraceJob, recorder: RowsRecorder) -> Trace:
    sources = recorder.watch.sources if recorder.watch else None
    task_of = partial(recorded_task, recorder, job.held_out)
    task = build(job.cfg, probing=recorder.probing, task_of=task_of, sources=sources)
    assert isinstance(task, OfflineTask)
    run_recorded(task, recorder)
    for step in recorder.trace.steps:  # by the sampler alone: the task is what is judged
        step.planned = task.sampler.batch(int(step.row["step"])).indices
    return recorder.trace


def trace_samples(job: TraceJob, bridge: Bridge | None, recorder: SampleRecorder) -> Trace:
    sources = recorder.watch.sources if recorder.watch else None
    task_of = partial(recorded_rollouts, recorder, job.held_out)
    task = build(job.cfg, bridge=bridge, probing=recorder.probing, task_of=task_of, sources=sources)
    assert isinstance(task, RolloutTask)
    try:
        run_recorded(task, recorder)
        task.finish()
    finally:
        task.close()
    for rollout in recorder.trace.rollouts:
        rollout.planned = task.sampler.batch(rollout.number + 1).indices
    return recorder.trace
