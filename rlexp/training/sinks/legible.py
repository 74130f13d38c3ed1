"""Samples as lines for people: one line each, without a character that moves the cursor."""

from __future__ import annotations

import unicodedata

from rlexp.base.printable import printable
from rlexp.training.sinks.base import RolloutFacts, Shown

PROMPT = 0.35  # the prompt's share of the room for texts


def lines(facts: RolloutFacts, columns: int | None) -> list[str]:
    """Return a head and a line per sample, at most `columns` wide; None: lines are whole."""
    heads = [head(sample) for sample in facts.shown]
    wide = max(map(len, heads), default=0)
    title = f"samples of rollout {facts.rollout}, step {facts.step}:"
    return [title] + [
        f"  {left:<{wide}}  {texts(sample, None if columns is None else columns - wide - 4)}"
        for left, sample in zip(heads, facts.shown, strict=True)
    ]


def head(sample: Shown) -> str:
    """`0.75 (count 1, length 0.5)  12 tokens`."""
    terms = ", ".join(f"{name} {value:.3g}" for name, value in sample.terms.items()) if len(sample.terms) > 1 else ""
    cut_off = "" if sample.stopped else ", cut off"
    return f"score {sample.score:.3g}{f' ({terms})' if terms else ''}  {sample.length} tokens{cut_off}"


def texts(sample: Shown, columns: int | None) -> str:
    """Return prompt and answer. If both do not fit: the prompt's end and the answer's beginning."""
    prompt, answer = printable(sample.prompt), printable(sample.answer)
    if columns is None:
        return f"{prompt} → {answer}"
    room = max(0, columns - 3)
    prompt = cut(prompt, max(int(PROMPT * room), room - width(answer)), end=True)
    return f"{prompt} → {cut(answer, room - width(prompt))}"


def width(text: str) -> int:
    """Return the columns that a text takes in a terminal: characters of some scripts take two, accents none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def cut(text: str, columns: int, *, end: bool = False) -> str:
    """Cut a text to its beginning, or its end, with a … where something is left out."""
    if width(text) <= columns:
        return text
    kept, used = [], 1
    for each in reversed(text) if end else text:
        used += width(each)
        if used > columns:
            break
        kept.append(each)
    return ("…" + "".join(reversed(kept)) if end else "".join(kept) + "…") if columns > 0 else ""
