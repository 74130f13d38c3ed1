"""The data stage: samples, their tokens, the pack and its shards, all compared exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from rlexp.verify.compared import ComparedStep
from rlexp.verify.findings import DATA, Clue, Finding
from rlexp.verify.records import Array, Micro, TokenExample, Trace
from rlexp.verify.reference.pairs import trained_marks


def data(step: ComparedStep) -> Iterator[Finding]:
    yield from samples(step)
    for trace in step.whole.traces:
        for micro in trace.steps[step.place].micros:
            for sample in micro.samples:
                yield from tokens(step, trace.tokens[sample], step.whole.expected.tokens.get(sample), sample)
        yield from _others(step, trace)
    yield from packs(step)


def packs(step: ComparedStep) -> Iterator[Finding]:
    """Check each replica's packs, and what its ranks hold of them."""
    for head, place, micro in step.micros():
        examples = [step.examples("micros")[sample] for sample in micro.samples]
        where = f"micro-batch {place + 1} of replica {head.replica}"
        yield from _pack(step, micro, examples, where)
        yield from _shards(step, head, place, micro, where)


def samples(step: ComparedStep) -> Iterator[Finding]:
    heads = step.whole.heads()
    taken = [sample for head in heads for micro in head.steps[step.place].micros for sample in micro.samples]
    planned = [sample for head in heads for micro in head.steps[step.place].planned for sample in micro]
    wanted = list(step.expected.samples)
    clue, word = Clue.EXECUTED if planned == wanted else Clue.SAMPLES, step.whole.word
    if taken != wanted:
        place = next((i for i, (a, b) in enumerate(zip(taken, wanted, strict=False)) if a != b), None)
        if place is None:
            yield step.finding(DATA, clue, "number of samples", len(taken), len(wanted))
        else:
            yield step.finding(
                DATA,
                clue,
                f"at place {place + 1} of the train batch",
                f"{word} {taken[place]}",
                f"{word} {wanted[place]}",
            )
    for head in heads:
        first = [micro.samples for micro in head.steps[step.place].micros]
        for trace in step.whole.ring(head)[1:]:
            theirs = [micro.samples for micro in trace.steps[step.place].micros]
            if theirs != first:
                where = f"samples of rank {trace.rank}, in the ring of rank {head.rank}"
                yield step.finding(DATA, clue, where, theirs, first)


def _others(step: ComparedStep, trace: Trace) -> Iterator[Finding]:
    """Check the answers to other prompts, of the samples in the order in which they are trained on."""
    seen = trace.steps[step.place]
    taken = [micro.samples for micro in seen.others]
    if step.expected.others and taken != [micro.samples for micro in seen.micros]:
        what = f"samples with mismatched answers on rank {trace.rank}"
        yield step.finding(DATA, Clue.EXECUTED, what, taken, [micro.samples for micro in seen.micros])
    for sample, got in seen.other_tokens.items():
        for found in tokens(step, got, step.expected.others.get(sample), sample, " with a mismatched answer"):
            yield dataclasses.replace(found, clue=Clue.EXECUTED)


def tokens(
    step: ComparedStep, got: TokenExample, wanted: TokenExample | None, sample: int, more: str = ""
) -> Iterator[Finding]:
    if wanted is None:
        return
    named = f"{step.whole.word} {sample}{more} ({wanted.origin})"
    for part in ("prompt", *wanted.sides):
        ours, theirs = getattr(got, part), getattr(wanted, part)
        if len(ours) != len(theirs):
            what = f"length of {named}, {part}"
            yield step.finding(DATA, Clue.TOKENS, what, len(ours), len(theirs))
        elif not np.array_equal(ours, theirs):
            place = int(np.flatnonzero(ours != theirs)[0])
            what = f"token {place} of {named}, {part}"
            yield step.finding(DATA, Clue.TOKENS, what, int(ours[place]), int(theirs[place]))
    if got.margin != wanted.margin:
        yield step.finding(DATA, Clue.TOKENS, f"margin of {named}", got.margin, wanted.margin)
    if got.label != wanted.label:
        yield step.finding(DATA, Clue.TOKENS, f"label of {named}", got.label, wanted.label)
    for side in wanted.sides:
        ours, theirs = got.trained(side), wanted.trained(side)
        if len(ours) == len(theirs) and not np.array_equal(ours, theirs):
            place = int(np.flatnonzero(ours != theirs)[0])
            words = ("not trained on", "trained on")
            what = f"mask at token {place} of {named}, {side}"
            yield step.finding(DATA, Clue.TOKENS, what, words[int(ours[place])], words[int(theirs[place])])


