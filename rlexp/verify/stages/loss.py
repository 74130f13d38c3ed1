"""The stages of log-probabilities and losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlexp.verify.compared import ComparedStep, value_at
from rlexp.verify.findings import GRADIENT, LOGPS, LOSS, Clue, Finding, whole_factor
from rlexp.verify.records import MISMATCHED, Applied, Array, Key, Losses, Micro, StepSeen
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
        for key, got in step.by_sequence(f"{what}_n").items() if meant else ():
            yield from _sequence(step, clue, what, key, got, meant[key])
    for what in ("policy", "reference") if step.expected.others else ():
        for key, got in step.by_sequence(f"{what}_n", of="others").items():
            wanted = step.expected.of_others[what][key]
            yield from _sequence(step, Clue.OTHERS, f"{what}, of a mismatched answer", key, got, wanted)
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
    tokens = step.by_sequence(f"{who}_n")
    examples = step.whole.expected.tokens
    return {key: got * rules.token_weights(examples[key[0]], key[1], beyond) for key, got in tokens.items()}


def losses(step: ComparedStep) -> Iterator[Finding]:
    yield from _given(step)
    for trace in step.whole.traces:
        seen = trace.steps[step.place]
        for place, micro in enumerate(seen.micros):
            yield from _of_formula(step, seen, micro)
            yield from _handed(step, trace.rank, place, micro, last=place + 1 == len(seen.micros))
    yield from _mean_loss(step)


def _of_formula(step: ComparedStep, seen: StepSeen, micro: Micro) -> Iterator[Finding]:
    """Check a micro-batch's losses and their derivatives, given its train batch's sums."""
    assert micro.losses is not None
    assert micro.given is not None
    word, formula = step.whole.word, of_formula(step, seen, micro)
    got_E, wanted_E = micro.losses.losses_E, micro.given.losses_E
    wrong = step.first_wrong("losses, given the sums", got_E, wanted_E)
    if wrong is not None:
        what = f"loss of {word} {micro.samples[wrong]}, given its train batch's log-probabilities"
        clue = whose(step, Clue.LOSSES, None if formula is None else formula.losses_E, wanted_E)
        yield step.finding(LOSS, clue, what, value_at(got_E, wrong), wanted_E[wrong])
    for side, wanted in micro.given.slopes.items():
        got = micro.losses.slopes[side]
        wrong = step.first_wrong("derivatives of losses, given the sums", got, wanted)
        if wrong is not None:
            what = f"derivative of the losses by the {side} log-probability of {word} {micro.samples[wrong]}"
            clue = whose(step, Clue.SLOPES, None if formula is None else formula.slopes[side], wanted)
            yield step.finding(LOSS, clue, what, value_at(got, wrong), wanted[wrong])


def of_formula(step: ComparedStep, seen: StepSeen, micro: Micro) -> Losses | None:
    """What the formula has returned on this rank for a micro-batch's examples."""
    if seen.applied is not None:
        return seen.applied.losses[[step.expected.samples.index(sample) for sample in micro.samples]]
    return None if micro.applied is None else micro.applied.losses


def whose(step: ComparedStep, clue: Clue, of_formula: Array | None, wanted: Array) -> Clue:
    """The clue of a result that differs: `clue` if the formula has returned it so, or else what the step has made of
    it."""
    if of_formula is None or len(of_formula) != len(wanted):
        return clue
    apart = np.abs(of_formula - wanted) / np.maximum(0.1, np.abs(wanted))
    return Clue.TAKEN if bool((apart <= step.whole.allowed.given).all()) else clue


def _handed(step: ComparedStep, rank: int, place: int, micro: Micro, *, last: bool) -> Iterator[Finding]:
    """Check the scalar that a rank hands to its engine, its derivatives, and the mark of the last one."""
    assert micro.losses is not None
    world, count, word = len(step.whole.traces), len(step.expected.samples), step.whole.word
    where = f"micro-batch {place + 1} on rank {rank}"
    handed = float(micro.losses.losses_E.sum()) * world / count
    got = math.nan if micro.handed is None else micro.handed
    note = f"the sum of its losses × {world} ranks / {count} {word}s"
    if step.first_wrong("loss handed to the engine", np.array([got]), np.array([handed])) is not None:
        more = note + whole_factor(got, handed)
        yield step.finding(LOSS, Clue.HANDED, f"loss handed to the engine, {where}", got, handed, more)
    for side, slopes in micro.losses.slopes.items():
        ours, wanted = micro.handed_slopes.get(side, np.zeros(0)), slopes * world / count
        wrong = step.first_wrong("derivatives of the loss handed to the engine", ours, wanted)
        if wrong is not None:
            what = f"derivative of the loss handed to the engine by the {side} sum of {word} {micro.samples[wrong]}"
            yield step.finding(LOSS, Clue.HANDED, f"{what}, {where}", value_at(ours, wrong), wanted[wrong], note)
    if micro.last is not last:
        yield step.finding(LOSS, Clue.HANDED, f"mark of the last micro-batch, {where}", micro.last, last)


