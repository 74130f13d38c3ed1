"""Run the product's own `build` and `train_loop`, with a watch that records what every rank computes.

The run finds the product's surroundings around it, but for the probe, which refuses nothing; a few held-out examples
alone; and rollouts that are recorded when they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from rlexp.training.train.rows_task import RowsTask
from rlexp.training.train.surroundings import Surroundings
from rlexp.training.train.task import Task
from rlexp.training.world.groups import World
from rlexp.verify.jobs import RecordJob, ranks_of
from rlexp.verify.kept import CountedPass
from rlexp.verify.record_rows import RowsRecorder
from rlexp.verify.record_samples import SampleRecorder
from rlexp.verify.recorder import MOST_HELD_OUT, Recorder
from rlexp.verify.recording import Recording


def record_rank(spec: RankSpec, worlds: Sequence[Sequence[RecordJob]]) -> list[Recording]:
    """Record every job of this rank's world; the worlds run side by side. A rank that only samples records nothing."""
    before, number = 0, 0
    while spec.rank >= before + (ranks := ranks_of(worlds[number][0].cfg)):
        before, number = before + ranks, number + 1
    rank, jobs = spec.rank - before, worlds[number]
    sampling = jobs[0].cfg.rollout.sampling_ranks
    spec = RankSpec(rank, ranks, rank, f"{spec.init_method}-{number}")
    store = join(spec, worlds[0][0].cfg.launch, sampling)  # with the run's share of the cores
    bridge = bridges.build(store, spec.rank, spec.world_size - sampling, sampling) if sampling else None
    if bridge is not None and bridge.samples:
        for job in jobs:
            sample_for(job.cfg, bridge)
        return []
    recordings = [recorded(spec.rank, job, bridge) for job in jobs]
    leave_world()
    return recordings


def recorded(rank: int, job: RecordJob, bridge: Bridge | None = None) -> Recording:
    """Train until the last step, or until the run refuses one."""
    counted = CountedPass(job.cfg) if job.counted and job.cfg.parallel.ring_size > 1 else None
    kind = SampleRecorder if job.cfg.loss.draws else RowsRecorder
    recorder = kind(job, Recording(rank, job.cfg.parallel.ring_size), counted)
    task = build(job.cfg, bridge=bridge, around=Recorded(recorder))
    try:
        recorder.begin_run(task)
        recorder.train(task)
        task.finish()
    finally:
        task.close()
    recorder.end_run(task)
    return recorder.recording


class Recorded(Surroundings):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.job = recorder, recorder.job

    def examples(self, cfg: Config, tokenizer: Any, world: World, *, trains: bool) -> Examples:
        examples = super().examples(cfg, tokenizer, world, trains=trains)
        self.recorder.held_out_rows = tuple(sorted(each.origin for each in examples.held_out[:MOST_HELD_OUT]))
        return replace(examples, held_out=examples.held_out[: self.job.held_out])

    def probe(self, *args: Any, **kwargs: Any) -> float:
        """Probe, but go on after a refusal: the run then shows where the difference comes from."""
        try:
            return super().probe(*args, **kwargs)
        except ModelError as error:
            self.recorder.recording.refused = str(error)
            return 0.0

    def kernel(self, *args: Any) -> BlockKernel:
        kernel = super().kernel(*args)
        counted = self.recorder.counted
        return kernel if counted is None else CountedKernel(kernel, counted.log)

    def stored_reference(self, setting: Setting, task: Task, *args: Any, **kwargs: Any) -> Reference:
        assert isinstance(task, RowsTask)
        task.most_steps = self.job.cfg.train.stop_after  # nothing is asked of a reference beyond them
        return super().stored_reference(setting, task, *args, **kwargs)

    def rollouts(self, **parts: Any) -> Rollouts:
        return self.recorder.rollouts(**parts)