def _pack(step: ComparedStep, micro: Micro, examples: Sequence[TokenExample], where: str) -> Iterator[Finding]:
    pack = micro.pack
    assert pack is not None
    sequences = [(each.sequence(side), each, side) for each in examples for side in each.sides]
    if examples and len(pack.segments) != len(sequences):
        yield step.finding(DATA, Clue.PACK, f"sequences in {where}", len(pack.segments), len(sequences))
        return
    end = 0
    owned = np.zeros(len(pack.tokens_T), dtype=bool)
    for number, (ids, example, side) in enumerate(sequences):
        start, length, padded = pack.segments[number]
        what = f"of sequence {number} in {where}"
        if (start, length) != (end, len(ids)) or padded < length or end + padded > len(pack.tokens_T):
            said = f"{length} tokens at {start}, padded to {padded}"
            yield step.finding(DATA, Clue.PACK, f"segment {what}", said, f"{len(ids)} tokens at {end}")
            return
        end += padded
        place = slice(start, start + length)
        owner = trained_marks(example, side, number)
        predicting = np.flatnonzero(owner >= 0)  # the places before the tokens that are trained on
        owned[start + predicting] = True
        for name, got, wanted in (
            ("token", pack.tokens_T[place], ids),
            ("position", pack.positions_T[place], np.arange(length)),
            ("trained-on mark", pack.sequence_T[place], owner),
            ("target", pack.targets_T[start + predicting], ids[predicting + 1]),
        ):
            wrong = np.flatnonzero(got != wanted)
            if len(wrong):
                at = int(predicting[wrong[0]]) if name == "target" else int(wrong[0])
                yield step.finding(DATA, Clue.PACK, f"{name} at place {at} {what}", got[wrong[0]], wanted[wrong[0]])
    stray = np.flatnonzero((pack.sequence_T >= 0) & ~owned)
    if len(stray):
        yield step.finding(DATA, Clue.PACK, f"trained-on mark at {stray[0]} of {where}", "trained on", "padding")


def _shards(step: ComparedStep, head: Trace, place: int, micro: Micro, where: str) -> Iterator[Finding]:
    """Check that the ring's ranks together hold each token of the pack once, with its target and position."""
    pack = micro.pack
    assert pack is not None
    ring = [trace.steps[step.place].micros[place] for trace in step.whole.ring(head)]
    held = np.concatenate([_rows(m.tokens_t, m.targets_t, m.positions_t, m.sequence_t) for m in ring])
    meant = _rows(pack.tokens_T, pack.targets_T, pack.positions_T, pack.sequence_T)
    real = sum(length for _, length, _ in pack.segments)
    if len(held) != len(meant):
        yield step.finding(DATA, Clue.SHARD, f"tokens that the ring holds of {where}", len(held), len(meant))
    elif not np.array_equal(held := held[np.lexsort(held.T)], meant := meant[np.lexsort(meant.T)]):
        wrong = int(np.flatnonzero((held != meant).any(1))[0])
        got, wanted = (
            "token {}, target {}, position {}, of sequence {}".format(*rows[wrong]) for rows in (held, meant)
        )
        yield step.finding(DATA, Clue.SHARD, f"a token that the ring holds of {where}", got, wanted)
    elif (counted := sum(m.real_tokens for m in ring)) != real:
        yield step.finding(DATA, Clue.SHARD, f"real tokens that the ring counts of {where}", counted, real)


def _rows(*columns: Array | None) -> Array:
    tokens, targets, positions, owners = (np.asarray(column, dtype=np.int64) for column in columns)
    return np.stack((tokens, np.where(owners >= 0, targets, 0), positions, owners), axis=1)
