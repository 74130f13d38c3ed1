"""The data stage: samples, their tokens, the pack and its shards, all compared exactly."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from rlexp.verify.compared import ComparedStep
from rlexp.verify.findings import DATA, Clue, Finding
from rlexp.verify.records import Array, Micro, PackSeen, TokenExample, Trace
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
    wanted, taken = Counter(step.expected.samples), Counter(step.taken)
    planned = all([*head.steps[step.place].planned] == [*step.expected.samples] for head in heads)
    dealt = all(sorted(head.steps[step.place].dealt) == [*range(len(step.expected.samples))] for head in heads)
    clue, word = Clue.DEALT if not dealt else Clue.EXECUTED if planned else Clue.SAMPLES, step.whole.word
    for head in heads:  # losses of a whole batch, and mismatched answers, follow from the order
        seen = [*head.steps[step.place].planned]
        if sorted(seen) == sorted(step.expected.samples) and seen != [*step.expected.samples]:
            yield step.finding(DATA, Clue.SAMPLES, "order of the train batch", seen, [*step.expected.samples])
            return
    for sample in dict.fromkeys((*step.expected.samples, *step.taken)):
        if taken[sample] != wanted[sample]:
            times = (f"{count} time{'s' * (count != 1)}" for count in (taken[sample], wanted[sample]))
            yield step.finding(DATA, clue, f"{word} {sample} in the train batch", *times)
    for head in heads:
        first = [micro.samples for micro in head.steps[step.place].micros]
        for trace in step.whole.ring(head)[1:]:
            theirs = [micro.samples for micro in trace.steps[step.place].micros]
            if theirs != first:
                where = f"samples of rank {trace.rank}, in the ring of rank {head.rank}"
                yield step.finding(DATA, clue, where, theirs, first)


def _others(step: ComparedStep, trace: Trace) -> Iterator[Finding]:
    """Check the answers to other prompts: one for each sample of the train batch."""
    seen = trace.steps[step.place]
    taken = Counter(step.taken_by("others"))
    if step.expected.others and trace.rank == 0 and taken != Counter(step.expected.samples):
        what = "samples with mismatched answers"
        yield step.finding(DATA, Clue.EXECUTED, what, sorted(taken.elements()), sorted(step.expected.samples))
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
    """Follow each sequence from the root of its tree to its end, and compare what stands there."""
    pack = micro.pack
    assert pack is not None
    sequences = [(each.sequence(side), each, side) for each in examples for side in each.sides]
    if len(pack.end_S) != len(sequences):
        yield step.finding(DATA, Clue.PACK, f"sequences in {where}", len(pack.end_S), len(sequences))
        return
    if (said := _misplaced(pack)) is not None:
        yield step.finding(DATA, Clue.PACK, f"segment {said[0]} of {where}", *said[1:])
        return
    reached = np.zeros(len(pack.tokens_T), dtype=bool)
    for number, (ids, example, side) in enumerate(sequences):
        what = f"of sequence {number} in {where}"
        path = _path(pack, number)
        if len(path) != len(ids):
            yield step.finding(DATA, Clue.PACK, f"tokens {what}", len(path), len(ids))
            return
        reached[path] = True
        predicting = np.flatnonzero(trained_marks(example, side, number) >= 0)  # before the tokens that are trained on
        places = pack.place_N[pack.sequence_N == number]
        for name, got, wanted in (
            ("token", pack.tokens_T[path], ids),
            ("position", pack.positions_T[path], np.arange(len(ids))),
            ("target", pack.targets_T[path[predicting]], ids[predicting + 1]),
            ("trained-on mark", np.isin(path, places), np.isin(np.arange(len(ids)), predicting)),
            ("place in the list of trained tokens", places, path[predicting]),
        ):
            if len(got) != len(wanted):
                yield step.finding(DATA, Clue.PACK, f"trained tokens {what}", len(got), len(wanted))
            elif len(wrong := np.flatnonzero(got != wanted)):
                at = int(predicting[wrong[0]]) if name == "target" else int(wrong[0])
                yield step.finding(DATA, Clue.PACK, f"{name} at place {at} {what}", got[wrong[0]], wanted[wrong[0]])
    held = np.zeros(len(pack.tokens_T), dtype=bool)
    for start, length, _, _ in pack.segments:
        held[start : start + length] = True
    if len(stray := np.flatnonzero(held != reached)):
        yield step.finding(DATA, Clue.PACK, f"token at {stray[0]} of {where}", "held", "in no sequence")


def _misplaced(pack: PackSeen) -> tuple[int, str, str] | None:
    """Return the first segment that does not begin where the one before it ends, or before its parent."""
    end = 0
    for number, (start, length, padded, parent) in enumerate(pack.segments):
        fits = start == end and length <= padded and end + padded <= len(pack.tokens_T)
        if not fits or (parent is not None and not 0 <= parent < number):
            said = f"{length} tokens at {start}, padded to {padded}, after segment {parent}"
            return number, said, f"it begins at {end}, after an earlier segment or none"
        end += padded
    return None


def _path(pack: PackSeen, number: int) -> Array:
    """Return the places of a sequence's tokens: those of its last segment, as far as it goes, after its parents'."""
    end = int(pack.end_S[number])
    segment: int | None = next(
        (n for n, (start, length, *_) in enumerate(pack.segments) if start <= end < start + length), None
    )
    places: list[Array] = []
    while segment is not None:
        start, length, _, parent = pack.segments[segment]
        places.append(np.arange(start, min(start + length, end + 1) if not places else start + length))
        segment = parent
    return np.concatenate(places[::-1]) if places else np.zeros(0, dtype=np.int64)


def _shards(step: ComparedStep, head: Trace, place: int, micro: Micro, where: str) -> Iterator[Finding]:
    """Check that the ring's ranks together hold each token of the pack once, with its position, and each token that is
    trained on with its target."""
    pack = micro.pack
    assert pack is not None
    ring = [trace.steps[step.place].micros[place] for trace in step.whole.ring(head)]
    real = sum(length for _, length, _, _ in pack.segments)
    for what, words, held, meant in (
        (
            "token",
            "place {}, token {}, position {}",
            np.concatenate([_rows(m.index_t, m.tokens_t, m.positions_t) for m in ring]),
            _rows(np.arange(len(pack.tokens_T)), pack.tokens_T, pack.positions_T),
        ),
        (
            "trained token",
            "sequence {}, predicted at position {}, target {}",
            np.concatenate([_rows(m.sequence_n, m.position_n, m.target_n) for m in ring]),
            _rows(pack.sequence_N, pack.positions_T[pack.place_N], pack.targets_T[pack.place_N]),
        ),
    ):
        clue = Clue.PLACED if what == "token" and _as_placed(pack, ring) else Clue.SHARD
        if len(held) != len(meant):
            yield step.finding(DATA, clue, f"{what}s that the ring holds of {where}", len(held), len(meant))
            return
        held, meant = (rows[np.lexsort(rows.T)] for rows in (held, meant))
        if len(wrong := np.flatnonzero((held != meant).any(1))):
            got, wanted = (words.format(*rows[wrong[0]]) for rows in (held, meant))
            yield step.finding(DATA, clue, f"a {what} that the ring holds of {where}", got, wanted)
            return
    if (counted := sum(m.real_tokens for m in ring)) != real:
        clue = Clue.PLACED if all(m.real_tokens == m.placed_tokens for m in ring) else Clue.SHARD
        yield step.finding(DATA, clue, f"real tokens that the ring counts of {where}", counted, real)


def _as_placed(pack: PackSeen, ring: Sequence[Micro]) -> bool:
    """Say whether each rank holds what stands at its places of the pack."""
    return all(
        m.index_t is not None and np.array_equal(m.tokens_t, pack.tokens_T[m.index_t])
        and np.array_equal(m.positions_t, pack.positions_T[m.index_t])
        for m in ring
        if m.tokens_t is not None and m.positions_t is not None
    )  # fmt: skip


def _rows(*columns: Array | None) -> Array:
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)
