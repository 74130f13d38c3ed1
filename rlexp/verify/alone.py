"""The same steps by transformers alone: one process, one sequence at a time, in float64, with weights of its own.

It takes the examples that a recorded run has trained on, and computes all else by itself: log-probabilities, sums,
losses, derivatives, the gradient by one backward pass of Σ slope · quantity, the optimizer's step, and the logged
values. Only the loss's formula is the product's, applied to the whole train batch at once (`formula.py`).

Shape letters: T tokens of one sequence, n trained tokens of its answer.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlexp.base.errors import NonFiniteError
from rlexp.config.schema import Config, Device, LoraConfig
from rlexp.launch.joining import RankSpec
from rlexp.training.algos.build import build_loss
from rlexp.verify import rules
from rlexp.verify.by_length import by_length
from rlexp.verify.formula import OF_TOKENS, BatchCounts, JudgedBatch, judge
from rlexp.verify.model import answer_logps, answer_score, load, load_tokenizer, of_reference
from rlexp.verify.optimizer import norm, optimizer_of
from rlexp.verify.recording import (
    HELD_OUT,
    START,
    Array,
    Key,
    Recording,
    Scene,
    TensorFiles,
    TokenExample,
    sides_of,
)
from rlexp.verify.rows import judged_by_rows, mismatched, token_weights

LONG = 1024  # tokens; from here on several threads are faster than one


@dataclass(frozen=True)
class AloneJob:
    """What is computed alone: the steps of a recorded run in a configuration of float64."""

    cfg: Config
    given: Recording
    steps: int
    held_out: int
    folder: Path
    exact: bool = True  # whether the recorded run computed in float64, its reward models too
    rounding: float = 1e-11  # by which log-probabilities may differ that tokens were drawn from


def alone_rank(_spec: RankSpec, job: AloneJob) -> Recording:
    """Compute with as many threads as the ranks had together."""
    from rlexp.verify.alone_samples import AloneSamples

    cfg = job.cfg
    lengths = [len(example.sequence(side)) for example in job.given.examples.values() for side in example.sides]
    if cfg.launch.device is Device.cpu and max(lengths, default=LONG) >= LONG:  # threads slow down short sequences
        torch.set_num_threads(min(os.cpu_count() or 1, cfg.parallel.world_size * cfg.launch.torch_threads))
    return (AloneSamples(job) if cfg.loss.draws else AloneRows(job)).run()


class Alone:
    """A model that is stepped in one process. Its gradients and weights of each step go to files."""

    batch = "train batch"

    def __init__(self, job: AloneJob) -> None:
        self.job, self.cfg, self.given = job, job.cfg, job.given
        self.files, self.sides = TensorFiles(job.folder), sides_of(job.cfg)
        self.device = torch.device("cuda" if job.cfg.launch.device is Device.cuda else "cpu")
        self.optimizer = optimizer_of(job.cfg)
        self.tokenizer = load_tokenizer(job.cfg)
        self.sizes: Sequence[int] = job.given.facts["sizes"]
        self.recording = Recording(folder=job.folder, facts={"steps": job.steps})
        self.tokens = 0  # of all steps

    def run(self) -> Recording:
        """Take the steps of the recorded run, as far as it has the data that it must have."""
        self.begin()
        for number in range(1, self.job.steps + 1):
            if not self.step(number):
                return self.recording
        self.evaluate()
        return self.recording

    def begin(self) -> None:
        """Say what must be there before the first step."""
        start = Scene(START, 1)
        start.put("total_steps", ("total_steps",), self.total)
        start.put("precision of the parameters", ("torch.float64",), True)
        self.recording.scenes.append(start)

    total: int  # optimizer steps of the whole run

    def step(self, number: int) -> bool:
        """Take one optimizer step; say whether the recorded run has what is needed for it."""
        raise NotImplementedError

    def evaluate(self) -> None:
        raise NotImplementedError

    def train(self, model: nn.Module, more: Mapping[str, nn.Parameter] | None = None) -> None:
        """Say what is trained: the model but for what is frozen, and more."""
        own = dict(model.named_parameters())
        for name, parameter in own.items() if not isinstance(self.cfg.adapter, LoraConfig) else ():
            parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, frozen) for frozen in self.cfg.model.freeze))
        self.parameters: dict[str, Any] = own | dict(more or {})
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.write_weights(0)

    def finish(self, scene: Scene, loss: float, per_epoch: int, origins: Sequence[str]) -> None:
        """Take the optimizer step with the gradients that are there; write them, and the weights after it, to files."""
        number = scene.step
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in self.trained.items()
        }
        size = norm(gradients.values())
        if not math.isfinite(loss + size):
            raise NonFiniteError(
                f"step {number}: the loss or its gradient is not finite, in the plain reference too. Its samples begin "
                f"with {', '.join(origins[:8])}. A smaller optim.lr or a warm-up may help; or the samples are at fault."
            )
        lr = rules.learning_rate(self.cfg.optim, self.total, number)
        for name, gradient in gradients.items():
            self.files.write("gradient", number, name, gradient.cpu().numpy())
        with torch.no_grad():
            self.optimizer.step({n: p.data for n, p in self.trained.items()}, gradients, lr)
        for parameter in self.trained.values():
            parameter.grad = None
        self.write_weights(number)
        self.tokens += int(scene.row["train/tokens"])
        scene.row |= {"train/grad_norm": size, "train/learning_rate": lr, "train/global_step": number,
                      "train/epoch": number / per_epoch, "train/total_tokens": self.tokens, "step": number}  # fmt: skip
        self.recording.scenes.append(scene)

    def write_weights(self, step: int) -> None:
        for name, parameter in self.parameters.items():
            self.files.write("weights", step, name, parameter.detach().cpu().numpy())

    def put_batch(self, scene: Scene, order: Sequence[int], examples: Mapping[int, TokenExample]) -> None:
        """Say which examples a train batch has, and which of their tokens are trained on."""
        scene.put(self.batch, ("order",), np.array(order))
        scene.put("dealt", ("units",), np.arange(len(order)))
        for sample in order:
            scene.put("taken", (sample,), 1)
        self.put_trained(scene, examples)

    def put_trained(self, scene: Scene, examples: Mapping[int, TokenExample], more: str = "") -> None:
        scores = not self.cfg.loss.draws and build_loss(self.cfg.loss).wanted.scores
        for sample, example in examples.items():
            for side in example.sides if not scores else ():
                places = example.trained(side)
                scene.put(f"places of trained tokens{more}", (sample, side), places)
                scene.put(f"trained tokens{more}", (sample, side), example.answers[side][places])


class AloneRows(Alone):
    """Steps on answers that the rows give."""

    def __init__(self, job: AloneJob) -> None:
        super().__init__(job)
        self.wanted = build_loss(job.cfg.loss).wanted
        self.policy = load(job.cfg, self.device, scores=self.wanted.scores)
        self.start = load(of_reference(job.cfg), self.device) if self.wanted.reference else None
        self.carried: Mapping[str, float] = {}
        self.total = rules.total_steps(job.cfg, self.sizes)
        self.train(self.policy)

    def begin(self) -> None:
        super().begin()
        held_out = self.given.scenes[0].values["held-out rows"]["origins",]
        both = {example.origin for example in self.given.examples.values()} & set(held_out)
        self.recording.scenes[0].expect("held-out rows that are trained on", ("rows",), ", ".join(sorted(both)), "")
        judged_by_rows(self.cfg, self.tokenizer, self.recording.scenes[0],
                       [*self.given.examples.values(), *self.given.held_out[: self.job.held_out]])  # fmt: skip

    def step(self, number: int) -> bool:
        scene = Scene(f"step {number}", number)
        order = rules.samples_of(self.cfg, self.sizes, number)
        batch = {sample: self.given.examples[sample] for sample in order if sample in self.given.examples}
        self.put_batch(scene, order, batch)
        if len(batch) < len(order):
            self.recording.scenes.append(scene)
            return False
        self.values(scene, batch)
        self.finish(scene, scene.row["train/loss"], rules.steps_per_epoch(self.cfg, self.sizes),
                    [example.origin for example in batch.values()])  # fmt: skip
        return True

    def values(self, scene: Scene, batch: Mapping[int, TokenExample], *, held_out: bool = False) -> None:
        """Log-probabilities, losses and logged values of a batch; while it is trained on, also its gradient.

        The formula sees the whole batch at once. So a pass without gradient comes first, and the pass with gradient
        sends each sum's derivative backward, one sequence at a time.
        """
        self.put_models(scene, batch)
        sums, counts = self.sums(scene, batch), BatchCounts.of(list(batch.values()))
        mismatched_B = self.put_others(scene, batch) if self.wanted.mismatched else None
        judged = judge(self.cfg, sums, counts, self.carried, mismatched_B, held_out=held_out)
        self.put_judged(scene, batch, sums, counts, judged, mismatched_B)
        if held_out:
            return
        self.carried = dict(judged.losses.carried)
        for place, (sample, example) in enumerate(batch.items()):
            for side in example.sides:
                slope = judged.slopes[side][place] / len(batch)
                if not self.wanted.scores:
                    weights = token_weights(example, side, self.wanted.tail_weight)
                    scene.put("derivative by policy", (sample, side), slope * weights)
                self.summed(example, side).backward(torch.tensor(slope, device=self.device))

    def summed(self, example: TokenExample, side: str) -> Tensor:
        """What the loss is a function of: the answer's score, or the weighted sum of its tokens."""
        if self.wanted.scores:
            return answer_score(self.policy, example, side, self.device)
        logps_n, *_ = answer_logps(self.policy, example, side, self.device)
        weights = token_weights(example, side, self.wanted.tail_weight)
        return (logps_n * torch.from_numpy(weights).to(self.device)).sum()

    @torch.no_grad()
    def put_models(self, scene: Scene, batch: Mapping[int, TokenExample], more: str = "") -> None:
        """What both models say of each trained token, as far as the loss wants it."""
        for sample, example in batch.items():
            for side in example.sides if not self.wanted.scores else ():
                key = (sample, side)
                logps_n, means_n, *of_tokens = answer_logps(self.policy, example, side, self.device)
                scene.put(f"policy{more}", key, logps_n.cpu().numpy())
                if self.start is not None:
                    reference_n, *_ = answer_logps(self.start, example, side, self.device)
                    scene.put(f"reference{more}", key, reference_n.cpu().numpy())
                if more:
                    continue
                scene.put("mean logits", key, means_n.cpu().numpy())
                for name, values_n in zip(OF_TOKENS, of_tokens, strict=True):
                    if getattr(self.wanted, name):
                        scene.put(name, key, values_n.cpu().numpy())

    def sums(self, scene: Scene, batch: Mapping[int, TokenExample]) -> dict[str, dict[str, Array]]:
        """Add up the tokens of each answer, as the loss weighs them; or take the answers' scores."""
        if self.wanted.scores:
            with torch.no_grad():
                return {"policy": {side: np.array([float(self.summed(each, side)) for each in batch.values()])
                                   for side in self.sides}}  # fmt: skip
        sums: dict[str, dict[str, Array]] = {}
        for who in ("policy", "reference", *OF_TOKENS):
            beyond = 1.0 if who in OF_TOKENS else self.wanted.tail_weight
            for side in self.sides if who in scene.values else ():
                sums.setdefault(who, {})[side] = np.array([
                    (scene.values[who][sample, side] * token_weights(example, side, beyond)).sum()
                    for sample, example in batch.items()
                ])  # fmt: skip
        return sums

    def put_others(self, scene: Scene, batch: Mapping[int, TokenExample]) -> Array:
        """Give each example of a batch another's answer; return the log-ratio of each."""
        examples, most = list(batch.values()), self.cfg.data.max_length
        begin = self.tokenizer.bos_token_id
        others = {sample: mismatched(examples, place, most, begin) for place, sample in enumerate(batch)}
        for sample, example in others.items():
            scene.put("answers to other prompts", (sample,), example.sequence("answer"))
        more = " of mismatched answers"
        self.put_trained(scene, others, more)
        self.put_models(scene, others, more)
        policy, reference = (scene.values[who + more] for who in ("policy", "reference"))
        return np.array([policy[sample, "answer"].sum() - reference[sample, "answer"].sum() for sample in batch])

    def put_judged(
        self, scene: Scene, batch: Mapping[int, TokenExample], sums: Mapping[str, Mapping[str, Array]],
        counts: BatchCounts, judged: JudgedBatch, mismatched_B: Array | None,
    ) -> None:  # fmt: skip
        """Put down what the loss is given, what it makes of it, and the logged values."""
        samples, losses = [(sample,) for sample in batch], judged.losses
        for side in self.sides:
            keys: list[Key] = [(sample, side) for sample in batch]
            for who, of_side in sums.items():
                scene.put_all(f"sum of {who}", keys, of_side[side])
            scene.put_all("number of trained tokens", keys, counts.tokens[side])
            scene.put_all("slope", keys, judged.slopes[side])
        losses_E = losses.losses_E.detach().numpy()
        given = {"margin": counts.margins if self.wanted.margins else None,
                 "label": counts.labels if self.wanted.labels else None,
                 "log-ratio of a mismatched answer": mismatched_B, "loss": losses_E}  # fmt: skip
        for name, values in given.items():
            scene.put_all(name, samples, values)
        if self.wanted.mean_tokens:
            scene.put("mean of the trained tokens", ("it",), counts.mean_tokens)
        for name, number in self.carried.items():
            scene.put("carried", (name,), number)
        row: dict[str, float] = {}
        for name, values_E in losses.metrics_E.items():
            each, weights = values_E.detach().numpy(), judged.weights(name, len(batch))
            scene.put_all(f"logged {name}", samples, each)
            if weights.sum():  # else there is no example of which it could be the mean
                row[name] = float((weights * each).sum() / weights.sum())
        for name in losses.weights_E:
            scene.put_all(f"weight of {name}", samples, judged.weights(name, len(batch)))
        if "rewards/margins" not in row and {"rewards/chosen", "rewards/rejected"} <= row.keys():
            row["rewards/margins"] = row["rewards/chosen"] - row["rewards/rejected"]  # of single answers, not pairs
        row["loss"] = float(np.mean(losses_E))
        for side in self.sides if "mean logits" in scene.values else ():
            logits = [values for (_, of), values in scene.values["mean logits"].items() if of == side]
            row[f"logps/{side}"] = float(np.mean(sums["policy"][side]))
            row[f"logits/{side}"] = float(np.mean(np.concatenate(logits)))
        row["tokens"] = sum(example.tokens for example in batch.values())
        scene.row = {f"train/{name}": value for name, value in row.items()}
        if scene.name != HELD_OUT:
            self.recording.loss[scene.step] = row["loss"], abs(row["loss"])
        self.judged = judged

    @torch.no_grad()
    def evaluate(self) -> None:
        """Evaluate held-out examples after the last step, whose row has their values."""
        examples = self.given.held_out[: self.job.held_out]
        if not examples:
            return
        scene = Scene(HELD_OUT, self.job.steps)
        self.values(scene, dict(enumerate(examples)), held_out=True)
        row = {name.removeprefix("train/"): value for name, value in scene.row.items()}
        row |= by_length(self.cfg.eval.buckets, examples, self.judged)
        self.recording.scenes[-1].row |= {f"eval/{name}": value for name, value in row.items()}


def whole(values: Tensor) -> Array:
    array: Array = values.detach().cpu().numpy()
    return array
