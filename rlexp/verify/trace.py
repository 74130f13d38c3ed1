"""Run the product's own `build` and `train_loop` and record what every rank computes.

`build` has two seams, for a task of one's own and for the probe, and the task gives `note` the derivatives of a whole
batch's loss; the product knows nothing else of the recording. The recorded task is the product's, with its engine,
reference, loss and shards wrapped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlexp.base.errors import ModelError, NonFiniteError
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec, join, threads_of
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.algos.base import Loss, Sides, Values
from rlexp.training.algos.base import Losses as LossesOf
from rlexp.training.metrics.meter import Meter
from rlexp.training.model.probe import probe
from rlexp.training.ring.groups import World
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.build import build
from rlexp.training.train.choose_task import task_class
from rlexp.training.train.examples import read_examples
from rlexp.training.train.loop import train_loop
from rlexp.training.train.offline_task import HeldExamples, OfflineTask
from rlexp.training.train.parts import Reference, Run
from rlexp.training.types import Answered, Pack, Shard, TokenLogps, TokenScores
from rlexp.verify.kept import Watch, WatchedEngine
from rlexp.verify.records import (
    Array,
    Counts,
    Losses,
    Micro,
    PackSeen,
    StepSeen,
    TensorFiles,
    TokenAnswer,
    TokenExample,
    TokenPair,
    Trace,
    mark,
)

TRAINING = "training"


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
    task_of = partial(recorded_task, recorder, job.held_out)
    task = build(job.cfg, probing=recorder.probing, task_of=task_of, sources=watch.sources if watch else None)
    assert isinstance(task, Recorded)
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
        self.pass_ = TRAINING
        self.collected: list[Micro] = []  # of the pass that collects values for a loss of the whole batch

    def probing(self, *args: Any, **kwargs: Any) -> float:
        """Probe, but go on after a refusal: the run then shows where the difference comes from."""
        try:
            return probe(*args, **kwargs)
        except ModelError as error:
            self.trace.refused = str(error)
            return 0.0

    def begin_run(self, run: Run, examples: int) -> None:
        self.trace.examples, self.trace.parameters = examples, run.parameters
        self.trace.total_steps, self.trace.engine = run.total_steps, run.engine.name
        self.trace.layout = run.attention
        self.trace.dtypes = tuple(sorted({str(p.dtype) for p in run.engine.policy.parameters()}))
        self.write("weights", 0, run.engine.weights())

    @contextlib.contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """Say what a pass is for, other than training."""
        if name == "collecting":
            self.collected = []
        self.pass_, before = (name if self.pass_ == TRAINING else f"{name}, {self.pass_}"), self.pass_
        try:
            yield
        finally:
            self.pass_ = before

    @property
    def micro(self) -> Micro:
        assert self.now is not None
        return self.now

    def begin(self, examples: Sequence[Answered], sides: Sequence[str]) -> None:
        training = self.pass_ == TRAINING
        self.held = Micro(tuple(each.index for each in examples))
        if training and self.collected:  # the reference has computed already
            self.held.reference_t = self.collected.pop(0).reference_t
        places, seen_tokens = {
            TRAINING: (self.step.micros, self.trace.tokens),
            "collecting": (self.collected, self.trace.tokens),
            "mismatched": (self.step.others, self.step.other_tokens),
            "held out": (self.trace.held_out, self.trace.held_tokens),
            "collecting, held out": (self.trace.held_out, self.trace.held_tokens),
            "mismatched, held out": (self.trace.held_others, self.trace.held_other_tokens),
        }[self.pass_]
        places.append(self.held)
        seen_tokens.update({each.index: tokens_of(each, sides) for each in examples})

    def sharded(self, shard: Shard) -> None:
        assert self.held is not None
        self.of_shard[id(shard)] = held = self.held
        held.tokens_t, held.targets_t = array(shard.tokens_t), array(shard.targets_t)
        held.positions_t, held.sequence_t = array(shard.positions_t), array(shard.sequence_t)
        held.real_tokens = shard.real_tokens

    def computing(self, shard: Shard) -> None:
        self.now = self.of_shard.pop(id(shard))

    def judged(self, values: Values, losses: LossesOf, slopes: Sides | None) -> None:
        """Record what the loss was given of a micro-batch, and what it has made of it."""
        if self.pass_ != TRAINING:
            return
        micro = self.micro
        micro.sums = named_sums(values)
        tokens = {side: array(each) for side, each in values.tokens.items()}
        margins, labels, micro.mismatched = (
            None if each is None else array(each) for each in (values.margin_E, values.label_E, values.mismatched_B)
        )
        micro.counts = Counts(tokens, values.mean_tokens, margins, labels)
        if slopes is None:
            found = torch.autograd.grad(
                losses.losses_E.sum(), list(values.judged.values()), retain_graph=True, allow_unused=True
            )
            slopes = {side: torch.zeros_like(each) if slope is None else slope
                      for (side, each), slope in zip(values.judged.items(), found, strict=True)}  # fmt: skip
        micro.losses = Losses(
            array(losses.losses_E),
            {side: array(slope) for side, slope in slopes.items()},
            {name: array(value_E) for name, value_E in losses.metrics_E.items()},
            {name: array(weight_E) for name, weight_E in losses.weights_E.items()},
            values.carried,
        )

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


class Recorded(OfflineTask):
    """The product's task, with wrapped parts. Only the first `held_out` held-out examples are evaluated."""

    recorder: Recorder

    def watched_by(self, recorder: Recorder, held_out: int) -> Recorded:
        self.recorder = recorder
        self.held_out = self.held_out[:held_out]
        self.loss = RecordedLoss(self.loss, recorder)
        return self

    def start(self, run: Run, reference: Reference | None) -> None:
        self.recorder.begin_run(run, len(self.train))
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        watch = self.recorder.watch
        engine = run.engine if watch is None else WatchedEngine(run.engine, watch)
        values |= {"engine": RecordedEngine(engine, self.recorder)}

        def recorded_reference(shard: Shard) -> TokenLogps:
            assert reference is not None
            tokens = reference(shard)
            self.recorder.micro.reference_t = array(tokens.logps_t)
            return tokens

        recorded = None if reference is None else recorded_reference
        super().start(RecordedRun(**values, recorder=self.recorder), recorded)

    def passing(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.recorder.passing(what)

    def evaluate(self, step: int) -> dict[str, float]:
        with self.recorder.passing("held out"):
            return super().evaluate(step)

    def shard(self, examples: Sequence[Answered]) -> HeldExamples:
        self.recorder.begin(examples, self.sides)
        held = super().shard(examples)
        self.recorder.sharded(held.shard)
        return held

    def note(self, meter: Meter, values: Values, losses: LossesOf, slopes: Sides | None) -> None:
        self.recorder.judged(values, losses, slopes)
        super().note(meter, values, losses, slopes)


def loss_of(cfg: Config) -> Loss:
    """Build the loss as the product does, for the reference."""
    task = task_class(cfg.loss)
    assert issubclass(task, OfflineTask)
    return task.loss_of(cfg)


def recorded_task(recorder: Recorder, held_out: int, cfg: Config, tokenizer: Any, world: World, _: Any) -> Recorded:
    """Make the task that the loss has, recorded."""
    task = task_class(cfg.loss)
    assert issubclass(task, OfflineTask)
    made = type(f"Recorded{task.__name__}", (Recorded, task), {})
    watched: Recorded = made(cfg, read_examples(cfg, tokenizer, world)).watched_by(recorder, held_out)
    return watched


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Run):
    recorder: Recorder

    def shard(self, pack: Pack) -> Shard:
        if self.recorder.trace.ring_rank == 0 and self.recorder.held is not None:
            self.recorder.held.pack = seen(pack)
        return super().shard(pack)


