"""The stages of log-probabilities and losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rlexp.verify.compared import ComparedStep, value_at
from rlexp.verify.findings import LOGPS, LOSS, Clue, Finding, whole_factor
from rlexp.verify.records import MISMATCHED, Array, Key, Losses, joined
from rlexp.verify.reference import rules

WHO = ("policy", "reference", "likelihoods", "entropies", "hits")
OF_TOKENS = WHO[2:]  # sums in which all tokens count alike


def logps(step: ComparedStep) -> Iterator[Finding]:
    for name in dict.fromkeys(name for step in step.seen for name in step.stale):
        yield step.finding(LOGPS, Clue.STALE, f"{name} as it computes", "another value", "what was stepped")
    for what, clue in (
        ("policy", Clue.POLICY),
        ("reference", Clue.REFERENCE),
        *dict.fromkeys(OF_TOKENS, Clue.OF_TOKENS).items(),
    ):
        meant = getattr(step.expected, what)
        for key, got in step.by_sequence(f"{what}_t").items() if meant else ():
            yield from _sequence(step, clue, what, key, got, meant[key])
    for what, clue in (("policy", Clue.POLICY), ("reference", Clue.REFERENCE)):
        for key, got in step.by_sequence(f"{what}_t", of="others").items() if step.expected.others else ():
            yield from _sequence(
                step, clue, f"{what}, of a mismatched answer", key, got, step.expected.of_others[what][key]
            )
    yield from _sums(step)


def _sequence(step: ComparedStep, clue: Clue, who: str, key: Key, got: Array, wanted: Array) -> Iterator[Finding]:
    apart = np.abs(got - wanted) / np.maximum(1.0, np.abs(wanted))
    sums = abs(got.sum() - wanted.sum()) / max(1.0, abs(wanted.sum()))
    gauge, allowed = step.whole.gauge, step.whole.allowed.logp * step.drift
    gauge.exceeds("sum of a sequence's log-probabilities", float(sums), allowed)
    if gauge.exceeds("log-probability of a token", float(apart.max()), allowed):
        sample, side = key
        if step.whole.asks.scores:
            what = f"score of {step.whole.word} {sample}, {side}, at its last token"
            yield step.finding(LOGPS, clue, what, got[0], wanted[0])
            return
        examples = step.expected.others if "mismatched" in who else step.whole.expected.tokens
        trained = np.flatnonzero(examples[sample].trained(side))
        at = int(np.flatnonzero(~(apart <= allowed))[0])
        what = f"{who}, token {trained[at]} of {step.whole.word} {sample}, {side}"
        note = f"{int((~(apart <= allowed)).sum())} of its {len(apart)} tokens differ"
        yield step.finding(LOGPS, clue, what, got[at], wanted[at], note)


def _sums(step: ComparedStep) -> Iterator[Finding]:
    """Check the sums that each rank gave to the loss, given the log-probabilities of the tokens."""
    for who in WHO:
        if not getattr(step.expected, who) or step.whole.asks.scores:
            continue
        tokens = _weighted(step, who)
        for trace in step.whole.traces:
            for micro in trace.steps[step.place].micros:
                for side in step.whole.sides:
                    got = micro.sums.get(f"{who}/{side}", np.zeros(0))
                    wanted = np.array([tokens[sample, side].sum() for sample in micro.samples])
                    wrong = step.first_wrong("sums, given the tokens", got, wanted)
                    if wrong is not None:
                        named = f"{step.whole.word} {micro.samples[wrong]}"
                        what = f"{who}, sum of {named}, {side}, on rank {trace.rank}"
                        yield step.finding(LOGPS, Clue.SUMS, what, value_at(got, wrong), wanted[wrong])


def _weighted(step: ComparedStep, who: str) -> dict[Key, Array]:
    """The run's values of each token, times their weights in the sum."""
    beyond = 1.0 if who in OF_TOKENS else step.whole.asks.tail_weight
    tokens = step.by_sequence(f"{who}_t")
    examples = step.whole.expected.tokens
    return {key: got * rules.token_weights(examples[key[0]], key[1], beyond) for key, got in tokens.items()}


def losses(step: ComparedStep) -> Iterator[Finding]:
    world, count, word = len(step.whole.traces), len(step.expected.samples), step.whole.word
    yield from _given(step)
    for trace in step.whole.traces:
        micros = trace.steps[step.place].micros
        for place, micro in enumerate(micros):
            assert micro.losses is not None
            assert micro.given is not None
            got_E, wanted_E = micro.losses.losses_E, micro.given.losses_E
            wrong = step.first_wrong("losses, given the sums", got_E, wanted_E)
            if wrong is not None:
                what = f"loss of {word} {micro.samples[wrong]}, given its train batch's log-probabilities"
                yield step.finding(LOSS, Clue.LOSSES, what, value_at(got_E, wrong), wanted_E[wrong])
            yield from _slopes(step, micro.samples, micro.losses, micro.given)
            where = f"micro-batch {place + 1} on rank {trace.rank}"
            handed = float(got_E.sum()) * world / count
            got = math.nan if micro.handed is None else micro.handed
            if step.first_wrong("loss handed to the engine", np.array([got]), np.array([handed])) is not None:
                note = f"the sum of its losses × {world} ranks / {count} {word}s" + whole_factor(got, handed)
                yield step.finding(LOSS, Clue.HANDED, f"loss handed to the engine, {where}", got, handed, note)
            if micro.last is not (place + 1 == len(micros)):
                what = f"mark of the last micro-batch, {where}"
                yield step.finding(LOSS, Clue.HANDED, what, micro.last, not micro.last)
    yield from _mean_loss(step)


