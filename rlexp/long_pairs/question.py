"""A question about a long text whose answer a program knows: which line follows a line that the text has once.

The chosen answer is the line that follows. The rejected answer follows another such line of the same text.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

QUOTED, ANSWER = (20, 160), (10, 160)  # fewest and most characters of a line that is quoted, and of an answer
ASKED = "\n\nQuestion: which line follows the line «{}» in the text above? Answer with that line alone."
PATTERN = re.compile(re.escape(ASKED).replace(r"\{\}", "([^«»\n]*)") + r"\Z")


@dataclass(frozen=True)
class Pair:
    """A long text with its question, and both answers."""

    prompt: str
    chosen: str
    rejected: str
    place: float  # of the quoted line in the text: 0 is its beginning, 1 its end
    tokens: int = 0  # of the prompt with its longer answer, once they are counted

    def row(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected, "place": round(self.place, 4)}


def ask(text: str, place: float, draw: random.Random) -> Pair | None:
    """Ask for the line nearest to a place of the text that may be asked for; None if there are not two such lines."""
    usable = _usable(text)
    if len(usable) < 2:
        return None
    at = bisect_left([start for start, _, _ in usable], place * len(text))
    at = min((near for near in (at - 1, at) if 0 <= near < len(usable)),
             key=lambda near: abs(usable[near][0] - place * len(text)))  # fmt: skip
    start, line, answer = usable[at]
    others = [after for *_, after in usable if after not in (answer, line)]  # the quoted line would be no answer
    if not others:
        return None
    rejected = others[draw.randrange(len(others))]
    return Pair(text + ASKED.format(line), answer, rejected, start / len(text))


def _usable(text: str) -> list[tuple[int, str, str]]:
    """Return where the lines begin that may be asked for, each with the line that follows: the text has both once."""
    raw = text.split("\n")
    starts = accumulate((len(each) + 1 for each in raw), initial=0)
    lines = [line.strip() for line in raw]
    times = Counter(lines)
    return [(start, line, after) for start, (line, after) in zip(starts, pairwise(lines), strict=False)
            if _fits(line, QUOTED) and _fits(after, ANSWER) and times[line] == times[after] == 1
            and not {"«", "»"} & {*line}]  # fmt: skip


def _fits(line: str, sizes: tuple[int, int]) -> bool:
    return sizes[0] <= len(line) <= sizes[1] and line.isprintable()


def wrong(row: Mapping[str, Any]) -> str | None:
    """Answer a row's question again, by its prompt alone, and say what is wrong with the row."""
    fields = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    if not all(isinstance(each, str) for each in fields):
        return "must have the texts prompt, chosen and rejected"
    prompt, chosen, rejected = map(str, fields)
    match = PATTERN.search(prompt)
    if match is None:
        return "its prompt does not end with the question"
    lines = [line.strip() for line in prompt[: match.start()].split("\n")]
    if (times := lines.count(match[1])) != 1:
        return f"its text has the quoted line {times} times"
    at = lines.index(match[1]) + 1
    if at == len(lines) or lines[at] != chosen:
        return "the chosen answer does not follow the quoted line"
    if rejected == chosen or rejected not in lines:
        return "the rejected answer must be another line of the text"
    return None
