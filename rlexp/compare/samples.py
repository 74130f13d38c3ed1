"""Whether two runs drew the same samples, and where they first did not.

Where probabilities differ by rounding, now and then a token is drawn that the other run did not draw, and what follows
is another curve's. In float32 and bfloat16 that is no defect: curves are held against each other up to there. In
float64 it hardly ever happens, and excuses nothing; nor do other prompts, which no rounding chooses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import orjson

from rlexp.compare.difference import ROUNDING, Steps
from rlexp.sinks.rollouts import bracket

if TYPE_CHECKING:  # a run has a record of its samples
    from rlexp.compare.runs import Run

PARTS = ("step", "n_samples", "prompts", "digests")


@dataclass(frozen=True)
class Token:
    """The first sample that differs, in the order of their places."""

    prompt: int  # its index in the data set
    sample: int  # of that prompt, from 0
    first: int  # the differing token lies between these two, counted from 1
    last: int
    differing: int  # samples of the rollout that differ
    samples: int


@dataclass(frozen=True)
class Apart:
    """The first rollout in which two runs have not drawn the same; the other's samples or, without a token, something
    that rounding does not choose."""

    rollout: int
    step: int  # the first optimizer step on it
    token: Token | None
    words: str  # in step 13 sample 2 of prompt 17 differs between token 5 and 8


class Record:
    """A run's rollouts.jsonl, as a checksum of each rollout; what they are of is read where two differ."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = {line["rollout"]: checksum(line) for line in lines(path)}
        self.rollouts: Steps = np.array(sorted(known), dtype=np.int64)
        self.checksums: Steps = np.array([known[each] for each in self.rollouts.tolist()], dtype=np.int64)
        self._apart: WeakKeyDictionary[Record, Apart | None] = WeakKeyDictionary()

    def apart(self, other: Record) -> Apart | None:
        if other not in self._apart:
            self._apart[other] = other._apart[self] = self._first(other)
        return self._apart[other]

    def _first(self, other: Record) -> Apart | None:
        common, mine, theirs = np.intersect1d(self.rollouts, other.rollouts, assume_unique=True, return_indices=True)
        differ = np.flatnonzero(self.checksums[mine] != other.checksums[theirs])
        if not len(differ):
            return None
        number = int(common[differ[0]])
        ours, there = (
            next((line for line in lines(each.path) if line["rollout"] == number), None) for each in (self, other)
        )
        return None if ours is None or there is None else described(ours, there)  # None: it is being cut back


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole; a run that is being written has half a line at the end."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.splitlines(keepends=True):
        try:
            found = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        whole = line.endswith(b"\n") and isinstance(found, dict) and {"rollout", *PARTS} <= found.keys()
        if whole and isinstance(found["rollout"], int) and isinstance(found["step"], int):
            yield found


def checksum(line: dict[str, Any]) -> int:
    parts = orjson.dumps([line[part] for part in PARTS])
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little", signed=True)


def described(ours: dict[str, Any], theirs: dict[str, Any]) -> Apart | None:
    """How two lines of one rollout differ."""
    rollout, step = ours["rollout"], min(ours["step"], theirs["step"])
    for part, what in (("step", "another first step"), ("n_samples", "more samples"), ("prompts", "other prompts")):
        if ours[part] != theirs[part]:
            return Apart(rollout, step, None, f"in step {step} rollout {rollout} has {what} in one of them")
    found = [bracket(one, other) for one, other in zip(ours["digests"], theirs["digests"], strict=True)]
    differing = [place for place, tokens in enumerate(found) if tokens is not None]
    if not differing:  # being written again just now
        return None
    place, tokens = differing[0], found[differing[0]]
    assert tokens is not None
    prompt, sample = ours["prompts"][place // ours["n_samples"]], place % ours["n_samples"]
    token = Token(prompt, sample, *tokens, len(differing), len(found))
    where = f"at token {token.first}" if token.first == token.last else f"between token {token.first} and {token.last}"
    return Apart(
        rollout,
        step,
        token,
        f"in step {step} sample {sample} of prompt {prompt} differs {where} ({len(differing)} of {len(found)} samples)",
    )


def coarsest(runs: Sequence[Run]) -> str:
    return max((run.precision for run in runs), key=lambda precision: ROUNDING.get(precision, 1.0))


def apart(run: Run, other: Run) -> Apart | None:
    """None where as far as is known their samples are the same."""
    if run.record is None or other.record is None:
        return None
    return run.record.apart(other.record)


def excused(run: Run, other: Run) -> Apart | None:
    """Where rounding may have made other samples of theirs, so that nothing from there on is held against them."""
    found = apart(run, other)
    return found if found is not None and found.token is not None and coarsest([run, other]) != "fp64" else None


def inexcusable(run: Run, other: Run) -> Apart | None:
    found = apart(run, other)
    return found if found is not None and excused(run, other) is None else None


def remark(found: Apart) -> str:
    return (
        f"the same samples up to step {found.step - 1}; {found.words}: rounding may flip a token, and the curves are "
        f"compared up to there"
    )


def named(found: Apart) -> str:
    """Of one that nothing excuses."""
    why = "which rounding does not choose" if found.token is None else "and float64 rounds away hardly any token"
    return f"{found.words}, {why}"
