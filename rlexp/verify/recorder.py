"""What every rank records of a run: its start, its micro-batches and its steps.

Shape letters: t tokens of one rank, n trained tokens of these, S sequences.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.base.errors import ModelError, NonFiniteError
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.model.adapter import without_starting
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.loop import train_loop
from rlexp.training.train.rollout_supply import Rollouts
from rlexp.training.train.task import Step, Task, Watch
from rlexp.training.types import Example, Pack, TokenScores
from rlexp.verify.jobs import RecordJob
from rlexp.verify.kept import CountedEngine, CountedPass
from rlexp.verify.optimizer import given_steps
from rlexp.verify.recording import START, Array, Key, Recording, Scene, TensorFiles, TokenExample, mark, sides_of


@dataclass
class HeldBatch:
    """A micro-batch on this rank: which answers it has, and whose trained tokens stand where."""

    keys: list[Key]
    owner_n: Array
    place_n: Array  # of the predicted token in its answer
    more: str  # after the names of its quantities; None of them is recorded where it is `LEFT_OUT`

    def by_answer(self, values: Tensor) -> Iterator[tuple[Key, Array, Array]]:
        values_n = array(values)
        for number, key in enumerate(self.keys):
            at = np.flatnonzero(self.owner_n == number)
            if len(at):
                yield key, self.place_n[at], values_n[at]


LEFT_OUT = "left out"
MOST_HELD_OUT = 1000  # rows whose names are kept
OTHERS = " of mismatched answers"


def stray(pack: Pack) -> int:
    """Count the tokens of a pack's last segments that stand behind the ends of their sequences."""
    parents, count = {segment.parent for segment in pack.segments}, 0
    for number, segment in enumerate(pack.segments):
        ends = [end for end in pack.end_S.tolist() if segment.start <= end < segment.start + segment.length]
        if number not in parents:
            count += segment.start + segment.length - 1 - max(ends, default=segment.start - 1)
    return count


