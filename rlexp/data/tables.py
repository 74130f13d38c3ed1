"""The tables of a preview, as text: the terminal and the page show the same cells.

Text of unknown origin becomes text that can be shown: what would move the cursor or turn the line around is spelt out.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from rlexp.config.schema.cadence import plural
from rlexp.data.facts import Preview, Reason, RingFacts, SourceFacts, epochs

KEPT = "kept, but "


NEWLINE = "↵\n"
# Marks that reorder a line (bidirectional controls) or that no one sees; joiners of emoji and scripts stay.
SPELT = {0x00AD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0x2060, 0xFEFF}
SPELT |= {*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)}


def visible(text: str) -> str:
    """Show newlines and control characters as signs."""
    return "".join(map(_sign, text))


def one_line(text: str) -> str:
    """Show a name or a message, also one that holds newlines, or bytes of a path that are not UTF-8."""
    return visible(text.encode("utf-8", "replace").decode("utf-8")).replace(NEWLINE, "↵")


def _sign(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return NEWLINE
    if char == "\t":
        return "⇥"
    if code < 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    if code in SPELT or unicodedata.category(char) in ("Cc", "Cs"):
        return f"⟨U+{code:04X}⟩"
    return char


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: int | None = None  # the row that is the run's own
    text: tuple[int, ...] = (0,)  # columns of text; the others are numbers


def share(part: float, whole: float) -> str:
    """`12.3 %`, `100 %`, `< 0.1 %`."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.1f} %" if percent < 99.95 and percent else f"{percent:.0f} %"


def source_lines(source: SourceFacts, epoch: int, *, several: bool) -> list[str]:
    """Say what a source is and what is taken of it. `epoch`: the samples of all sources together."""
    role = " (held out)" if source.held_out else ""
    lines = [
        f"{source.key}{role}: {one_line(source.path)}",
        f"  {one_line(source.shape)}",
        f"  {plural(source.read, 'row')} read, {source.kept:,} kept ({share(source.kept, source.read)}), "
        f"{plural(source.tokens, 'token')}",
    ]
    if source.per_epoch is not None and source.taken != source.kept:
        lines.append(
            f"  {source.taken:,} of them to train on, and {source.kept - source.taken:,} held out by data.eval_size"
        )
    if several and source.per_epoch is not None:
        weight = "" if source.weight is None else f"weight {source.weight:g}: "
        passes = source.per_epoch / source.taken if source.taken else 0
        lines.append(
            f"  {weight}{source.per_epoch:,} samples an epoch ({share(source.per_epoch, epoch)} of all, "
            f"each of its rows {passes:.2f} times)"
        )
    return lines


def reasons(facts: Preview) -> Table:
    several = len(facts.sources) > 1
    rows = [
        (_what(reason, named=several), f"{reason.count:,}", "–" if reason.first is None else one_line(reason.first))
        for reason in sorted(facts.reasons, key=lambda each: (each.held_out, each.what.startswith(KEPT), -each.count))
    ]
    return Table(("rows that were", "count", "the first one"), tuple(rows), text=(0, 2))


def _what(reason: Reason, *, named: bool) -> str:
    what = reason.what if reason.what.startswith(KEPT) else f"left out: {reason.what}"
    where = f" [{reason.key}{', held out' if reason.held_out else ''}]" if named else ""
    return f"{what.removesuffix(', and left out by data.bad_rows=drop')}{where}"


def lists(facts: Preview) -> list[str]:
    """Say where rows are listed that were left out, and name the first."""
    lines = []
    for reason in facts.reasons:
        if reason.file is not None:
            lines += [one_line(line) for line in reason.lines]
            lines.append(f"All {reason.count:,} are in {one_line(reason.file)}")
    return lines


def lengths(facts: Preview) -> Table:
    names = list(facts.lengths[0].percentiles) if facts.lengths else []
    head = ("tokens of", *(f"{name} %" if name.isdigit() else name for name in names), "mean")
    rows = tuple(
        (each.part, *(f"{each.percentiles[name]:,}" for name in names), f"{each.mean:,.1f}") for each in facts.lengths
    )
    return Table(head, rows)


