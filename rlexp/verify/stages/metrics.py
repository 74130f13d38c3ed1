"""The metrics stage: logged values, against the reference and given the run's values for each pair and token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlexp.run_files.curve_distance import OWN
from rlexp.verify.compared import ComparedStep, value_at
from rlexp.verify.findings import METRICS, Clue, Finding, whole_factor, worst_element
from rlexp.verify.records import Losses, joined
from rlexp.verify.reference import rules
from rlexp.verify.stages.loss import of_formula, whose


def metrics(step: ComparedStep) -> Iterator[Finding]:
    yield from _values(step)
    exact = step.whole.allowed.given
    yield from logged(step, {name: (value, exact) for name, value in counted(step).items()})
    yield from layouts_own(step)


def logged(step: ComparedStep, given: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Compare the logged values: with those that are `given` by the run's own values, each with what is allowed, and
    with the reference's."""
    allowed_to_differ, more = step.whole.allowed.metric
    for rank, row in enumerate(seen.row for seen in step.seen):
        for name, wanted in step.expected.row.items():
            if name not in row:
                yield step.finding(METRICS, Clue.ABSENT, name, "is not logged", wanted)
                continue
            got = float(row[name])
            clue = Clue.REDUCED if name in given or name.startswith("eval/") else Clue.POSITION
            if name in given:
                value, allowed = given[name]
                parts = np.array([got]), np.array([value])
                if step.first_wrong("metrics, given their parts", *parts, allowed=allowed) is not None:
                    note = f"on rank {rank}" + whole_factor(got, value)
                    yield step.finding(METRICS, clue, name, got, value, note)
            apart = abs(got - wanted) / (max(abs(got), abs(wanted)) + more)
            if step.whole.gauge.exceeds(name, apart, allowed_to_differ * step.drift):
                yield step.finding(METRICS, clue, name, got, wanted, f"on rank {rank}" + whole_factor(got, wanted))


def _values(step: ComparedStep) -> Iterator[Finding]:
    for head, _, micro in step.micros():
        assert micro.losses is not None
        assert micro.given is not None
        formula = of_formula(step, head.steps[step.place], micro)
        for name, wanted in micro.given.values_E.items():
            got = micro.losses.values_E.get(name, np.zeros(0))
            if (wrong := step.first_wrong(name, got, wanted)) is not None:
                what = f"{name} of {step.whole.word} {micro.samples[wrong]}, given its train batch's log-probabilities"
                clue = whose(step, Clue.VALUES, None if formula is None else formula.values_E.get(name), wanted)
                yield step.finding(METRICS, clue, what, value_at(got, wrong), wanted[wrong])
    for key, got in step.by_sequence("logits_n").items():
        wanted_n = step.expected.logits[key]
        apart = float((np.abs(got - wanted_n) / np.maximum(1.0, np.abs(wanted_n))).max())
        if step.whole.gauge.exceeds("mean logit at a token", apart, step.whole.allowed.logp * step.drift):
            what = f"mean logit at the worst token of {step.whole.word} {key[0]}, {key[1]}"
            yield step.finding(METRICS, Clue.LOGITS, what, *worst_element(got, wanted_n))


def layouts_own(step: ComparedStep) -> Iterator[Finding]:
    """Check the metrics that describe the layout itself, as far as they can be counted."""
    seen = [step.micros for step in step.seen]
    held = [sum(len(m.tokens_t) for m in micros if m.tokens_t is not None) for micros in seen]
    packs = max(len(micros) for micros in seen)
    real = sum(micro.real_tokens for micros in seen for micro in micros)
    shared = sum(micro.sequence_tokens for _, _, micro in step.micros()) - real
    train, rows = step.whole.cfg.train, len(step.expected.samples)
    forward_passes = packs if train.grad_acc is None else -(-rows * train.grad_acc // train.batch_size)
    for name, wanted in (
        ("train/micro_batches", packs),
        ("train/grad_acc", forward_passes),
        ("train/ring_tokens", max(held)),
        ("train/shared_tokens", shared),
    ):
        if name not in step.seen[0].row:
            yield step.finding(METRICS, Clue.ABSENT, name, "is not logged", wanted)
        elif (got := step.seen[0].row[name]) != wanted:
            clue = Clue.REDUCED if name.endswith("_tokens") else Clue.POSITION
            yield step.finding(METRICS, clue, name, got, wanted)


def counted(step: ComparedStep) -> dict[str, float]:
    """The logged values of the batch, from the run's own values for each pair and token."""
    losses = [micro.losses for _, _, micro in step.micros() if micro.losses is not None]
    everywhere = set.intersection(*(set(each.values_E) for each in losses))
    values_E = {name: joined([each.values_E[name] for each in losses]) for name in everywhere}
    weighted = set.intersection(*(set(each.weights_E) for each in losses))
    weights_E = {name: joined([each.weights_E[name] for each in losses]) for name in weighted}
    whole = Losses(joined([each.losses_E for each in losses]), {}, values_E, weights_E)
    of_tokens = step.by_sequence("logits_n")
    sides = step.whole.sides if of_tokens else ()
    logits = {side: joined([v for (_, of), v in of_tokens.items() if of == side]) for side in sides}
    tokens = sum(micro.sequence_tokens for _, _, micro in step.micros())
    row = rules.logged(whole, step.sums(), logits, tokens)
    return {f"train/{name}": value for name, value in row.items()}


def not_held(rows: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> list[str]:
    """Logged values that nothing here recomputes, except those that describe the layout itself."""
    known = {name for row in expected for name in row}
    return list(dict.fromkeys(name for row in rows for name in row if name not in known and not name.startswith(OWN)))
