"""The stages of a step on samples that the policy drew; gradient and optimizer are those of any step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from rlexp.verify.compared_samples import COLUMNS, SampleStep
from rlexp.verify.findings import GRADIENT, LOGPS, LOSS, Clue, Finding, whole_factor
from rlexp.verify.records import Array
from rlexp.verify.reference import rollout_rules as rules
from rlexp.verify.reference.drawn import SIDE
from rlexp.verify.reference.policy_formula import means_of
from rlexp.verify.stages import data as packs
from rlexp.verify.stages import metrics as of_rows
from rlexp.verify.stages import rollouts

CLUES = {"policy": Clue.POLICY, "entropies": Clue.OF_TOKENS, "values": Clue.OF_TOKENS}
WORDS = {"old_values": "old value", "weight": "weight", "trained": "mark that it is trained on", "returns": "return",
         "advantages": "advantage", "old": "old log-probability", "behaviour": "log-probability when generated",
         "reference": "log-probability under the reference"}  # fmt: skip


def data(step: SampleStep) -> Iterator[Finding]:
    if step.begins:
        yield from rollouts.drawn(step)
    for found in packs.samples(step):  # the order within a rollout is the step's own
        yield dataclasses.replace(found, clue=Clue.EXECUTED) if found.clue is Clue.SAMPLES else found
    for trace in step.whole.traces:
        seen = trace.steps[step.place]
        for place, got in seen.tokens.items():
            for found in packs.tokens(step, got, step.tokens.get(place), place):
                yield dataclasses.replace(found, clue=Clue.EXECUTED)
    yield from packs.packs(step)


def logps(step: SampleStep) -> Iterator[Finding]:
    """Compare what the models say now; then what they said of the whole rollout before the first step on it."""
    for name in dict.fromkeys(name for seen in step.seen for name in seen.stale):
        yield step.finding(LOGPS, Clue.STALE, f"{name} as it computes", "another value", "what was stepped")
    gauge, allowed = step.whole.gauge, step.whole.allowed.logp
    for who, clue in CLUES.items():
        meant: Mapping[tuple[int, str], Array] = getattr(step.expected, who)
        for key, got in step.by_sequence(COLUMNS[who]).items() if meant else ():
            wanted = meant[key]
            apart = np.abs(got - wanted) / np.maximum(1.0, np.abs(wanted))
            if who == "policy":
                sums = abs(got.sum() - wanted.sum()) / max(1.0, abs(wanted.sum()))
                gauge.exceeds("sum of a sequence's log-probabilities", float(sums), allowed)
            quantity = {"policy": "log-probability of a token", "values": "value of a token"}.get(who, who)
            if gauge.exceeds(quantity, float(apart.max()), allowed):
                at = int(np.flatnonzero(~(apart <= allowed))[0])
                what = f"{who}, token {at} of {rollouts.of_sample(step, key[0])}"
                note = f"{int((~(apart <= allowed)).sum())} of its {len(apart)} tokens differ"
                yield step.finding(LOGPS, clue, what, got[at], wanted[at], note)
    yield from rollouts.scored(step)


def losses(step: SampleStep) -> Iterator[Finding]:
    yield from _known(step)
    yield from _terms(step)
    yield from _handed(step)
    got, wanted, scale = step.mean_loss(), step.expected.loss, step.expected.scale
    bound = step.whole.allowed.loss_of_samples
    if step.whole.gauge.exceeds("loss", abs(got - wanted) / (scale or 1.0), bound):
        yield step.finding(LOSS, Clue.POLICY, "loss of the train batch", got, wanted)


def _known(step: SampleStep) -> Iterator[Finding]:
    """Check what the loss is given of each token besides what the models say now: exactly what the rollout has, weighed
    and whitened over the whole train batch."""
    answers, places, kept = step.given_answers(), step.expected.samples, step.whole.allowed.kept
    lengths = answers.lengths
    wanted = {name: list(values) for name, values in answers.columns.items() if name not in COLUMNS}
    wanted["weight"] = [np.full(n, weight) for n, weight in zip(lengths, answers.weights, strict=True)]
    wanted["trained"] = [np.full(n, float(counts)) for n, counts in zip(lengths, answers.counts, strict=True)]
    for name, values in wanted.items():
        clue = Clue.WEIGHED if name in ("weight", "advantages") else Clue.COUNTS
        largest = max(float(np.abs(each).max()) for each in values) or 1.0
        got_of = step.by_sequence(f"{name}_n")
        for place, meant in zip(places, values, strict=True):
            got = got_of[place, SIDE]
            apart = np.abs(got - meant) / largest
            if step.whole.gauge.exceeds("what the loss is given", float(apart.max()), kept):
                at = int(np.flatnonzero(~(apart <= kept))[0])
                what = f"{WORDS[name]} that the loss is given of token {at} of {rollouts.of_sample(step, place)}"
                yield step.finding(LOSS, clue, what, got[at], meant[at], whole_factor(got[at], meant[at]).lstrip("; "))
    yield from _of_answers(step, dict(zip(places, answers.answer_weights, strict=True)))
    coefficient = step.run.seen[0].kl_coef
    for trace in step.whole.traces:
        for micro in trace.steps[step.place].micros:
            if micro.terms is not None and micro.terms.kl_coef != coefficient:
                what = f"coefficient of the divergence in the loss, on rank {trace.rank}"
                yield step.finding(LOSS, Clue.COUNTS, what, micro.terms.kl_coef, coefficient)


def _of_answers(step: SampleStep, weights: Mapping[int, float]) -> Iterator[Finding]:
    """Check what the loss is given of whole answers, and how it adds up their tokens."""
    policy, allowed = step.by_sequence("policy_n"), step.whole.allowed
    for trace in step.whole.traces:
        for micro in trace.steps[step.place].micros:
            for what, name, clue, bound, of in (
                ("weight", "answer_weights", Clue.WEIGHED, allowed.kept, lambda place: weights[place]),
                ("length", "lengths", Clue.COUNTS, allowed.kept, lambda place: len(policy[place, SIDE])),
                ("sum of log-probabilities", "sums", Clue.SUMS, allowed.formula,
                 lambda place: policy[place, SIDE].sum(dtype=np.float64)),
            ):  # fmt: skip
                meant = np.array([float(of(place)) for place in micro.samples])
                quantity = "sums of answers" if name == "sums" else "what the loss is given"
                wrong = step.first_wrong(quantity, micro.known[name], meant, 1e-300, bound)
                if wrong is not None:
                    named = f"{what} of {rollouts.of_sample(step, micro.samples[wrong])}, on rank {trace.rank}"
                    yield step.finding(LOSS, clue, named, micro.known[name][wrong], meant[wrong])


def _terms(step: SampleStep) -> Iterator[Finding]:
    """Check the parts of the loss and its derivatives, given all that the run gave to it."""
    again, allowed = step.again, step.whole.allowed.formula
    scale = float(np.abs(again.slopes["policy"]).sum()) or 1.0
    for name, meant in {"loss": again.loss, **again.weighted, **again.replicated}.items():
        total = step.total(name)
        size = max(scale, abs(meant))
        if step.whole.gauge.exceeds("parts of the loss, given the tokens", abs(total - meant) / size, allowed):
            what = f"{name} of the train batch, given the values of its tokens"
            yield step.finding(LOSS, _whose(step), what, total, meant, whole_factor(total, meant).lstrip("; "))
    ends = np.cumsum([len(step.tokens[place].ids(SIDE)) for place in step.expected.samples])[:-1]
    for name, flat in again.slopes.items():
        largest = float(np.abs(flat).max())
        if not largest:
            continue
        got_of = step.by_sequence(f"slope of {name}")
        for place, slopes in zip(step.expected.samples, np.split(flat, ends), strict=True):
            got = got_of[place, SIDE]
            apart = np.abs(got - slopes) / largest
            if step.whole.gauge.exceeds("derivatives of the loss, given the tokens", float(apart.max()), allowed):
                at = int(np.flatnonzero(~(apart <= allowed))[0])
                what = f"derivative of the loss by {name}, token {at} of {rollouts.of_sample(step, place)}"
                missing = np.isnan(got).all()  # nothing was differentiated by it
                clue = Clue.COUNTS if missing else _whose(step)
                yield step.finding(LOSS, clue, what, "is not computed" if missing else got[at], slopes[at])


def _whose(step: SampleStep) -> Clue:
    """Whether the run's loss is another formula than its configuration asks for, or the formula itself depends on
    which tokens it is given together."""
    terms = [micro.terms for seen in step.seen for micro in seen.micros if micro.terms is not None]
    allowed = step.whole.allowed.formula
    other = any(abs(each.loss - each.configured) > allowed * max(abs(each.loss), 1e-3) for each in terms)
    return Clue.COUNTS if other else Clue.LOSSES


def _handed(step: SampleStep) -> Iterator[Finding]:
    """Check the scalar that each rank hands to its engine, and the mark of the last one."""
    world = len(step.whole.traces)
    for trace in step.whole.traces:
        micros = trace.steps[step.place].micros
        for place, micro in enumerate(micros):
            assert micro.terms is not None
            where = f"micro-batch {place + 1} of rank {trace.rank}"
            got, wanted = float(micro.handed if micro.handed is not None else math.nan), micro.terms.loss * world
            apart = abs(got - wanted) / max(0.1, abs(wanted))
            if step.whole.gauge.exceeds("loss handed to the engine", apart, step.whole.allowed.formula):
                note = f"its part of the loss × {world} ranks" + whole_factor(got, wanted)
                yield step.finding(LOSS, Clue.HANDED, f"loss handed to the engine, {where}", got, wanted, note)
            if micro.last is not (place + 1 == len(micros)):
                what = f"mark of the last micro-batch, {where}"
                yield step.finding(LOSS, Clue.HANDED, what, micro.last, not micro.last)


def derivatives(step: SampleStep) -> Iterator[Finding]:
    """Check the derivatives that the backward pass brings to each token, given what the formula makes of them."""
    world, allowed = len(step.whole.traces), step.whole.allowed.formula
    for name in COLUMNS:
        got_of, slopes_of = step.by_sequence(f"derivative by {name}"), step.by_sequence(f"slope of {name}")
        largest = max((float(np.abs(each).max()) for each in slopes_of.values()), default=0.0) * world
        for place in step.expected.samples if largest > 0 else ():
            got, wanted = got_of[place, SIDE], slopes_of[place, SIDE] * world
            apart = np.where(np.isnan(got), 0.0, np.abs(got - wanted)) / largest  # NaN: scaled to 0
            if step.whole.gauge.exceeds("derivatives, given the formula's", float(apart.max()), allowed):
                at = int(np.flatnonzero(~(apart <= allowed))[0])
                what = f"derivative that reaches {name}, token {at} of {rollouts.of_sample(step, place)}"
                note = f"the loss's derivative × {world} ranks" + whole_factor(got[at], wanted[at])
                yield step.finding(GRADIENT, Clue.CHAIN, what, got[at], wanted[at], note)


def metrics(step: SampleStep) -> Iterator[Finding]:
    yield from rollouts.held_out(step)
    yield from of_rows.logged(step, counted(step))
    yield from of_rows.layouts_own(step)


def counted(step: SampleStep) -> dict[str, tuple[float, float]]:
    """The logged values, from the run's own values for each token and sample; and by how much they may differ."""
    micros = [micro for trace in step.whole.traces for micro in trace.steps[step.place].micros]
    terms = [micro.terms for micro in micros if micro.terms is not None]
    exact, rounded = step.whole.allowed.given, step.whole.allowed.formula
    parts = dict.fromkeys(("loss", *terms[0].weighted, *terms[0].replicated))
    made = {name: (step.total(name), rounded) for name in parts}
    means = means_of(terms, [micro.known["trained_n"] for micro in micros])
    made |= {name: (value, rounded) for name, value in means.items()}
    made["tokens"] = (float(sum(micro.sequence_tokens for _, _, micro in step.micros())), exact)
    if step.begins:
        made |= {name: (value, exact) for name, value in _of_rollout(step).items()}
    row = {f"train/{name}": value for name, value in made.items()}
    answers = rollouts.held_answers(step)
    if answers is not None:
        row |= {f"eval/{name}": (value, exact) for name, value in rollouts.of_answers(answers.samples).items()}
    return row


def _of_rollout(step: SampleStep) -> dict[str, float]:
    """The values of the rollout, from what the run knows of its samples."""
    run, cfg = step.run, step.whole.cfg
    samples = run.drawn.samples
    scores, lengths = np.array([sample.score for sample in samples]), [len(sample.answer) for sample in samples]
    row = rollouts.of_answers(samples)
    row |= rules.of_rollout(cfg, run.number, run.seen[0].kl_coef, scores, lengths, run.old or [], run.reference)
    if run.old is not None:
        row |= rules.of_gap(run.old, [sample.behaviour for sample in samples])
    returns, values = run.returns, run.values
    if returns is not None and values is not None:
        row["val/explained_variance"] = rules.explained_variance(returns, values)
    return row
