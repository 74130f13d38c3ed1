"""The reference for samples that the policy draws: it takes the drawn tokens as given, and computes all else by itself.

From the tokens come, in one process and in float64: what each model says of them, their rewards where these can be
computed again, which samples count, advantages, the whole train batch's loss, its gradient, the optimizer's step, and
the logged values. Only the formulas of credit, advantage and loss are the product's (`policy_formula.py`).

Shape letters: T tokens of one sequence, n of its answer, N samples of a rollout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlexp.config.schema import Config
from rlexp.config.schema.losses import CriticName, PPOConfig
from rlexp.training.algos.policy_loss import PolicyLoss
from rlexp.training.model.float64 import precise
from rlexp.verify.records import (
    Array,
    Asked,
    Drawn,
    DrawnExpected,
    Expected,
    RolloutExpected,
    TensorFiles,
    Terms,
    TokenAnswer,
    TokenPrompt,
)
from rlexp.verify.reference import rollout_rules as rules
from rlexp.verify.reference.drawing import HELD_OUT, number_of, strayed
from rlexp.verify.reference.model import hidden_states, load, load_tokenizer, logps_of, of_critic, of_reference
from rlexp.verify.reference.optimizer import CRITIC
from rlexp.verify.reference.pairs import examples_of
from rlexp.verify.reference.policy_formula import Answers, credited, means_of, terms_of
from rlexp.verify.reference.rewards import asked_again, ended, ends_of, scored, text_of
from rlexp.verify.reference.stepped import Stepped

SIDE = "answer"
APART = 1e-13  # from here on a difference of the weights, relative to the largest, may be seen in a gradient


@dataclass(frozen=True)
class Rollout:
    """The samples of a rollout by their places, as the run drew them; of held-out prompts there is one each."""

    number: int
    samples: Sequence[Drawn]


@dataclass(frozen=True)
class Given:
    """What the reference is given of a run."""

    rollouts: Sequence[Rollout]
    answers: Rollout | None  # to held-out prompts
    held_out: int  # how many of these there must be
    ran: Path | None  # the run's weights after each step
    exact: bool  # whether the run computed in float64, its reward models too
    rounding: float  # by which the log-probabilities may differ that tokens were drawn from


@dataclass(frozen=True)
class Said:
    """What the models say of an answer's tokens, each (n,)."""

    policy: Tensor
    entropies: Tensor
    values: Tensor | None


class Critic(nn.Module):
    """A row of weights, all 0 at the start, over the hidden states of its own trunk or of the policy's."""

    def __init__(self, trunk: nn.Module | None, width: int) -> None:
        super().__init__()
        if trunk is not None:
            self.trunk = trunk
        self.head = nn.Linear(width, 1, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_TE: Tensor, tokens_T: Tensor) -> Tensor:
        if hasattr(self, "trunk"):
            hidden_TE = hidden_states(self.trunk, tokens_T)
        values_T: Tensor = self.head(hidden_TE).squeeze(-1)
        return values_T


