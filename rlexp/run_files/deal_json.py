"""deal.json: which rank computes what in one step, as the dealer estimates it, and how long each rank took.

Work is in pairs of a query and a key. What else costs time is converted to that unit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlexp.base import files, plain_json

DEAL = "deal.json"
MOST = 1 << 26  # bytes of a file
MOST_RANKS = 1 << 14
LARGEST = 1e100  # of a number: sums of such numbers are finite
NUMBER = (int, float)


class SequencePart(NamedTuple):
    """A part of a sequence that one rank holds, or the sum of several light parts of sequences of one width."""

    width: int  # how many ranks hold the sequence
    tokens: int  # of this part
    work: float


@dataclass(frozen=True)
class RankDeal:
    """What one rank computes in the step."""

    work: float
    sending: float  # what it costs that keys arrive
    seconds: float | None  # measured: how long the rank computed; None where it was not measured
    parts: list[SequencePart]  # the heaviest first


@dataclass(frozen=True)
class StepDeal:
    """The ranks of all replicas, in the order of their numbers."""

    step: int
    ranks: list[RankDeal]


def write(path: Path, deal: StepDeal) -> None:
    files.write_text(path, plain_json.dumps(asdict(deal), allow_nan=False) + "\n")


def read(path: Path) -> StepDeal | None:
    """Read the deal; None if there is no such file. A file that cannot be read raises OSError, and one of another form
    ValueError."""
    try:
        content = plain_json.loads(files.read_regular(path, MOST))
    except FileNotFoundError:
        return None
    facts = plain_json.of_kinds(content, {"step": int, "ranks": list})
    if not facts.keys() >= {"step", "ranks"} or not 0 < len(facts["ranks"]) <= MOST_RANKS:
        raise ValueError(f"it has no step, or not 1 to {MOST_RANKS} ranks")
    return StepDeal(_number(facts["step"], whole=True), [_rank(each) for each in facts["ranks"]])


def _rank(content: Any) -> RankDeal:
    facts = plain_json.of_kinds(content, {"seconds": (*NUMBER, plain_json.NOTHING), "parts": list})
    if not facts.keys() >= {"work", "sending", "seconds", "parts"}:
        raise ValueError("a rank has no work, sending, seconds or parts")
    seconds = None if facts["seconds"] is None else _number(facts["seconds"])
    parts = [_part(each) for each in facts["parts"]]
    return RankDeal(_number(facts["work"]), _number(facts["sending"]), seconds, parts)


def _part(content: Any) -> SequencePart:
    if not isinstance(content, list) or len(content) != len(SequencePart._fields):
        raise ValueError("a part is not its width, tokens and work")
    width, tokens, work = content
    return SequencePart(_number(width, least=1, whole=True), _number(tokens, whole=True), _number(work))


def _number(value: Any, *, least: int = 0, whole: bool = False) -> Any:
    if not plain_json.is_of(value, int if whole else NUMBER) or not least <= value <= LARGEST:
        raise ValueError(f"{plain_json.dumps(value)[:40]} is not a {'whole ' if whole else ''}number from {least} up")
    return value
