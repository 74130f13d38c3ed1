"""Steps on samples that the policy drew, by transformers alone: the drawn tokens are taken as given.

From the tokens come, in one process and in float64: what each model says of them, whether their random numbers choose
them, their rewards, which samples count, advantages, the loss and its gradient, and the logged values.

Shape letters: T tokens of one sequence, n of its answer, N samples of a rollout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlexp.config.schema import Config
from rlexp.config.schema.losses import CriticName, PPOConfig
from rlexp.training.model.float64 import precise
from rlexp.verify import rollout_rules as rules
from rlexp.verify.drawing import HELD_OUT, number_of, strayed
from rlexp.verify.formula import Answers, Terms, credited, policy_loss_of, terms_of
from rlexp.verify.jobs import AloneJob
from rlexp.verify.model import hidden_states, load, logps_of, of_critic, of_reference
from rlexp.verify.one_process import Alone, whole
from rlexp.verify.optimizer import CRITIC
from rlexp.verify.recording import ANSWER, Array, DrawnSample, Scene, TokenExample
from rlexp.verify.rewards import Judges, ended, ends_of, text_of
from rlexp.verify.rows import judged_by_rows

APART = 1e-13  # from here on a difference of the weights, relative to the largest, may be seen in a gradient


@dataclass(frozen=True)
class OfTokens:
    """What the models say of an answer's tokens, each (n,)."""

    policy: Tensor
    entropies: Tensor
    values: Tensor | None


class CriticAlone(nn.Module):
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


@dataclass
class DrawnRollout:
    """What is made of a rollout's samples, by their places."""

    number: int
    examples: Sequence[TokenExample]
    scores: Array
    stopped: Sequence[bool]
    kl_coef: float = 0.0
    old: Sequence[Array] = ()
    behaviour: Sequence[Array] = ()
    reference: Sequence[Array] | None = None
    values: Sequence[Array] | None = None
    counts: Array | None = None
    advantages: Sequence[Array] = ()
    returns: Sequence[Array] | None = None
    row: Mapping[str, float] | None = None