class OfSamples(Stepped):
    """The policy and its critic, stepped in one process, and the model that the policy is compared with."""

    def __init__(self, cfg: Config, loss: PolicyLoss, tokenizer: Any, files: TensorFiles, given: Given) -> None:
        super().__init__(cfg, files)
        self.given, self.apart = given, 0.0
        self.loss, self.tokenizer = loss, tokenizer
        self.policy = load(cfg, self.device)
        self.start = load(of_reference(cfg), self.device) if loss.wanted.reference else None
        self.critic: Critic | None = None
        if isinstance(cfg.loss, PPOConfig):
            trunk = of_critic(cfg, self.device) if cfg.loss.critic is CriticName.own else None
            self.critic = Critic(trunk, self.policy.get_output_embeddings().in_features).to(self.device)
        self.data = examples_of(cfg, tokenizer)
        self.total = rules.total_steps(cfg, self.data.sizes)
        self.beta = rules.loss_of(cfg).beta  # of the controller, for the next rollout
        self.ends = ends_of(self.policy, tokenizer)
        critic = {} if self.critic is None else dict(self.critic.named_parameters())
        self.train(self.policy, {f"{CRITIC}{name}": parameter for name, parameter in critic.items()})

    # ---- what the models say ----

    def said(self, example: TokenAnswer, model: Any = None) -> Said:
        tokens_T = torch.from_numpy(example.sequence(SIDE)).to(self.device)
        own = model is None
        model = self.policy if own else model
        first = len(example.prompt)
        with precise(torch.float64):
            hidden_TE = hidden_states(model.base_model, tokens_T)
            logps_n, _, _, entropies_n, _ = logps_of(model, hidden_TE, tokens_T, first, self.cfg.rollout.temperature)
            values_n = self.critic(hidden_TE, tokens_T)[first - 1 : -1] if own and self.critic is not None else None
        return Said(logps_n, entropies_n, values_n)

    @contextlib.contextmanager
    def weights_after(self, step: int, now: int) -> Iterator[None]:
        """Compute with the weights after another step than the last one."""
        if step == now:
            yield
            return
        before = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, weight in self.weights_of(step).items():
            self.parameters[name].data = weight.to(self.device)
        try:
            yield
        finally:
            for name, weight in before.items():
                self.parameters[name].data = weight

    def follow(self, step: int) -> None:
        """Go on from the run's weights after a step, if the reference's own are others: those of a run in less than
        float64 always, those of a run in float64 where Adam has divided by a gradient that is only rounding."""
        if self.given.ran is None or not step:
            return
        files = TensorFiles(self.given.ran)
        if files.names("weights", step) != sorted(self.parameters):  # which is a difference of its own
            return
        theirs = {name: torch.from_numpy(files.read("weights", step, name).astype(np.float64)).to(self.device)
                  for name in self.parameters}  # fmt: skip
        if any(weight.shape != self.parameters[name].shape or not weight.isfinite().all()
               for name, weight in theirs.items()):  # fmt: skip
            return
        apart = max(float((self.parameters[name].detach() - weight).abs().max() / (weight.abs().max() or 1.0))
                    for name, weight in theirs.items())  # fmt: skip
        self.apart = max(self.apart, apart)
        if not self.given.exact or apart > APART:
            for name, weight in theirs.items():
                self.parameters[name].data.copy_(weight)
            self.write_weights(step)

    # ---- a rollout ----

    @torch.no_grad()
    def rollout(self, drawn: Rollout, step: int) -> RolloutExpected:
        """Judge a rollout's samples before the first step on them."""
        cfg = self.cfg
        indices = rules.prompts_of(cfg, self.data.sizes, drawn.number)
        made = self._answered(drawn, [self.data.train[index] for index in indices], indices, step)
        examples = examples_with(made, drawn)
        said = [self.said(each) for each in examples]
        made.old = [_array(each.policy) for each in said]
        made.values = None if self.critic is None else [_array(each.values) for each in said]
        if self.start is not None:
            made.reference = [_array(self.said(each, self.start).policy) for each in examples]
        with self.weights_after(rules.drawn_after(cfg, drawn.number), step - 1):
            self._drawn(made, drawn, examples, drawn.number)
        made.kl_coef = self.beta
        made.counts = rules.counts_of(cfg, made.scores, made.stopped)
        self._credit(made)
        lengths = [len(each) for each in made.old]
        made.row |= rules.of_rollout(cfg, drawn.number, made.kl_coef, made.scores, lengths, made.old, made.reference)
        made.row |= rules.of_gap(made.old, made.behaviour)
        if made.returns is not None and made.values is not None:
            made.row["val/explained_variance"] = rules.explained_variance(made.returns, made.values)
        self.beta = rules.next_coefficient(cfg, self.beta, made.row["objective/kl"])
        return made

    def _answered(self, drawn: Rollout, prompts: Sequence[Any], indices: Sequence[int], step: int) -> RolloutExpected:
        """Read the answers as texts, and ask for their rewards."""
        cfg, each = self.cfg, len(drawn.samples) // len(prompts)
        of_sample: list[TokenPrompt] = [prompt for prompt in prompts for _ in range(each)]
        answers = [sample.answer for sample in drawn.samples]
        texts = [text_of(self.tokenizer, answer.tolist(), cfg.rollout.stop) for answer in answers]
        stopped = [ended(self.tokenizer, answer.tolist(), self.ends, cfg.rollout.stop) for answer in answers]
        seen = {name: np.array([sample.terms[name] for sample in drawn.samples]) for name in drawn.samples[0].terms}
        of_row = [index for index in indices for _ in range(each)]
        judged = asked_again(cfg.reward, of_sample, of_row, texts, answers, seen, self.tokenizer, self.device,
                             exact=self.given.exact, max_length=cfg.data.max_length)  # fmt: skip
        terms = {name: judged.terms.get(name, seen[name]) for name in judged.weights}
        scores = scored(terms, judged.weights, stopped, cfg.rollout)
        row = rules.of_answers(terms, scores, [len(answer) for answer in answers], stopped)
        return RolloutExpected(
            number=drawn.number, step=step, indices=list(indices), prompts=list(prompts), texts=texts, stopped=stopped,
            answers=[tuple(answer.tolist()) for answer in answers],
            beyond=[self._beyond(answer) for answer in answers],
            terms=judged.terms, given=judged.given, notes=judged.notes, scores=scores, row=row,
        )  # fmt: skip

    def _beyond(self, answer: Array) -> int | None:
        """Where an answer should have ended that goes on."""
        ends = (n for n in range(1, len(answer)) if ended(self.tokenizer, answer[:n], self.ends, self.cfg.rollout.stop))
        return next(ends, None)

    def _credit(self, made: RolloutExpected) -> None:
        made_of = divergences_of(self.cfg, made.old, made.reference)
        result = credited(self.loss, made.scores, made_of, made.values, made.kl_coef, self.cfg.rollout.n_samples)
        made.advantages, made.returns = result.advantages, result.returns

    @torch.no_grad()
    def held_out(self, drawn: Rollout, step: int) -> RolloutExpected:
        """Judge the answers to held-out prompts."""
        prompts = self.data.held_out[: self.given.held_out]
        made = self._answered(drawn, prompts, list(range(len(prompts))), step)
        self._drawn(made, drawn, examples_with(made, drawn), HELD_OUT)
        return made

    def _drawn(self, made: RolloutExpected, drawn: Rollout, examples: Sequence[TokenAnswer], number: int) -> None:
        """Say with which log-probabilities tokens are drawn, and whether their random numbers choose them."""
        each = len(drawn.samples) // len(made.prompts)
        for place, example in enumerate(examples):
            made.behaviour.append(_array(self.said(example).policy))
            prompt, sample = made.indices[place // each], place % each
            tokens_T, first = torch.from_numpy(example.sequence(SIDE)).to(self.device), len(example.prompt)
            numbers_n = torch.tensor(
                [number_of(self.cfg.seed, number, prompt, sample, at) for at in range(len(example.ids(SIDE)))],
                dtype=torch.float64, device=self.device,
            )  # fmt: skip
            with precise(torch.float64):
                hidden_nE = hidden_states(self.policy.base_model, tokens_T)[first - 1 : -1]
                found = strayed(self.policy.get_output_embeddings(), hidden_nE, tokens_T[first:], numbers_n,
                                self.cfg.rollout, self.given.rounding)  # fmt: skip
            made.strayed.append(found.apart_n)
            made.doubtful += found.doubtful

    # ---- a step ----

    def step(self, number: int, rollout: RolloutExpected, drawn: Rollout) -> DrawnExpected:
        """Take one optimizer step."""
        places = rules.samples_of(self.cfg, number)
        every = examples_with(rollout, drawn)
        examples = [every[place] for place in places]
        with torch.no_grad():
            said = [self.said(each) for each in examples]
        now = {"policy": [_array(each.policy) for each in said], "entropies": [_array(each.entropies) for each in said]}
        if self.critic is not None:
            now["values"] = [_array(each.values) for each in said]
        batch = batch_of(self.cfg, rollout, places, now)
        terms = terms_of(self.loss, batch, rollout.kl_coef)
        self._backward(examples, terms.slopes)
        trained = np.repeat(np.array(batch.counts, dtype=float), batch.lengths)
        row = {"loss": terms.loss, **terms.weighted, **terms.replicated, **means_of([terms], [trained])}
        row |= {"tokens": sum(each.tokens for each in examples), "episode": (rollout.number + 1) * len(drawn.samples)}
        if rollout.step == number:
            row |= rollout.row
        keys = [(place, SIDE) for place in places]
        expected = DrawnExpected(
            number=number,
            samples=tuple(places),
            policy=dict(zip(keys, now["policy"], strict=True)),
            loss=terms.loss,
            row=row,
            rollout=rollout,
            entropies=dict(zip(keys, now["entropies"], strict=True)),
            values=dict(zip(keys, now.get("values", []), strict=False)),
            terms=terms,
            scale=scale_of(terms),
            learned=self._learned(rollout, batch),
        )
        self.finish(expected, [each.origin for each in examples])
        expected.row["epoch"] = number / rules.steps_per_epoch(self.cfg, self.data.sizes)
        return expected

    def _learned(self, rollout: RolloutExpected, batch: Answers) -> int:
        """Count the tokens whose advantage comes from scores that differ."""
        scores = rollout.scores[rollout.counts]
        if not len(scores) or np.ptp(scores) <= rules.ALIKE * np.abs(scores).max():
            return 0
        pairs = zip(batch.columns["advantages"], batch.counts, strict=True)
        return sum(int((advantages != 0).sum()) for advantages, counts in pairs if counts)

    def _backward(self, examples: Sequence[TokenAnswer], slopes: dict[str, Array]) -> None:
        """Send the loss's derivatives backward, one sequence at a time."""
        first = 0
        for example in examples:
            mine = slice(first, first + len(example.ids(SIDE)))
            first = mine.stop
            if not any(slope[mine].any() for slope in slopes.values()):
                continue
            said = self.said(example)
            outputs = [(getattr(said, name), slope[mine]) for name, slope in slopes.items() if slope.any()]
            torch.autograd.backward(
                [output for output, _ in outputs],
                [torch.from_numpy(np.ascontiguousarray(slope)).to(self.device) for _, slope in outputs],
            )


def examples_with(rollout: RolloutExpected, drawn: Rollout) -> list[TokenAnswer]:
    """The drawn answers, each behind the prompt that the rules give it."""
    each = len(drawn.samples) // len(rollout.prompts)
    prompts = [rollout.prompts[place // each] for place in range(len(drawn.samples))]
    return [TokenAnswer(prompt.prompt, sample.answer, prompt.origin)
            for prompt, sample in zip(prompts, drawn.samples, strict=True)]  # fmt: skip


def scale_of(terms: Terms) -> float:
    """How far the loss moves if each token's log-probability moves by 1: the size of its terms, which may cancel."""
    return max(abs(terms.loss), float(np.abs(terms.slopes["policy"]).sum()))


def divergences_of(cfg: Config, old: Sequence[Array], reference: Sequence[Array] | None) -> list[Array]:
    """The estimate of each token's divergence from the reference; zeros without one."""
    kind = rules.loss_of(cfg).kl
    if reference is None:
        return [np.zeros(len(each)) for each in old]
    return [
        rules.divergence(kind, a.astype(np.float64) - b.astype(np.float64)) for a, b in zip(old, reference, strict=True)
    ]


def batch_of(cfg: Config, rollout: Any, places: Sequence[int], now: dict[str, list[Array]]) -> Answers:
    """A train batch as the loss is given it, from what is known of a rollout's samples."""
    counts = [bool(rollout.counts[place]) for place in places]
    advantages = [rollout.advantages[place].astype(np.float64) for place in places]
    if rules.loss_of(cfg).whiten:
        advantages = rules.whitened(advantages, counts)
    columns: dict[str, list[Array]] = {**now, "advantages": advantages}
    for name, of in (("old", "old"), ("behaviour", "behaviour"), ("reference", "reference"), ("old_values", "values"),
                     ("returns", "returns")):  # fmt: skip
        known = getattr(rollout, of)
        if known is not None:
            columns[name] = [known[place] for place in places]
    lengths = [len(each) for each in advantages]
    return Answers(columns, rules.token_weights(cfg, lengths, counts), counts, rules.sequence_weights(counts))


def _array(values: Tensor | None) -> Array:
    assert values is not None
    found: Array = values.detach().cpu().numpy()
    return found


def expected_of_samples(cfg: Config, loss: PolicyLoss, steps: int, given: Given, folder: Path) -> Expected:
    """Take the first `steps` optimizer steps on the samples that a run drew; then judge held-out answers."""
    model = OfSamples(cfg, loss, load_tokenizer(cfg), TensorFiles(folder), given)
    expected = Expected(examples=len(model.data.train), total_steps=model.total, tokens={}, steps=[],
                        asks=Asked(1.0, mean_tokens=False, margins=False, scores=False))  # fmt: skip
    total = 0
    for number in range(1, steps + 1):
        model.follow(number - 1)
        at = rules.rollout_of(cfg, number)
        if at == len(expected.rollouts):
            expected.rollouts.append(model.rollout(given.rollouts[at], number))
        step = model.step(number, expected.rollouts[at], given.rollouts[at])
        total += int(step.row["tokens"])
        step.row["total_tokens"] = total
        step.row = {f"train/{name}": value for name, value in step.row.items()} | {"step": number}
        expected.steps.append(step)
    model.follow(steps)
    expected.apart = model.apart
    if given.answers is not None:
        expected.held_rollout = model.held_out(given.answers, steps)
        expected.steps[-1].row |= {f"eval/{name}": value for name, value in expected.held_rollout.row.items()}
    return expected
