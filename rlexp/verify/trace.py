"""Run the product's own `build` and `train_loop`, with a watch that records what every rank computes.

The run finds the product's surroundings around it, but for the probe, which refuses nothing; a few held-out examples
alone; and rollouts that are recorded when they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlexp.base.errors import ModelError
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec, join, leave_world
from rlexp.preflight.rehearsal.kernel_cost import CountedKernel
from rlexp.training.reference.models import Reference
from rlexp.training.ring.kernels import BlockKernel
from rlexp.training.rollout import bridge as bridges
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.train.build import build
from rlexp.training.train.examples import Examples
from rlexp.training.train.parts import Setting
from rlexp.training.train.rank import sample_for
from rlexp.training.train.rollout_supply import Rollouts
from rlexp.training.train.rollout_task import RolloutTask
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.surroundings import Surroundings
from rlexp.training.train.task import Task
from rlexp.training.world.groups import World
from rlexp.verify.kept import CountedPass
from rlexp.verify.recorder import Recorder, run_recorded
from rlexp.verify.records import TensorFiles, Trace
from rlexp.verify.trace_rows import RecordedLoss, RowsRecorder
from rlexp.verify.trace_samples import RecordedRollouts, SampleRecorder, policy_loss_of


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
    counted = CountedPass(job.cfg) if job.counted and job.cfg.parallel.ring_size > 1 else None
    made = Trace(rank, job.cfg.parallel.ring_size), TensorFiles(job.folder), counted
    if job.cfg.loss.draws:
        return trace_samples(job, bridge, SampleRecorder(*made))
    return trace_rows(job, RowsRecorder(*made))


def trace_rows(job: TraceJob, recorder: RowsRecorder) -> Trace:
    task = build(job.cfg, around=Recorded(recorder, job))
    assert isinstance(task, RowsTask)
    task.loss = RecordedLoss(task.loss, recorder)
    run_recorded(task, recorder)
    for step in recorder.trace.steps:  # by the sampler alone: the task is what is judged
        step.planned = task.sampler.batch(int(step.row["step"])).indices
    return recorder.trace


def trace_samples(job: TraceJob, bridge: Bridge | None, recorder: SampleRecorder) -> Trace:
    task = build(job.cfg, bridge=bridge, around=Recorded(recorder, job))
    assert isinstance(task, RolloutTask)
    recorder.configured = policy_loss_of(job.cfg)
    try:
        run_recorded(task, recorder)
        task.finish()
    finally:
        task.close()
    for rollout in recorder.trace.rollouts:
        rollout.planned = task.sampler.batch(rollout.number + 1).indices
    return recorder.trace


class Recorded(Surroundings):
    def __init__(self, recorder: Recorder, job: TraceJob) -> None:
        self.recorder, self.job = recorder, job

    def examples(self, cfg: Config, tokenizer: Any, world: World, *, trains: bool) -> Examples:
        examples = super().examples(cfg, tokenizer, world, trains=trains)
        return replace(examples, held_out=examples.held_out[: self.job.held_out])

    def probe(self, *args: Any, **kwargs: Any) -> float:
        """Probe, but go on after a refusal: the run then shows where the difference comes from."""
        try:
            return super().probe(*args, **kwargs)
        except ModelError as error:
            self.recorder.trace.refused = str(error)
            return 0.0

    def kernel(self, *args: Any) -> BlockKernel:
        kernel = super().kernel(*args)
        return kernel if self.recorder.counted is None else CountedKernel(kernel, self.recorder.counted.log)

    def stored_reference(self, setting: Setting, task: Task, *args: Any, **kwargs: Any) -> Reference:
        assert isinstance(task, RowsTask)
        task.most_steps = self.job.cfg.train.stop_after  # nothing is asked of a reference beyond them
        return super().stored_reference(setting, task, *args, **kwargs)

    def rollouts(self, **parts: Any) -> Rollouts:
        assert isinstance(self.recorder, SampleRecorder)
        return RecordedRollouts.by(self.recorder, **parts)
