"""What every recording has: a watch on what the models return and the engine is handed, and the files of gradients and
weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import ModelError, NonFiniteError
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.engine.base import Engine
from rlexp.training.model.adapter import without_starting
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.loop import train_loop
from rlexp.training.train.task import Step, Task, Watch
from rlexp.training.types import Pack, TokenScores
from rlexp.verify.kept import CountedEngine, CountedPass
from rlexp.verify.records import Array, Micro, PackSeen, StepSeen, TensorFiles, Trace, mark


def run_recorded(task: Any, recorder: Recorder) -> None:
    """Train until the last step, or until the run refuses one."""
    recorder.begin_run(task)
    if recorder.counted is not None:
        task.run = dataclasses.replace(task.run, engine=CountedEngine(task.run.engine, recorder.counted))
    try:
        train_loop(task, Sinks([recorder]), watch=recorder)
    except ModelError:
        if recorder.trace.refused is None:
            raise
        raise ModelError(recorder.trace.refused) from None  # the probe's message gives the reason
    except NonFiniteError as error:  # on all ranks; the values before it are recorded
        recorder.trace.stopped = str(error)
        recorder.log({"step": recorder.number})
    if recorder.counted is not None:
        recorder.trace.kept = recorder.counted.found()


def array(tensor: Tensor) -> Array:
    """Copy a tensor to the host; bfloat16 and float16 become float32."""
    tensor = tensor.detach().cpu()
    values: Array = (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
    return values


class Recorder(Sink, Watch):
    """Fills a trace; `now` is the current micro-batch."""

    engine: Engine
    looked_on: Step  # the one that has loaded a micro-batch last

    def __init__(self, trace: Trace, files: TensorFiles, counted: CountedPass | None = None) -> None:
        self.trace, self.files, self.counted = trace, files, counted
        self.now: Micro | None = None  # the micro-batch whose loss is computed, or was computed last
        self.held: Micro | None = None  # the one that was packed last: it may be the next
        self.of_shard: dict[int, Micro] = {}
        self.step = StepSeen()

    def begin_run(self, task: Task) -> None:
        run = task.run
        self.engine = run.engine
        self.trace.examples, self.trace.parameters = len(task.examples.train), run.parameters
        self.trace.total_steps, self.trace.engine = run.total_steps, run.engine.name
        self.trace.layout = run.attention
        self.trace.dtypes = tuple(sorted({str(p.dtype) for p in run.engine.policy.parameters()}))
        self.write("weights", 0, without_starting(run.engine.weights()))

    @property
    def micro(self) -> Micro:
        assert self.now is not None
        return self.now

    def begin(self, step: Any, batch: Any) -> Micro:
        """Begin to record a micro-batch."""
        raise NotImplementedError

    def loaded(self, step: Step, batch: Any, pack: Pack) -> None:
        self.looked_on, shard = step, batch.shard
        self.of_shard[id(shard)] = held = self.begin(step, batch)
        if self.trace.ring_rank == 0:
            held.pack = seen(pack)
        if not self.step.dealt and not getattr(step, "held_out", False):  # the units that the replicas are given
            self.step.dealt = tuple(place for packs in step.dealt.packs for each in packs for place in each)
        held.tokens_t, held.targets_t = array(shard.tokens_t), array(shard.targets_t)
        held.positions_t, held.index_t = array(shard.positions_t), array(shard.index_t)
        held.sequence_n, held.position_n = (
            array(shard.sequence_n),
            array(shard.by_token(shard.positions_t[shard.trained_u])),
        )
        held.target_n = array(shard.by_token(shard.targets_t[shard.trained_u]))
        held.real_tokens, held.sequence_tokens = shard.real_tokens, shard.sequence_tokens
        placement = shard.attention.layout.place(shard.attention.segments, shard.ring.size)
        held.placed_tokens = placement.real[shard.ring.rank]

    def compared(self, batch: Any, logps_n: Tensor) -> None:
        self.of_shard[id(batch.shard)].reference_n = array(logps_n)

    def returned(self, batch: Any, outputs: Any) -> None:
        self.now = micro = self.of_shard.pop(id(batch.shard))
        if isinstance(outputs, TokenScores):  # the loss is given one for each answer
            return
        micro.policy_n, micro.logits_n = array(outputs.logps_n), array(outputs.mean_logits_n)
        for name, each_n in outputs.of_tokens.items():
            setattr(micro, f"{name}_n", array(each_n))
        if outputs.values_n is not None:
            micro.values_n = array(outputs.values_n)
        for who, each_n in {"policy": outputs.logps_n, "entropies": outputs.entropies_n,
                            "values": outputs.values_n}.items():  # fmt: skip
            if each_n is not None and each_n.requires_grad:
                watch_derivative(each_n, micro, f"derivative by {who}")

    def handed(self, batch: Any, loss: Tensor, last: bool) -> None:  # noqa: ARG002
        self.micro.handed, self.micro.last = float(loss.detach()), last
        watch_scale(loss, self.micro)

    def differentiated(self, step: Step) -> None:  # noqa: ARG002
        self.step.gradient_marks = self.write("gradient", self.number, self.engine.gradients().items())

    @property
    def number(self) -> int:
        return len(self.trace.steps) + 1

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
        if "train/learning_rate" in row:
            self.step.lr = float(row["train/learning_rate"])
            weights = without_starting(self.engine.weights())
            self.step.weight_marks = self.write("weights", self.number, weights)
            self.step.stale = tuple(self._stale())
        self.trace.steps.append(self.step)
        self.step = StepSeen()

    def _stale(self) -> Iterator[str]:
        """Parameters that compute with other values than the stepped ones. Sharded parameters cannot be checked."""
        computing = dict(self.engine.policy.model.named_parameters())
        for name, stepped in self.engine.weights():
            parameter = computing.get(name)
            if type(parameter) is not torch.nn.Parameter or parameter.shape != stepped.shape:
                continue
            if not torch.equal(parameter.detach(), stepped.detach().to(parameter.dtype)):
                yield name


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