def _given(step: ComparedStep) -> Iterator[Finding]:
    """Check what the loss is given besides the sums of a micro-batch's examples: counts, and all sums at once."""
    asks, counts, sums, word = step.whole.asks, step.expected.counts, step.sums(), step.whole.word
    place_of = {sample: place for place, sample in enumerate(step.expected.samples)}
    for trace in step.whole.traces:
        seen = trace.steps[step.place]
        for name, got in (seen.whole or {}).items():
            if (wrong := step.first_wrong("sums of the whole batch", got, sums[name])) is not None:
                what = f"{name} of {word} {step.expected.samples[wrong]}, as the loss is given it on rank {trace.rank}"
                yield step.finding(LOSS, Clue.COUNTS, what, value_at(got, wrong), sums[name][wrong])
        for micro in seen.micros:
            assert micro.counts is not None
            assert micro.losses is not None
            assert micro.given is not None
            at = [place_of[sample] for sample in micro.samples]
            pairs = [(f"trained tokens of {{}}, {side}", micro.counts.tokens[side], counts.tokens[side][at])
                     for side in step.whole.sides]  # fmt: skip
            if asks.margins and counts.margins is not None and micro.counts.margins is not None:
                pairs.append(("margin of {}", micro.counts.margins, counts.margins[at]))
            if counts.labels is not None and micro.counts.labels is not None:
                pairs.append(("label of {}", micro.counts.labels, counts.labels[at]))
            for what, got, wanted in pairs:
                if (wrong := step.first_wrong("counts", got, wanted)) is not None:
                    named = what.format(f"{word} {micro.samples[wrong]}")
                    yield step.finding(LOSS, Clue.COUNTS, named, value_at(got, wrong), wanted[wrong])
            if MISMATCHED in sums and micro.mismatched is not None:
                wrong = step.first_wrong("log-ratios of mismatched answers", micro.mismatched, sums[MISMATCHED])
                if wrong is not None:
                    what = (
                        f"log-ratio of a mismatched answer, {word} {step.expected.samples[wrong]}, on rank {trace.rank}"
                    )
                    yield step.finding(
                        LOSS, Clue.COUNTS, what, value_at(micro.mismatched, wrong), sums[MISMATCHED][wrong]
                    )
            numbers = [(name, micro.losses.carried.get(name), value) for name, value in micro.given.carried.items()]
            if asks.mean_tokens:
                numbers.append(("mean of the trained tokens", micro.counts.mean_tokens, counts.mean_tokens))
            for name, mean, meant in numbers:
                if mean is None or step.first_wrong("counts", np.array([mean]), np.array([meant])) is not None:
                    yield step.finding(LOSS, Clue.COUNTS, f"{name} that the loss is given", mean, meant)


def _slopes(step: ComparedStep, samples: Sequence[int], got: Losses, given: Losses) -> Iterator[Finding]:
    for side, wanted in given.slopes.items():
        wrong = step.first_wrong("derivatives of losses, given the sums", got.slopes[side], wanted)
        if wrong is not None:
            what = f"derivative of the losses by the {side} log-probability of {step.whole.word} {samples[wrong]}"
            yield step.finding(LOSS, Clue.SLOPES, what, got.slopes[side][wrong], wanted[wrong])


def _mean_loss(step: ComparedStep) -> Iterator[Finding]:
    got, wanted, allowed = step.mean_loss(), step.expected.loss, step.whole.allowed
    bound = step.drift * (allowed.loss + allowed.loss_of_sums * _moved_by_sums(step) / (abs(wanted) or 1.0))
    apart = abs(got - wanted) / (abs(wanted) or 1.0)
    if step.whole.gauge.exceeds("loss", apart, bound):
        yield step.finding(LOSS, Clue.POLICY, "loss of the train batch", got, wanted)


def _moved_by_sums(step: ComparedStep) -> float:
    """How far the mean loss moves if each sum of log-probabilities grows by its own size: the scale of its rounding.

    Derivatives by the reference model's sums are taken to be as large as those by the policy's. Twice that is returned:
    for DPO at the first step, β times the log-probabilities, on which the bound was measured.
    """
    sums = step.sums()
    given = [micro.given for _, _, micro in step.micros() if micro.given is not None]
    moved = [
        np.abs(joined([each.slopes[side] for each in given]))
        * sum(np.abs(sums[name]) for who in ("policy", "reference") if (name := f"{who}/{side}") in sums)
        for side in step.whole.sides
    ]
    return 2 * float(np.mean(sum(moved)))
