"""Run the product's own `build` and `train_loop` and record what every rank computes.

`build` has two seams, for a task of one's own and for the probe; the product knows nothing else of the recording. The
recorded task is the product's, with its engine, reference, loss and shards wrapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import ModelError, NonFiniteError
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec, join, threads_of
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.algos.build import build_loss
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.probe import probe
from rlexp.training.ring.groups import World
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.build import build
from rlexp.training.train.examples import read_pairs
from rlexp.training.train.loop import train_loop
from rlexp.training.train.pair_task import PairTask
from rlexp.training.train.parts import Reference, Run
from rlexp.training.types import Pack, Pair, Shard, TokenLogps
from rlexp.verify.kept import Watch, WatchedEngine
from rlexp.verify.records import SIDES, Array, Losses, Micro, PackSeen, StepSeen, TensorFiles, TokenPair, Trace, mark


@dataclass(frozen=True)
class TraceJob:
    """A configuration to run and record. Rank 0 writes gradients and weights to `folder`."""

    cfg: Config
    steps: int
    held_out: int
    folder: Path
    counted: bool = False  # whether to count what a rank keeps for the backward pass


def trace_rank(spec: RankSpec, jobs: Sequence[TraceJob]) -> list[Trace]:
    first = jobs[0].cfg.launch
    join(spec, first.device.value, first.timeout_seconds, threads_of(first))
    return [trace(spec.rank, job) for job in jobs]


def trace(rank: int, job: TraceJob) -> Trace:
    watch = Watch(job.cfg) if job.counted and job.cfg.parallel.ring_size > 1 else None
    recorder = Recorder(Trace(rank, job.cfg.parallel.ring_size), TensorFiles(job.folder), watch)
    task_of = partial(RecordedPairs, recorder, job.held_out)
    task = build(job.cfg, probing=recorder.probing, task_of=task_of, sources=watch.sources if watch else None)
    assert isinstance(task, RecordedPairs)
    try:
        train_loop(task, Sinks([recorder]))
    except ModelError:
        if recorder.trace.refused is None:
            raise
        raise ModelError(recorder.trace.refused) from None  # the probe's message gives the reason
    except NonFiniteError as error:  # on all ranks; the values before it are recorded
        recorder.trace.stopped = str(error)
        recorder.log({"step": recorder.number})
    if watch is not None:
        recorder.trace.kept = watch.found()
    world = task.run.world
    for step in recorder.trace.steps:  # by the sampler alone: the task is what is judged
        batch = task.sampler.batch(int(step.row["step"]))
        step.planned = tuple(batch.micro_batches(world.replica, world.dp_size, job.cfg.train.micro_batch_size))
    return recorder.trace


def array(tensor: Tensor) -> Array:
    """Copy a tensor to the host; bfloat16 and float16 become float32."""
    tensor = tensor.detach().cpu()
    values: Array = (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
    return values


class Recorder(Sink):
    """Fills a trace; `now` is the current micro-batch."""

    def __init__(self, trace: Trace, files: TensorFiles, watch: Watch | None = None) -> None:
        self.trace, self.files, self.watch = trace, files, watch
        self.now: Micro | None = None  # the micro-batch whose loss is computed, or was computed last
        self.held: Micro | None = None  # the one that was packed last: it may be the next
        self.of_shard: dict[int, Micro] = {}
        self.step = StepSeen()

    def probing(self, *args: Any, **kwargs: Any) -> float:
        """Probe, but go on after a refusal: the run then shows where the difference comes from."""
        try:
            return probe(*args, **kwargs)
        except ModelError as error:
            self.trace.refused = str(error)
            return 0.0

    def begin_run(self, run: Run, pairs: int) -> None:
        self.trace.pairs, self.trace.parameters = pairs, run.parameters
        self.trace.total_steps, self.trace.engine = run.total_steps, run.engine.name
        self.trace.layout = run.attention
        self.trace.dtypes = tuple(sorted({str(p.dtype) for p in run.engine.policy.parameters()}))
        self.write("weights", 0, run.engine.weights())

    @property
    def micro(self) -> Micro:
        assert self.now is not None
        return self.now

    def begin(self, pairs: Sequence[Pair]) -> None:
        training = torch.is_grad_enabled()
        self.held = Micro(tuple(pair.index for pair in pairs))
        (self.step.micros if training else self.trace.held_out).append(self.held)
        (self.trace.tokens if training else self.trace.held_tokens).update(
            {
                p.index: TokenPair(p.prompt, p.chosen, p.rejected, p.origin, p.chosen_mask, p.rejected_mask)
                for p in pairs
            }
        )

    def sharded(self, shard: Shard) -> None:
        assert self.held is not None
        self.of_shard[id(shard)] = held = self.held
        held.tokens_t, held.targets_t = array(shard.tokens_t), array(shard.targets_t)
        held.positions_t, held.sequence_t = array(shard.positions_t), array(shard.sequence_t)
        held.real_tokens = shard.real_tokens

    def computing(self, shard: Shard) -> None:
        self.now = self.of_shard.pop(id(shard))

    @property
    def number(self) -> int:
        return len(self.trace.steps) + 1

    def write_gradient(self, engine: Any) -> None:
        self.step.gradient_marks = self.write("gradient", self.number, engine.gradients().items())

    def write(self, kind: str, step: int, tensors: Any) -> dict[str, int]:
        marks = {}
        for name, tensor in tensors:
            values = array(tensor)
            marks[name] = mark(values)
            if self.trace.rank == 0:
                self.files.write(kind, step, name, values)
        return marks

    def close(self, *_args: Any, **_kwargs: Any) -> None:
        """There is nothing to close."""

    def log(self, row: MetricRow) -> None:
        """A row ends its step, also if it has held-out values."""
        self.step.row = dict(row)
        self.trace.steps.append(self.step)
        self.step = StepSeen()


class RecordedPairs(PairTask):
    """The product's task, with wrapped parts. Only the first `held_out` held-out pairs are evaluated."""

    def __init__(self, recorder: Recorder, held_out: int, cfg: Config, tokenizer: Any, world: World, _: Any) -> None:
        super().__init__(cfg, read_pairs(cfg, tokenizer, world), build_loss(cfg.loss))
        self.recorder = recorder
        self.loss = RecordedLoss(self.loss, recorder)
        self.eval_pairs = self.eval_pairs[:held_out]

    def start(self, run: Run, reference: Reference | None) -> None:
        assert reference is not None
        self.recorder.begin_run(run, len(self.pairs))
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        watch = self.recorder.watch
        engine = run.engine if watch is None else WatchedEngine(run.engine, watch)
        values |= {"engine": RecordedEngine(engine, self.recorder)}

        def recorded_reference(shard: Shard) -> TokenLogps:
            tokens = reference(shard)
            self.recorder.micro.reference_t = array(tokens.logps_t)
            return tokens

        super().start(RecordedRun(**values, recorder=self.recorder), recorded_reference)

    def shard(self, pairs: Sequence[Pair]) -> Shard:
        self.recorder.begin(pairs)
        shard = super().shard(pairs)
        self.recorder.sharded(shard)
        return shard

    def losses(self, shard: Shard, meter: Meter) -> Tensor:
        self.recorder.computing(shard)
        return super().losses(shard, meter)


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Run):
    recorder: Recorder

    def to_device(self, pack: Pack) -> Shard:
        if self.recorder.trace.ring_rank == 0 and self.recorder.held is not None:
            self.recorder.held.pack = seen(pack)
        return super().to_device(pack)


