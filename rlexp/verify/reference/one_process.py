"""The reference for answers that the rows give: the same steps in one process, in float64, written out plainly.

It shares no code with dataset, ring, sampler, step, engine or meter. Rows and tokens come from `rows.py` and
`pairs.py`, samples and rates from `rules.py`; log-probabilities and counts are its own. Only the loss's formula is the
product's, applied to the whole batch at once (`formula.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema import Config
from rlexp.training.algos.base import Loss
from rlexp.verify.records import (
    MISMATCHED,
    Array,
    Asked,
    Expected,
    Key,
    RowsExpected,
    TensorFiles,
    TokenExample,
    joined,
)
from rlexp.verify.reference import rules
from rlexp.verify.reference.by_length import by_length
from rlexp.verify.reference.formula import OF_TOKENS, losses_of
from rlexp.verify.reference.model import answer_logps, answer_score, load, load_tokenizer, of_reference
from rlexp.verify.reference.pairs import examples_of, mismatched
from rlexp.verify.reference.stepped import Stepped


class Reference(Stepped):
    """The trained model, stepped in one process, and the one that it is compared with: as it started, or another."""

    def __init__(self, cfg: Config, loss: Loss, tokenizer: Any, files: TensorFiles) -> None:
        super().__init__(cfg, files)
        self.loss, self.carried = loss, dict[str, float]()
        self.policy = load(cfg, self.device, scores=self.loss.wanted.scores)
        self.start = load(of_reference(cfg), self.device) if self.loss.wanted.reference else None
        self.data = examples_of(cfg, tokenizer)
        self.examples = self.data.train
        self.begin = tokenizer.bos_token_id
        self.total = rules.total_steps(cfg, self.data.sizes)
        self.train(self.policy)

    def step(self, number: int) -> RowsExpected:
        """Take one optimizer step."""
        samples = rules.samples_of(self.cfg, self.data.sizes, number)
        batch = {sample: self.examples[sample] for sample in samples}
        expected = self._values(number, batch)
        self.finish(expected, [example.origin for example in batch.values()])
        expected.row["epoch"] = number / rules.steps_per_epoch(self.cfg, self.data.sizes)
        return expected

    def _values(self, number: int, batch: Mapping[int, TokenExample]) -> RowsExpected:
        """Log-probabilities, losses and logged values of a batch; with gradients enabled, also add up its gradient.

        The formula sees the whole batch at once. So a pass without gradient comes first, and the pass with gradient
        sends each sum's derivative backward, one sequence at a time.
        """
        trained, asks = torch.is_grad_enabled(), self.loss.wanted
        values = self._said(batch, ("policy", "reference", "logits", "likelihoods", "entropies", "hits"))
        sums, counts = self._sums(batch, values), rules.counts_of(list(batch.values()))
        others = self._others(batch) if asks.mismatched else {}
        of_others = self._said(others, ("policy", "reference"))
        if others:
            sums[MISMATCHED] = rules.log_ratios(of_others["policy"], of_others["reference"])
        losses, carried = losses_of(self.loss, sums, counts, self.carried, held_out=not trained)
        if trained:
            self.carried = dict(carried)
            for place, example in enumerate(batch.values()):
                for side in example.sides:
                    slope = torch.tensor(losses.slopes[side][place] / len(batch), device=self.device)
                    self._judged(example, side).backward(slope)
        sides = next(iter(batch.values())).sides if values["logits"] else ()
        logits = {side: joined([values["logits"][sample, side] for sample in batch]) for side in sides}
        row = rules.logged(losses, sums, logits, sum(example.tokens for example in batch.values()))
        if not trained:
            row |= by_length(self.cfg.eval.buckets, list(batch.values()), losses)
        return RowsExpected(
            number=number,
            samples=tuple(batch),
            policy=values["policy"],
            reference=values["reference"],
            logits=values["logits"],
            likelihoods=values["likelihoods"],
            entropies=values["entropies"],
            hits=values["hits"],
            others=others,
            of_others=of_others,
            counts=counts,
            losses=dict(zip(batch, losses.losses_E.tolist(), strict=True)),
            loss=row["loss"],
            row=row,
        )

    def _judged(self, example: TokenExample, side: str) -> Tensor:
        """What the loss is a function of: the answer's score, or the weighted sum of its tokens."""
        if self.loss.wanted.scores:
            return answer_score(self.policy, example, side, self.device)
        logps_n, *_ = answer_logps(self.policy, example, side, self.device)
        weights = rules.token_weights(example, side, self.loss.wanted.tail_weight)
        return (logps_n * torch.from_numpy(weights).to(self.device)).sum()

    def _others(self, batch: Mapping[int, TokenExample]) -> dict[int, TokenExample]:
        """Give each example of a batch another's answer."""
        examples, most = list(batch.values()), self.cfg.data.max_length
        return {sample: mismatched(examples, place, most, self.begin) for place, sample in enumerate(batch)}

    @torch.no_grad()
    def _said(self, batch: Mapping[int, TokenExample], asked: Sequence[str]) -> dict[str, dict[Key, Array]]:
        """What both models say of each trained token, as far as the loss asks for it."""
        unasked = {name for name in ("likelihoods", "entropies", "hits") if not getattr(self.loss.wanted, name)}
        values: dict[str, dict[Key, Array]] = {who: {} for who in asked}
        for sample, example in batch.items():
            for side in example.sides:
                if self.loss.wanted.scores:
                    values["policy"][sample, side] = self._judged(example, side).reshape(1).cpu().numpy()
                    continue
                logps_n, means_n, *more = answer_logps(self.policy, example, side, self.device)
                said = {"policy": logps_n, "logits": means_n, **dict(zip(OF_TOKENS, more, strict=True))}
                if self.start is not None:
                    said["reference"], *_ = answer_logps(self.start, example, side, self.device)
                for who, each in said.items():
                    if who in asked and who not in unasked:
                        values[who][sample, side] = each.cpu().numpy()
        return values

    def _sums(self, batch: Mapping[int, TokenExample], values: Mapping[str, Mapping[Key, Array]]) -> dict[str, Array]:
        """Add up the tokens of each answer, as the loss weighs them."""
        beyond, sums = self.loss.wanted.tail_weight, {}
        for who in ("policy", "reference", *OF_TOKENS):
            for side in next(iter(batch.values())).sides if values[who] else ():
                weights = [np.ones(1) if self.loss.wanted.scores else
                           rules.token_weights(example, side, 1.0 if who in OF_TOKENS else beyond)
                           for example in batch.values()]  # fmt: skip
                tokens = [values[who][sample, side] for sample in batch]
                sums[f"{who}/{side}"] = np.array([(a * b).sum() for a, b in zip(tokens, weights, strict=True)])
        return sums

    @torch.no_grad()
    def held_out(self, examples: Sequence[TokenExample]) -> dict[str, float]:
        batch = dict(enumerate(examples))
        return self._values(0, batch).row


def expected_steps(cfg: Config, loss: Loss, steps: int, held_out: int, folder: Path) -> Expected:
    """Take the first `steps` optimizer steps, then evaluate the first `held_out` held-out examples."""
    reference = Reference(cfg, loss, load_tokenizer(cfg), TensorFiles(folder))
    expected = Expected(examples=len(reference.examples), total_steps=reference.total, tokens={}, steps=[],
                        asks=Asked(loss.wanted.tail_weight, loss.wanted.mean_tokens, loss.wanted.margins,
                                   loss.wanted.scores))  # fmt: skip
    total = 0
    for number in range(1, steps + 1):
        step = reference.step(number)
        total += int(step.row["tokens"])
        step.row["total_tokens"] = total
        step.row = {f"train/{name}": value for name, value in step.row.items()} | {"step": number}
        expected.tokens |= {sample: reference.examples[sample] for sample in step.samples}
        expected.steps.append(step)
    if held_out:
        examples = reference.data.held_out[:held_out]
        expected.held_tokens = dict(enumerate(examples))
        expected.steps[-1].row |= {f"eval/{name}": value for name, value in reference.held_out(examples).items()}
    return expected