class RecordedEngine:
    def __init__(self, engine: Any, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, shard: Shard) -> Any:
        self._recorder.computing(shard)
        tokens = self._engine.forward(shard)
        if isinstance(tokens, TokenScores):  # of which the loss is given one for each answer
            return tokens
        self._recorder.micro.policy_t = array(tokens.logps_t)
        self._recorder.micro.logits_t = array(tokens.mean_logits_t)
        more = {"likelihoods_t": tokens.likelihoods_t, "entropies_t": tokens.entropy_t, "hits_t": tokens.hits_t}
        for name, each in more.items():
            if each is not None:
                setattr(self._recorder.micro, name, array(each))
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


def named_sums(values: Values) -> dict[str, Array]:
    given = {"policy": values.judged, "reference": values.reference, "likelihoods": values.likelihoods,
             "entropies": values.entropies, "hits": values.hits}  # fmt: skip
    return {f"{who}/{side}": array(each) for who, sides in given.items() for side, each in (sides or {}).items()}


class RecordedLoss:
    """Records what a loss is given that asks for the whole batch."""

    def __init__(self, loss: Loss, recorder: Recorder) -> None:
        self._loss, self._recorder = loss, recorder
        self.asks = loss.asks

    def __call__(self, values: Values) -> LossesOf:
        if self.asks.whole_batch and "held out" not in self._recorder.pass_:
            self._recorder.step.whole = named_sums(values)
        return self._loss(values)


def tokens_of(example: Answered, sides: Sequence[str]) -> TokenExample:
    """Copy an example's tokens, for the comparison."""
    answers: dict[str, Any] = {}
    for side, (answer, mask) in zip(sides, example.answers, strict=True):
        answers |= {side: answer, f"{side}_mask": mask}
    if len(sides) == 1:
        return TokenAnswer(prompt=example.prompt, origin=example.origin, label=example.label, **answers)
    return TokenPair(prompt=example.prompt, origin=example.origin, margin=example.margin, **answers)


def seen(pack: Pack) -> PackSeen:
    segments = tuple((segment.start, segment.length, segment.padded) for segment in pack.segments)
    tokens_T, targets_T = array(pack.tokens_T), array(pack.targets_T)
    return PackSeen(tokens_T, targets_T, array(pack.positions_T), array(pack.sequence_T), segments)