def limits(facts: Preview) -> str:
    """Say how many sequences are as long as they may be."""
    (whole,) = (each for each in facts.lengths if each.limit is not None)
    bound = f"data.max_length={facts.max_length:,}"
    if whole.limit != facts.max_length:
        bound += f" − rollout.max_new_tokens = {whole.limit:,}"
    count = whole.at_limit or 0
    what = "prompts" if whole.part == "prompt" else "sequences"
    return f"{count:,} of {whole.count:,} {what} ({share(count, whole.count)}) have all tokens of {bound}."


def sharing(facts: Preview) -> list[str]:
    tally = facts.sharing
    assert tally is not None
    of = "of all tokens" if facts.kind != "prompts" else "of the prompts' tokens"
    times = f"{tally.copies} copies of its prompt, one for each answer" if tally.copies > 1 else "its prompt once"
    lines = [
        f"{tally.examples:,} examples have {plural(tally.prompts, 'different prompt')}; {tally.sharing:,} examples "
        f"({share(tally.sharing, tally.examples)}) have a prompt that another one has too.",
        f"Each prompt is in {plural(tally.copies, 'sample')}: {tally.prompt_tokens:,} tokens of prompts, "
        f"beside the answers that are generated."
        if facts.kind == "prompts"
        else f"Each example holds {times}: prompts take {share(tally.prompt_tokens, tally.tokens)} of "
        f"{tally.tokens:,} tokens.",
    ]
    for which, saved, shown in (
        ("each example", tally.saved_within, tally.copies > 1),
        ("all examples with the same prompt", tally.saved_across, tally.saved_across > tally.saved_within),
    ):
        if shown:
            lines.append(f"One copy for {which} has {saved:,} tokens less, {share(saved, tally.tokens)} {of}.")
    lines.append(
        f"{plural(tally.duplicates, 'example')} ({share(tally.duplicates, tally.examples)}) "
        f"{'has' if tally.duplicates == 1 else 'have'} the same tokens as an earlier one."
    )
    return lines


def steps(facts: Preview) -> list[str]:
    plan = facts.steps
    assert plan is not None
    drawn = facts.kind == "prompts"
    sample, noun, whole = ("prompt", "rollout", "rollout") if drawn else ("sample", "step", "batch")
    left = f"; the last {plural(plan.left_out, sample)} fill no {whole}" if plan.left_out else ""
    return [
        f"{plural(plan.per_epoch, 'step')} an epoch, of {plural(plan.batch, 'sample')} each{left}.",
        f"{plural(plan.run, 'step')} in this run, {epochs(plan.epochs)}.",
        f"Tokens of a {noun}: {plan.tokens_mean:,.0f} on average, {plan.tokens_most:,} at most; "
        f"{plan.tokens_per_epoch:,} an epoch ({plan.measured}).",
    ]


def rings(facts: Preview) -> Table:
    head = ("ring", "ranks", "replicas", "grad_acc", "packed", "padded", "shared", "attention", "tokens", "cut",
            "step")  # fmt: skip
    own = next((place for place, ring in enumerate(facts.rings) if ring.own), None)
    return Table(head, tuple(map(_ring, facts.rings)), own, text=())


def _ring(ring: RingFacts) -> tuple[str, ...]:
    if ring.why is not None:
        return (ring.name, *["–"] * 10)
    shares = (f"{100 * (share or 0.0):.1f} %" for share in (ring.packed, ring.padded, ring.shared))
    step = "–" if ring.step is None else f"{ring.step:.2f}"
    return (ring.name, f"{ring.ranks}", f"{ring.replicas}", f"{ring.grad_acc:.3g}", *shares, f"{ring.work:.3f}",
            f"{ring.tokens:.3f}", f"{100 * (ring.cut or 0.0):.0f} %", step)  # fmt: skip


def about_rings(facts: Preview) -> list[str]:
    own = next(ring for ring in facts.rings if ring.own)
    lines = [
        f"Of {facts.sampled}.{f' Layout: {own.layout}.' if own.layout else ''}",
        "packed, padded: real tokens / tokens held, with data.packing=true and with false (this run: "
        f"{str(facts.packing).lower()}). shared: tokens that are not computed, because others stand for them / all.",
        "attention, tokens: the busiest rank / the mean rank. cut: sequences that several ranks hold / all.",
        "step: the time of a step / that of the best ring, by the dealer's estimate, on the run's ranks.",
        "grad_acc: micro-batches of a replica in a step, on average.",
    ]
    return lines + [f"Ring {ring.name}: {ring.why}" for ring in facts.rings if ring.why]