def _given(step: ComparedStep) -> Iterator[Finding]:
    """Check what the loss is given: as each micro-batch knows it, and as the formula is called with it."""
    sums, samples = step.sums(), step.expected.samples
    place_of = {sample: place for place, sample in enumerate(samples)}
    for trace in step.whole.traces:
        seen = trace.steps[step.place]
        for micro in seen.micros:
            assert micro.counts is not None
            assert micro.losses is not None
            at = [place_of[sample] for sample in micro.samples]
            noted = Applied({}, micro.counts, micro.mismatched, micro.losses)
            yield from _as_given(step, noted, {}, at, f"on rank {trace.rank}")
            if micro.applied is not None:
                yield from _as_given(step, micro.applied, sums, at, f"as the loss is given it on rank {trace.rank}")
        if seen.applied is not None:
            where = f"as the loss is given it on rank {trace.rank}"
            yield from _as_given(step, seen.applied, sums, [*range(len(samples))], where)


def _as_given(
    step: ComparedStep, got: Applied, sums: Mapping[str, Array], at: Sequence[int], where: str
) -> Iterator[Finding]:
    """Check the sums, counts and carried numbers that a loss is given of the examples at some places."""
    asks, counts, word, samples = step.whole.asks, step.expected.counts, step.whole.word, step.expected.samples
    columns = [(f"{name} of {{}}", got.sums.get(name, np.zeros(0)), values[at])
               for name, values in sums.items() if name != MISMATCHED]  # fmt: skip
    columns += [(f"trained tokens of {{}}, {side}", got.counts.tokens[side], counts.tokens[side][at])
                for side in step.whole.sides]  # fmt: skip
    for what, ours, wanted in (("margin of {}", got.counts.margins, counts.margins if asks.margins else None),
                               ("label of {}", got.counts.labels, counts.labels)):  # fmt: skip
        if wanted is not None:
            columns.append((what, np.zeros(0) if ours is None else ours, wanted[at]))
    for what, ours, wanted in columns:
        if (wrong := step.first_wrong("what the loss is given of examples", ours, wanted)) is not None:
            named = f"{what.format(f'{word} {samples[at[wrong]]}')}, {where}"
            yield step.finding(LOSS, Clue.COUNTS, named, value_at(ours, wrong), wanted[wrong])
    yield from _of_others(step, got.mismatched, where)
    carried = next((micro.given.carried for _, _, micro in step.micros() if micro.given is not None), {})
    numbers = [(name, got.losses.carried.get(name), value) for name, value in carried.items()]
    if asks.mean_tokens:
        numbers.append(("mean of the trained tokens", got.counts.mean_tokens, counts.mean_tokens))
    for name, mean, meant in numbers:
        if mean is None or step.first_wrong("counts", np.array([mean]), np.array([meant])) is not None:
            yield step.finding(LOSS, Clue.COUNTS, f"{name}, {where}", mean, meant)


def _of_others(step: ComparedStep, got: Array | None, where: str) -> Iterator[Finding]:
    """Check the log-ratios of mismatched answers that a loss is given."""
    if got is None or not step.expected.others:
        return
    wanted, sizes = step.log_ratios_of_others()
    if (wrong := step.first_wrong("log-ratios of mismatched answers", got, wanted, sizes)) is not None:
        what = f"log-ratio of a mismatched answer, {step.whole.word} {step.expected.samples[wrong]}, {where}"
        yield step.finding(LOSS, Clue.COUNTS, what, value_at(got, wrong), wanted[wrong])


def derivatives(step: ComparedStep) -> Iterator[Finding]:
    """Check the derivatives that the backward pass brings to each token's log-probability, given those by the sums."""
    if step.whole.asks.scores:
        return
    world, count, examples = len(step.whole.traces), len(step.expected.samples), step.whole.expected.tokens
    gauge, allowed = step.whole.gauge, step.whole.allowed.kept
    slopes = {(sample, side): micro.losses.slopes[side][place] * world / count
              for _, _, micro in step.micros() if micro.losses is not None
              for place, sample in enumerate(micro.samples) for side in step.whole.sides}  # fmt: skip
    for key, got in step.by_sequence("derivative by policy").items():
        wanted = slopes[key] * rules.token_weights(examples[key[0]], key[1], step.whole.asks.tail_weight)
        apart = np.where(np.isnan(got), 0.0, np.abs(got - wanted))  # NaN: scaled to 0
        apart /= max(float(np.abs(wanted).max()), 1e-3)
        if gauge.exceeds("derivatives, given those by the sums", float(apart.max()), allowed):
            at = int(np.flatnonzero(~(apart <= allowed))[0])
            what = f"derivative of the loss by the log-probability of trained token {at} of {step.whole.word} {key[0]}"
            note = "given the derivatives by sums" + whole_factor(got[at], wanted[at])
            yield step.finding(GRADIENT, Clue.CHAIN, f"{what}, {key[1]}", got[at], wanted[at], note)


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
        np.abs(step.in_order([each.slopes[side] for each in given]))
        * sum(np.abs(sums[name]) for who in ("policy", "reference") if (name := f"{who}/{side}") in sums)
        for side in step.whole.sides
    ]
    return 2 * float(np.mean(sum(moved)))