class AloneSamples(Alone):
    """The policy and its critic, stepped in one process, and the model that the policy is compared with."""

    batch = "samples of the train batch"

    def __init__(self, job: AloneJob) -> None:
        super().__init__(job)
        cfg = job.cfg
        self.loss = policy_loss_of(cfg)
        self.policy = load(cfg, self.device)
        self.start = load(of_reference(cfg), self.device) if self.loss.wanted.reference else None
        self.critic: CriticAlone | None = None
        if isinstance(cfg.loss, PPOConfig):
            trunk = of_critic(cfg, self.device) if cfg.loss.critic is CriticName.own else None
            self.critic = CriticAlone(trunk, self.policy.get_output_embeddings().in_features).to(self.device)
        self.total = rules.total_steps(cfg, self.sizes)
        self.beta = rules.loss_of(cfg).beta  # of the controller, for the next rollout
        self.ends = ends_of(self.policy, self.tokenizer)
        self.judges = Judges(cfg, self.tokenizer, self.device, exact=job.exact)
        critic = {} if self.critic is None else dict(self.critic.named_parameters())
        self.train(self.policy, {f"{CRITIC}{name}": parameter for name, parameter in critic.items()})
        self.rollouts: dict[int, DrawnRollout] = {}
        self.facts = self.recording.facts
        self.facts |= {"doubtful": 0, "learned": 0, "apart": 0.0, "given": {}, "notes": {}, "values": False}

    def begin(self) -> None:
        super().begin()
        prompts = {sample.origin: sample for samples in self.given.rollouts.values() for sample in samples}
        examples = [TokenExample(each.prompt, {}, {}, each.origin) for each in prompts.values()]
        judged_by_rows(self.cfg, self.tokenizer, self.recording.scenes[0], examples)

    # ---- what the models say ----

    def of_tokens(self, example: TokenExample, model: Any = None) -> OfTokens:
        tokens_T = torch.from_numpy(example.sequence(ANSWER)).to(self.device)
        own, model, first = model is None, self.policy if model is None else model, len(example.prompt)
        with precise(torch.float64):
            hidden_TE = hidden_states(model.base_model, tokens_T)
            logps_n, _, _, entropies_n, _ = logps_of(model, hidden_TE, tokens_T, first, self.cfg.rollout.temperature)
            values_n = self.critic(hidden_TE, tokens_T)[first - 1 : -1] if own and self.critic is not None else None
        return OfTokens(logps_n, entropies_n, values_n)

    @contextlib.contextmanager
    def weights_after(self, step: int, now: int) -> Iterator[None]:
        """Compute with the weights after another step than the last one."""
        if step == now:
            yield
            return
        before = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = torch.from_numpy(self.files.read("weights", step, name).copy()).to(self.device)
        try:
            yield
        finally:
            for name, weight in before.items():
                self.parameters[name].data = weight

    def follow(self, step: int) -> None:
        """Go on from the run's weights after a step, if the reference's own are others: those of a run in less than
        float64 always, those of a run in float64 where Adam has divided by a gradient that is only rounding."""
        if not step or self.given.folder is None:
            return
        files = self.given.files
        if files.names("weights", step) != sorted(self.parameters):  # which is a difference of its own
            return
        theirs = {name: torch.from_numpy(files.read("weights", step, name).astype(np.float64)).to(self.device)
                  for name in self.parameters}  # fmt: skip
        if any(weight.shape != self.parameters[name].shape or not weight.isfinite().all()
               for name, weight in theirs.items()):  # fmt: skip
            return
        apart = max(float((self.parameters[name].detach() - weight).abs().max() / (weight.abs().max() or 1.0))
                    for name, weight in theirs.items())  # fmt: skip
        self.facts["apart"] = max(self.facts["apart"], apart)
        if not self.job.exact or apart > APART:
            for name, weight in theirs.items():
                if not torch.equal(self.parameters[name], weight):
                    self.parameters[name].data.copy_(weight)
                    self.files.write("weights", step, name, weight.cpu().numpy())

    # ---- a rollout ----

    @torch.no_grad()
    def rollout(self, number: int, step: int) -> bool:
        """Judge a rollout's samples before the first step on them; say whether all are there."""
        cfg, scene = self.cfg, Scene(f"rollout {number + 1}", step)
        self.recording.scenes.append(scene)
        samples = self.given.rollouts.get(number, [])
        indices = rules.prompts_of(cfg, self.sizes, number)
        scene.put("prompts", ("planned",), np.array(indices))
        of_sample = [index for index in indices for _ in range(cfg.rollout.n_samples)]
        if not self.complete(scene, samples, rules.size_of(cfg)):
            return False
        made = self.answered(scene, samples, of_sample, number)
        each_of = [self.of_tokens(example) for example in made.examples]
        made.old = [whole(each.policy) for each in each_of]
        made.values = None if self.critic is None else [whole(each.values) for each in each_of]  # type: ignore[arg-type]
        if self.start is not None:
            made.reference = [whole(self.of_tokens(each, self.start).policy) for each in made.examples]
        with self.weights_after(rules.drawn_after(cfg, number), step - 1):
            made.behaviour = self.drawn(scene, made.examples, of_sample, cfg.rollout.n_samples, number)
        self.credit(scene, made, samples)
        self.put_rollout(scene, made)
        self.rollouts[number] = made
        return True

    def complete(
        self, scene: Scene, samples: Sequence[DrawnSample], count: int, name: str = "ranks that hold a sample"
    ) -> bool:
        for place in range(count):
            scene.put(name, (place, ANSWER), 1)
        return [sample.place for sample in samples] == [*range(count)]

    def answered(
        self, scene: Scene, samples: Sequence[DrawnSample], indices: Sequence[int], number: int
    ) -> DrawnRollout:
        """Read the answers as texts, and ask for their rewards."""
        cfg, stop = self.cfg, self.cfg.rollout.stop
        texts = [text_of(self.tokenizer, sample.answer, stop) for sample in samples]
        stopped = [ended(self.tokenizer, sample.answer, self.ends, stop) for sample in samples]
        terms = self.judges.judged(samples, texts)
        self.facts["given"] |= self.judges.given
        self.facts["notes"] |= self.judges.notes
        scores = self.judges.scored(terms, stopped)
        longest = cfg.rollout.max_new_tokens
        for place, sample in enumerate(samples):
            key = (place, ANSWER)
            beyond = next((n for n in range(1, len(sample.answer))
                           if ended(self.tokenizer, sample.answer[:n], self.ends, stop)), None)  # fmt: skip
            right = len(sample.answer) <= longest if stopped[place] else len(sample.answer) == longest
            length = beyond or (len(sample.answer) if right else longest)
            scene.expect("tokens of an answer", key, len(sample.answer), length)
            facts = {"prompt of a sample": indices[place], "answer": sample.answer, "text of an answer": texts[place],
                     "end of an answer": stopped[place], "score": float(scores[place])}  # fmt: skip
            facts |= {f"reward {name}": float(each[place]) for name, each in terms.items() if name in self.judges.again}
            for name, fact in facts.items():
                scene.put(name, key, fact)
        known = {index: sample.prompt for sample, index in zip(samples, indices, strict=True)}
        examples = [DrawnSample(**vars(sample) | {"prompt": known[index]}).example
                    for sample, index in zip(samples, indices, strict=True)]  # fmt: skip
        row = rules.of_answers(terms, scores, [len(sample.answer) for sample in samples], stopped)
        return DrawnRollout(number, examples, scores, stopped, row=row)

    def drawn(
        self, scene: Scene, examples: Sequence[TokenExample], indices: Sequence[int], each: int, number: int
    ) -> list[Array]:
        """Say with which log-probabilities tokens are drawn, and whether their random numbers choose them."""
        behaviour = []
        for place, example in enumerate(examples):
            behaviour.append(whole(self.of_tokens(example).policy))
            tokens_T, first = torch.from_numpy(example.sequence(ANSWER)).to(self.device), len(example.prompt)
            numbers_n = torch.tensor(
                [number_of(self.cfg.seed, number, indices[place], place % each, at)
                 for at in range(len(tokens_T) - first)], dtype=torch.float64, device=self.device,
            )  # fmt: skip
            with precise(torch.float64):
                hidden_nE = hidden_states(self.policy.base_model, tokens_T)[first - 1 : -1]
                strays = strayed(self.policy.get_output_embeddings(), hidden_nE, tokens_T[first:], numbers_n,
                                self.cfg.rollout, self.job.rounding)  # fmt: skip
            scene.expect(
                "random number of a generated token", (place, ANSWER), strays.apart_n, np.zeros_like(strays.apart_n)
            )
            self.facts["doubtful"] += strays.doubtful
        return behaviour

    def credit(self, scene: Scene, made: DrawnRollout, samples: Sequence[DrawnSample]) -> None:
        """Say which samples count, what they earn, and what their tokens are worth, by the run's own scores and
        log-probabilities, which have been compared before."""
        cfg = self.cfg
        made.kl_coef = self.beta
        scores = np.array([sample.score for sample in samples])
        made.counts = rules.counts_of(cfg, scores, made.stopped)
        known = self.known(made)
        divergences = rules.divergences_of(cfg, known.old, known.reference)
        result = credited(self.loss, scores, divergences, known.values, made.kl_coef, cfg.rollout.n_samples)
        made.advantages, made.returns = result.advantages, result.returns
        prompts = np.arange(len(samples), dtype=float) // cfg.rollout.n_samples
        outcomes = {"scores": scores, "divergences": np.array([each.sum() for each in divergences]),
                    "prompts": prompts, "credit": result.credit}  # fmt: skip
        for name, each in outcomes.items():
            scene.put_all(f"outcomes: {name}", [(place, ANSWER) for place in range(len(samples))], each)
        scene.put("coefficient", ("of the divergence",), made.kl_coef)

    def put_rollout(self, scene: Scene, made: DrawnRollout) -> None:
        for name in ("behaviour", "old", "reference", "values", "advantages", "returns"):
            for place, each in enumerate(getattr(made, name) or []):
                scene.put(f"scored: {name}", (place, ANSWER), each)
        assert made.counts is not None
        for place, counts in enumerate(made.counts):
            scene.put("counts", (place, ANSWER), bool(counts))
        lengths, row = [len(each) for each in made.old], dict(made.row or {})
        row |= rules.of_rollout(self.cfg, made.number, made.kl_coef, made.scores, lengths, made.old, made.reference)
        row |= rules.of_gap(made.old, made.behaviour)
        if made.returns is not None and made.values is not None:
            row["val/explained_variance"] = rules.explained_variance(made.returns, made.values)
        known = self.known(made)
        by_run = rules.of_rollout(self.cfg, made.number, made.kl_coef, made.scores, lengths, known.old, known.reference)
        self.beta = rules.next_coefficient(self.cfg, self.beta, by_run["objective/kl"])
        made.row = row

    @torch.no_grad()
    def evaluate(self) -> None:
        """Judge the answers to held-out prompts."""
        self.follow(self.job.steps)
        if not self.job.held_out:
            return
        scene = Scene("held-out answers", self.job.steps)
        self.recording.scenes.append(scene)
        if not self.complete(scene, self.given.answers, self.job.held_out, "answer to a held-out prompt"):
            return
        indices = [*range(self.job.held_out)]
        made = self.answered(scene, self.given.answers, indices, -1)
        for place, (prompt, sample) in enumerate(zip(self.given.held_out, self.given.answers, strict=False)):
            scene.put("tokens of a sample", (place, ANSWER), np.concatenate((prompt.prompt, sample.answer)))
        for place, behaviour in enumerate(self.drawn(scene, made.examples, indices, 1, HELD_OUT)):
            scene.put("scored: behaviour", (place, ANSWER), behaviour)
        last = self.recording.steps()[-1]
        last.row |= {f"eval/{name}": value for name, value in (made.row or {}).items()}

    # ---- a step ----

    def step(self, number: int) -> bool:
        self.follow(number - 1)
        at, scene = rules.rollout_of(self.cfg, number), Scene(f"step {number}", number)
        begins = at not in self.rollouts
        if begins and not self.rollout(at, number):
            return False
        rollout = self.rollouts[at]
        places = rules.samples_of(self.cfg, number)
        examples = {place: rollout.examples[place] for place in places}
        self.put_batch(scene, places, examples)
        scene.put("rollout", ("of the step",), at + 1)
        with torch.no_grad():
            each_of = [self.of_tokens(example) for example in examples.values()]
        now = {name: [whole(getattr(each, name)) for each in each_of]
               for name in ("policy", "entropies", *(["values"] if self.critic is not None else []))}  # fmt: skip
        batch = batch_of(self.cfg, rollout, places, now)
        terms = terms_of(self.loss, batch, rollout.kl_coef)
        self.backward(list(examples.values()), terms.slopes)
        given = now if self.job.exact else self.as_recorded(scene.name, places, now)
        of_run = batch_of(self.cfg, self.known(rollout), places, given)
        self.put_step(scene, rollout, places, now, of_run, terms, terms_of(self.loss, of_run, rollout.kl_coef))
        if begins:
            scene.row |= {f"train/{name}": value for name, value in (rollout.row or {}).items()}
        self.finish(scene, terms.parts["loss"], rules.steps_per_epoch(self.cfg, self.sizes),
                    [example.origin for example in examples.values()])  # fmt: skip
        return True

    def known(self, rollout: DrawnRollout) -> DrawnRollout:
        """A rollout with what the run itself has kept of its samples, in its own numbers."""
        samples, kept = self.given.rollouts[rollout.number], dict[str, Any]()
        for name in ("old", "behaviour", "reference", "values", "advantages", "returns"):
            each_of = [getattr(sample, name) for sample in samples]
            if getattr(rollout, name) is not None and all(each is not None for each in each_of):
                kept[name] = each_of
        return replace(rollout, **kept)

    def as_recorded(
        self, name: str, places: Sequence[int], now: Mapping[str, Sequence[Array]]
    ) -> Mapping[str, Sequence[Array]]:
        """What the run's own models say now, where it has recorded it."""
        scene = next((scene for scene in self.given.scenes if scene.name == name), None)
        if scene is None or any(place not in {key[0] for key in scene.values.get("policy", {})} for place in places):
            return now
        return {who: [scene.values[who][place, ANSWER] for place in places] if who in scene.values else each
                for who, each in now.items()}  # fmt: skip

    def put_step(
        self, scene: Scene, rollout: DrawnRollout, places: Sequence[int], now: Mapping[str, Sequence[Array]],
        batch: Answers, own: Terms, terms: Terms,
    ) -> None:  # fmt: skip
        """Put down what the models say, and what the loss makes of what the run's own models say (`terms`); the loss
        and the logged values are those by the models alone (`own`)."""
        keys, lengths = [(place, ANSWER) for place in places], batch.lengths
        columns = {**now, **{f"given: {name}": each for name, each in batch.columns.items() if name not in now}}
        columns["given: weight"] = [np.full(n, weight) for n, weight in zip(lengths, batch.weights, strict=True)]
        columns["given: trained"] = [np.full(n, float(each)) for n, each in zip(lengths, batch.counts, strict=True)]
        ends = np.cumsum(lengths)[:-1]
        for who, slopes in ((who, slopes) for who, slopes in terms.slopes.items() if slopes.any()):
            columns[f"formula: slope by {who}"] = columns[f"derivative by {who}"] = np.split(slopes, ends)
        columns |= {f"logged {name}": np.split(each, ends) for name, each in {**terms.means, **terms.peaks}.items()}
        for name, each_of in columns.items():
            for key, each in zip(keys, each_of, strict=True):
                scene.put(name, key, each)
        for (place, side), tokens in zip(keys, [rollout.examples[place] for place in places], strict=True):
            scene.put("tokens of a sample", (place, side), tokens.sequence(side))
        scene.put_all("weight of an answer", keys, batch.answer_weights)
        scene.put_all("length of an answer", keys, np.array(lengths, dtype=float))
        scene.put_all("sum of policy", keys, np.array([each.sum() for each in now["policy"]]))
        scene.put("coefficient", ("of the divergence in the loss",), rollout.kl_coef)
        for name, part in terms.parts.items():
            scene.put("part of the loss", (name,), part)
        trained = np.repeat(np.array(batch.counts, dtype=float), lengths)
        row = dict(own.parts)
        if trained.sum():
            row |= {name: float((each * trained).sum() / trained.sum()) for name, each in own.means.items()}
            row |= {name: float(each[trained > 0].max()) for name, each in own.peaks.items()}
        row["tokens"] = sum(rollout.examples[place].tokens for place in places)
        row["episode"] = (rollout.number + 1) * len(rollout.examples)
        scene.row = {f"train/{name}": value for name, value in row.items()}
        self.recording.loss[scene.step] = own.parts["loss"], own.size
        self.facts["learned"] += learned(rollout, batch)
        self.facts["values"] |= any(bool(each.any()) for each in now.get("values", []))

    def backward(self, examples: Sequence[TokenExample], slopes: Mapping[str, Array]) -> None:
        """Send the loss's derivatives backward, one sequence at a time."""
        first = 0
        for example in examples:
            own = slice(first, first + len(example.answers[ANSWER]))
            first = own.stop
            if not any(slope[own].any() for slope in slopes.values()):
                continue
            made = self.of_tokens(example)
            outputs = [(getattr(made, name), slope[own]) for name, slope in slopes.items() if slope.any()]
            torch.autograd.backward(
                [output for output, _ in outputs],
                [torch.from_numpy(np.ascontiguousarray(slope)).to(self.device) for _, slope in outputs],
            )