class RecordedLoss:
    def __init__(self, loss: Any, recorder: Recorder) -> None:
        self._loss, self._recorder = loss, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, policy: Any, reference: Any) -> Any:
        result = self._loss(policy, reference)
        micro = self._recorder.micro
        for who, logps in (("policy", policy), ("reference", reference)):
            if logps is not None:
                micro.sums |= {f"{who}/chosen": array(logps.chosen_P), f"{who}/rejected": array(logps.rejected_P)}
        slopes = {}
        if torch.is_grad_enabled():
            sums = (policy.chosen_P, policy.rejected_P)
            found = torch.autograd.grad(result.losses_P.sum(), sums, retain_graph=True, allow_unused=True)
            slopes = {
                side: np.zeros(len(total)) if slope is None else array(slope)
                for side, total, slope in zip(SIDES, sums, found, strict=True)
            }
        values_P = {name: array(value_P) for name, value_P in result.metrics_P.items()}
        micro.losses = Losses(array(result.losses_P), slopes, values_P)
        return result


class RecordedEngine:
    def __init__(self, engine: Any, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, shard: Shard) -> Any:
        tokens = self._engine.forward(shard)
        self._recorder.micro.policy_t = array(tokens.logps_t)
        self._recorder.micro.logits_t = array(tokens.mean_logits_t)
        return tokens

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._recorder.micro.handed, self._recorder.micro.last = float(loss.detach()), last
        self._engine.backward(loss, last=last)
        if last:  # here and not in `step`, which a gradient that is not finite never reaches
            self._recorder.write_gradient(self._engine)

    def step(self, lr: float) -> None:
        step = self._recorder.step
        step.lr = lr
        self._engine.step(lr)
        step.weight_marks = self._recorder.write("weights", self._recorder.number, self._engine.weights())
        step.stale = tuple(self._stale())

    def _stale(self) -> Iterator[str]:
        """Parameters that compute with other values than the stepped ones. Sharded parameters cannot be checked."""
        computing = dict(self._engine.policy.model.named_parameters())
        for name, stepped in self._engine.weights():
            parameter = computing.get(name)
            if type(parameter) is not torch.nn.Parameter or parameter.shape != stepped.shape:
                continue
            if not torch.equal(parameter.detach(), stepped.detach().to(parameter.dtype)):
                yield name


def seen(pack: Pack) -> PackSeen:
    segments = tuple((segment.start, segment.length, segment.padded) for segment in pack.segments)
    tokens_T, targets_T = array(pack.tokens_T), array(pack.targets_T)
    return PackSeen(tokens_T, targets_T, array(pack.positions_T), array(pack.sequence_T), segments)
