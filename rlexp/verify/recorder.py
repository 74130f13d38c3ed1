"""What every recording has: the run's engine and its shards behind proxies, and the files of gradients and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import ModelError, NonFiniteError
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.model.adapter import without_starting
from rlexp.training.model.probe import probe
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.loop import train_loop
from rlexp.training.train.parts import Run
from rlexp.training.train.task import Step, Task
from rlexp.training.types import Pack, Shard, TokenScores
from rlexp.verify.kept import Watch, WatchedEngine
from rlexp.verify.records import Array, Micro, PackSeen, StepSeen, TensorFiles, Trace, mark


def run_recorded(task: Task, recorder: Recorder) -> None:
    """Train until the last step, or until the run refuses one."""
    try:
        train_loop(task, Sinks([recorder]))
    except ModelError:
        if recorder.trace.refused is None:
            raise
        raise ModelError(recorder.trace.refused) from None  # the probe's message gives the reason
    except NonFiniteError as error:  # on all ranks; the values before it are recorded
        recorder.trace.stopped = str(error)
        recorder.log({"step": recorder.number})
    if recorder.watch is not None:
        recorder.trace.kept = recorder.watch.found()


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

    def begin_run(self, run: Run, examples: int) -> None:
        self.trace.examples, self.trace.parameters = examples, run.parameters
        self.trace.total_steps, self.trace.engine = run.total_steps, run.engine.name
        self.trace.layout = run.attention
        self.trace.dtypes = tuple(sorted({str(p.dtype) for p in run.engine.policy.parameters()}))
        self.write("weights", 0, without_starting(run.engine.weights()))

    @property
    def micro(self) -> Micro:
        assert self.now is not None
        return self.now

    def sharded(self, shard: Shard) -> None:
        assert self.held is not None
        self.of_shard[id(shard)] = held = self.held
        held.tokens_t, held.targets_t = array(shard.tokens_t), array(shard.targets_t)
        held.positions_t, held.index_t = array(shard.positions_t), array(shard.index_t)
        held.sequence_n, held.position_n = (
            array(shard.sequence_n),
            array(shard.by_token(shard.positions_t[shard.trained_u])),
        )
        held.target_n = array(shard.by_token(shard.targets_t[shard.trained_u]))
        held.real_tokens, held.sequence_tokens = shard.real_tokens, shard.sequence_tokens
        placed = shard.attention.layout.deal(shard.attention.segments, shard.ring.size)
        held.placed_tokens = placed.real[shard.ring.rank]

    def dealt(self, step: Step) -> None:
        """Record which units of the train batch the replicas are given."""
        self.step.dealt = tuple(place for packs in step.dealt.packs for pack in packs for place in pack)

    def of(self, shard: Shard) -> Micro:
        """Return the micro-batch of a shard that the policy has not computed yet."""
        return self.of_shard[id(shard)]

    def computing(self, shard: Shard) -> bool:
        """Say whether a shard is of a micro-batch that is recorded; then it is the current one."""
        known = id(shard) in self.of_shard
        if known:
            self.now = self.of_shard.pop(id(shard))
        return known

    @property
    def number(self) -> int:
        return len(self.trace.steps) + 1

    def handing(self, loss: Tensor) -> None:
        """Look at the loss of a micro-batch before the engine has it."""

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


def watch_derivative(values: Tensor, micro: Micro, name: str) -> None:
    """Keep the derivative of the loss by some values, as the backward pass brings it: zeros if it brings none.

    It is that of the loss as it was handed to the engine. By how much an engine scales it is the engine's own: NaN is
    kept where that is 0, and infinity where the derivative itself is NaN."""
    micro.known[name] = np.zeros(values.shape)

    def keep(derivative: Tensor) -> None:
        unscaled = np.nan_to_num(array(derivative), nan=np.inf, posinf=np.inf, neginf=-np.inf) / (micro.scaled or 1.0)
        micro.known[name] = unscaled if micro.scaled else np.full(values.shape, np.nan)

    values.register_hook(keep)


def watch_scale(loss: Tensor, micro: Micro) -> None:
    """Keep by how much an engine scales the loss that it is handed, before its derivatives."""

    def keep(derivative: Tensor) -> None:
        micro.scaled = float(derivative)

    if loss.requires_grad:
        loss.register_hook(keep)


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
        known = self._recorder.computing(shard)
        tokens = self._engine.forward(shard)
        if not known or isinstance(tokens, TokenScores):  # scores: the loss is given one for each answer
            return tokens
        micro = self._recorder.micro
        micro.policy_n, micro.logits_n = array(tokens.logps_n), array(tokens.mean_logits_n)
        for name, each_n in tokens.of_tokens.items():
            setattr(micro, f"{name}_n", array(each_n))
        if tokens.values_n is not None:
            micro.values_n = array(tokens.values_n)
        for who, each in {"policy": tokens.logps_n, "entropies": tokens.entropies_n, "values": tokens.values_n}.items():
            if each is not None and each.requires_grad:
                watch_derivative(each, micro, f"derivative by {who}")
        return tokens

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._recorder.micro.handed, self._recorder.micro.last = float(loss.detach()), last
        self._recorder.handing(loss)
        watch_scale(loss, self._recorder.micro)
        self._engine.backward(loss, last=last)
        if last:  # here and not in `step`, which a gradient that is not finite never reaches
            self._recorder.write_gradient(self._engine)

    def step(self, lr: float) -> None:
        step = self._recorder.step
        step.lr = lr
        self._engine.step(lr)
        weights = without_starting(self._engine.weights())
        step.weight_marks = self._recorder.write("weights", self._recorder.number, weights)
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


def recorded_run(run: Run, recorder: Recorder) -> RecordedRun:
    """The run, with an engine and shards that are recorded."""
    values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    engine = run.engine if recorder.watch is None else WatchedEngine(run.engine, recorder.watch)
    values |= {"engine": RecordedEngine(engine, recorder)}
    return RecordedRun(**values, recorder=recorder)


def seen(pack: Pack) -> PackSeen:
    return PackSeen(
        tokens_T=array(pack.tokens_T),
        targets_T=array(pack.targets_T),
        positions_T=array(pack.positions_T),
        place_N=array(pack.place_N),
        sequence_N=array(pack.sequence_N),
        end_S=array(pack.end_S),
        segments=tuple((each.start, each.length, each.padded, each.parent) for each in pack.segments),
    )