def learned(rollout: DrawnRollout, batch: Answers) -> int:
    """Count the tokens whose advantage comes from scores that differ."""
    scores = rollout.scores[rollout.counts]
    if not len(scores) or np.ptp(scores) <= rules.ALIKE * np.abs(scores).max():
        return 0
    pairs = zip(batch.columns["advantages"], batch.counts, strict=True)
    return sum(int((advantages != 0).sum()) for advantages, counts in pairs if counts)


def batch_of(cfg: Config, rollout: DrawnRollout, places: Sequence[int], now: Mapping[str, Sequence[Array]]) -> Answers:
    """A train batch as the loss is given it, from what is known of a rollout's samples."""
    assert rollout.counts is not None
    counts = [bool(rollout.counts[place]) for place in places]
    advantages = [rollout.advantages[place].astype(np.float64) for place in places]
    if rules.loss_of(cfg).whiten:
        advantages = rules.whitened(advantages, counts)
    columns: dict[str, Sequence[Array]] = {**now, "advantages": advantages}
    for name, of in (("old", "old"), ("behaviour", "behaviour"), ("reference", "reference"), ("old_values", "values"),
                     ("returns", "returns")):  # fmt: skip
        known = getattr(rollout, of)
        if known is not None:
            columns[name] = [known[place] for place in places]
    lengths = [len(each) for each in advantages]
    return Answers(columns, rules.token_weights(cfg, lengths, counts), counts, rules.sequence_weights(counts))
