"""The same steps by transformers alone: one process, one sequence at a time, in float64, with weights of its own.

It takes the examples that a recorded run has trained on, and computes all else by itself: log-probabilities, sums,
losses, derivatives, the gradient by one backward pass of Σ slope · quantity, the optimizer's step, and the logged
values. Only the loss's formula is the product's, applied to the whole train batch at once (`formula.py`).

Shape letters: T tokens of one sequence, n trained tokens of its answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema import Device
from rlexp.launch.joining import RankSpec
from rlexp.training.algos.build import build_loss
from rlexp.verify import rules
from rlexp.verify.alone_samples import AloneSamples
from rlexp.verify.by_length import by_length
from rlexp.verify.formula import OF_TOKENS, BatchCounts, JudgedBatch, judge
from rlexp.verify.jobs import AloneJob
from rlexp.verify.model import answer_logps, answer_score, load, of_reference
from rlexp.verify.one_process import Alone
from rlexp.verify.recording import (
    HELD_OUT,
    Array,
    Key,
    Recording,
    Scene,
    TokenExample,
)
from rlexp.verify.rows import judged_by_rows, mismatched, token_weights

LONG = 1024  # tokens; from here on several threads are faster than one, and below they are slower


def alone_rank(_spec: RankSpec, job: AloneJob) -> Recording:
    """Compute with all cores, where sequences are so long that it helps."""
    cfg, given = job.cfg, job.given
    lengths = [len(example.sequence(side)) for example in given.examples.values() for side in example.sides]
    lengths += [len(sample.prompt) + len(sample.answer) for each in given.rollouts.values() for sample in each]
    if cfg.launch.device is Device.cpu and max(lengths, default=0) >= LONG:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return (AloneSamples(job) if cfg.loss.draws else AloneRows(job)).run()


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