def array(tensor: Tensor) -> Array:
    """Copy a tensor to the host; bfloat16 and float16 become float32."""
    tensor = tensor.detach().cpu()
    values: Array = (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
    return values


class Recorder(Sink, Watch):
    """Fills a recording; `now` is the micro-batch whose loss is computed, or was computed last."""

    batch = "train batch"
    held_out_rows: tuple[str, ...] = ()
    looked_on: Any  # the step that has loaded a micro-batch last

    def __init__(self, job: RecordJob, recording: Recording, counted: CountedPass | None) -> None:
        self.job, self.recording, self.counted = job, recording, counted
        self.files, self.sides = TensorFiles(job.folder), sides_of(job.cfg)
        self.scene = Scene("step 1", 1)
        self.of_shard: dict[int, HeldBatch] = {}
        self.stood: dict[str, int] = {}  # checksums of the weights after the last step
        self.now: Any = None
        self.micro_batches = 0
        self.scaled = 1.0  # by which the engine multiplies the loss before its derivatives

    # ---- the run ----

    def begin_run(self, task: Task) -> None:
        run, recording = task.run, self.recording
        self.engine, self.world = run.engine, run.world
        examples = task.examples
        recording.facts = {
            "parameters": run.parameters, "layout": run.attention, "examples": len(examples.train),
            "sizes": [*examples.mixture.sizes] if examples.mixture else [len(examples.train)],
            "total_steps": run.total_steps, "engine": run.engine.name,
        }  # fmt: skip
        if recording.rank == 0:
            recording.held_out = [tokens_of(each, self.sides) for each in examples.held_out]
        start = Scene(START, 1)
        start.put("held-out rows", ("origins",), self.held_out_rows)
        for name in ("examples", "total_steps"):
            start.put(name, (name,), recording.facts[name])
        for dtype in sorted({str(p.dtype) for p in run.engine.policy.parameters()}):
            start.put("precision of the parameters", (dtype,), True)
        start.marks = self.write("weights", 0, without_starting(run.engine.weights()))
        recording.scenes.append(start)
        if self.counted is not None:
            task.run = dataclasses.replace(run, engine=CountedEngine(run.engine, self.counted))

    def train(self, task: Task) -> None:
        recording = self.recording
        try:
            train_loop(task, Sinks([self]), watch=self)
        except ModelError:
            if recording.refused is None:
                raise
            raise ModelError(recording.refused) from None  # the probe's message gives the reason
        except NonFiniteError as error:  # on all ranks; the values before it are recorded
            recording.stopped = str(error)
            recording.scenes.append(self.scene)
        if self.counted is not None:
            recording.kept = self.counted.result()

    def end_run(self, task: Task) -> None:
        """Say what each step should have made of the weights, given its gradient; and which batch it was to take."""
        steps = self.recording.steps()
        for scene in steps:
            planned = task.batch(scene.step)
            scene.put(self.batch, ("order",), np.array(planned.indices))
        taken = [scene for scene in steps if scene.marks]
        if self.recording.stopped is None:
            due = min(self.job.cfg.train.stop_after or sys.maxsize, self.recording.facts["total_steps"])
            self.recording.scenes[-1].expect("steps that are taken", ("of the run",), len(taken), due)
        if self.recording.rank == 0:
            lrs = [scene.row["train/learning_rate"] for scene in taken if "train/learning_rate" in scene.row]
            for scene, updates in zip(taken, given_steps(self.job.cfg, lrs, self.files), strict=False):
                for name, update in updates.items():
                    scene.put("weights, given the gradient", (name,), update)

    def rollouts(self, **parts: Any) -> Rollouts:
        raise NotImplementedError

    # ---- a micro-batch ----

    def loaded(self, step: Step, batch: Any, pack: Pack) -> None:
        self.looked_on, shard = step, batch.shard
        place_n = array(shard.by_token(shard.positions_t[shard.trained_u])) + 1
        owner_n = array(shard.sequence_n)
        keys, prompts, more = self.held(step, batch)
        if len(keys):
            place_n = place_n - np.array(prompts)[owner_n] if len(owner_n) else place_n
        self.of_shard[id(shard)] = held = HeldBatch(keys, owner_n, place_n, more)
        if more == LEFT_OUT:
            return
        self.put("places of trained tokens", held, torch.from_numpy(place_n))
        self.put("trained tokens", held, shard.by_token(shard.targets_t[shard.trained_u]))
        if more:
            return
        scene = self.scene
        if self.recording.rank == 0 and "dealt" not in scene.values:  # the units that the replicas are given
            dealt = [place for packs in step.dealt.packs for each in packs for place in each]
            scene.put("dealt", ("units",), np.array(sorted(dealt)))

        def add(name: str, number: int) -> None:
            scene.put(name, ("it",), scene.values.get(name, {}).get(("it",), 0) + number)

        add("placed tokens", len(shard.tokens_t))
        add("micro-batches", 1)
        if self.recording.rank % self.recording.ring_size == 0:
            for key in dict.fromkeys(key[:1] for key in keys):
                times = scene.values.setdefault("taken", {})
                times[key] = times.get(key, 0) + 1
            add("sequence tokens", sum(pack.lengths))
            add("shared tokens", sum(pack.lengths) - sum(segment.length for segment in pack.segments))
            scene.expect("tokens in no sequence", (f"micro-batch {self.micro_batches + 1}",), stray(pack), 0)

    def held(self, step: Any, batch: Any) -> tuple[list[Key], list[int], str]:
        """The answers of a micro-batch, the tokens of the prompt before each, and what it is computed for."""
        raise NotImplementedError

    def put(self, quantity: str, held: HeldBatch, values: Tensor) -> None:
        if held.more != LEFT_OUT:
            for key, places, values_n in held.by_answer(values):
                self.scene.put_tokens(quantity + held.more, key, places, values_n)

    def compared(self, batch: Any, logps_n: Tensor) -> None:
        self.put("reference", self.of_shard[id(batch.shard)], logps_n)

    def returned(self, batch: Any, outputs: Any) -> None:
        self.now = held = self.of_shard.pop(id(batch.shard))
        if isinstance(outputs, TokenScores) or held.more == LEFT_OUT:  # the loss is given one for each answer
            return
        self.put("policy", held, outputs.logps_n)
        if held.more:
            return
        self.put("mean logits", held, outputs.mean_logits_n)
        for name, values in {**outputs.of_tokens, "values": outputs.values_n}.items():
            if values is not None:
                self.put(name, held, values)
        differentiated = {"policy": outputs.logps_n, "entropies": outputs.entropies_n, "values": outputs.values_n}
        for name, values in differentiated.items():
            if values is not None and values.requires_grad:
                self.watch_derivative(f"derivative by {name}", held, values)

    def watch_derivative(self, quantity: str, held: HeldBatch, values: Tensor) -> None:
        """Keep the derivative of the train batch's loss by some values, as the backward pass brings it: zeros if it
        brings none. By how much an engine scales a loss is its own, and divided out; NaN stands where that is 0."""
        scene, world = self.scene, self.world.size
        kept: list[Tensor] = []

        def keep(derivative: Tensor) -> None:
            kept[:] = [derivative.detach().double() / world / (self.scaled or float("nan"))]

        values.register_hook(keep)
        self.pending.append((scene, quantity, held, values.shape, kept))

    @property
    def pending(self) -> list[Any]:
        """Derivatives that the next backward pass brings."""
        return vars(self).setdefault("_pending", [])

    def handed(self, batch: Any, loss: Tensor, last: bool) -> None:  # noqa: ARG002
        self.micro_batches += 1
        whole = self.micro_batches == len(self.looked_on.micro_batches)
        self.scene.expect("mark of the last micro-batch", (f"micro-batch {self.micro_batches}",), last, whole)
        if loss.requires_grad:
            loss.register_hook(lambda scale: setattr(self, "scaled", float(scale)))

    def _take_derivatives(self) -> None:
        for scene, quantity, held, shape, kept in self.pending:
            values = kept[0] if kept else torch.zeros(shape, dtype=torch.float64)
            for key, places, values_n in held.by_answer(values):
                scene.put_tokens(quantity, key, places, values_n)
        self.pending.clear()

    # ---- a step ----

    def differentiated(self, step: Step) -> None:  # noqa: ARG002
        self._take_derivatives()
        self.scene.marks |= self.write("gradient", self.scene.step, self.engine.gradients().items())

    def write(self, kind: str, step: int, tensors: Any) -> dict[str, int]:
        """Write tensors to files, on rank 0; but no weight once more that is still what it was a step before."""
        marks = {}
        for name, tensor in tensors:
            values = array(tensor)
            marks[f"{kind} {name}"] = of = mark(values)
            if self.recording.rank == 0 and kind == "weights" and self.stood.get(name) == of:
                self.files.repeat(kind, step, name)
            elif self.recording.rank == 0:
                self.files.write(kind, step, name, values)
            if kind == "weights":
                self.stood[name] = of
        return marks

    def close(self, *_args: Any, **_kwargs: Any) -> None:
        """There is nothing to close."""

    def log(self, row: MetricRow) -> None:
        """A row ends its step, also if it has held-out values."""
        scene = self.scene
        scene.row = {name: value for name, value in row.items() if isinstance(value, int | float)}
        if "train/learning_rate" in row:
            scene.marks |= self.write("weights", scene.step, without_starting(self.engine.weights()))
            for name in self._stale():
                scene.expect("weights as they compute", (name,), "another value", "what was stepped")
        self.recording.scenes.append(scene)
        self.scene = Scene(f"step {scene.step + 1}", scene.step + 1)
        self.micro_batches = 0

    def _stale(self) -> Iterator[str]:
        """Parameters that compute with other values than the stepped ones. Sharded parameters cannot be checked."""
        computing = dict(self.engine.policy.model.named_parameters())
        for name, stepped in self.engine.weights():
            parameter = computing.get(name)
            if type(parameter) is not torch.nn.Parameter or parameter.shape != stepped.shape:
                continue
            if not torch.equal(parameter.detach(), stepped.detach().to(parameter.dtype)):
                yield name


def tokens_of(example: Example, sides: Sequence[str]) -> TokenExample:
    """Copy an example's tokens, for the comparison."""
    masked = dict(zip(sides, example.masked, strict=False))
    return TokenExample(
        prompt=example.prompt.astype(np.int64),
        answers={side: answer.astype(np.int64) for side, (answer, _) in masked.items()},
        masks={side: np.ones(len(answer), dtype=bool) if mask is None else np.asarray(mask)
               for side, (answer, mask) in masked.items()},
        origin=example.origin, margin=example.margin, label=example.label, text=example.text, right=example.expected,
    )  # fmt: skip
