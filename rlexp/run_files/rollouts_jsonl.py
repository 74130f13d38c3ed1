"""rollouts.jsonl: one line per rollout, which lets two runs' samples be compared although no sample is stored.

For each sample the line has its length, checksums of its first 1, 2, 4, 8, … tokens, and a checksum of all tokens. If
two samples agree in the first 4 tokens and not in the first 8, the first difference lies between token 5 and token 8.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import orjson

from rlexp.base import files
from rlexp.run_files.curve_distance import Steps
from rlexp.run_files.metrics_jsonl import MOST

ROLLOUTS = "rollouts.jsonl"
PARTS = ("step", "n_samples", "prompts", "digests")


def sizes(length: int) -> list[int]:
    """Return how many tokens each checksum of an answer covers: for 11 tokens 1, 2, 4, 8 and 11."""
    return [*(1 << power for power in range((length - 1).bit_length() if length else 0)), length]


def digests(answer: npt.NDArray[np.int32]) -> list[int]:
    """Return an answer's length, then a CRC-32 of its tokens, as little-endian int32, up to each of `sizes`."""
    data = np.ascontiguousarray(answer, dtype="<i4").tobytes()
    crcs, crc, before = [len(answer)], 0, 0
    for size in sizes(len(answer)):
        crc, before = zlib.crc32(data[4 * before : 4 * size], crc), size
        crcs.append(crc)
    return crcs


def bracket(one: Sequence[int], other: Sequence[int]) -> tuple[int, int] | None:
    """Return the two tokens, counted from 1, between which two samples first differ; None if their digests agree."""
    ours, theirs = (dict(zip(sizes(each[0]), each[1:], strict=True)) for each in (one, other))
    same = 0
    for size in sorted(ours.keys() & theirs.keys()):
        if ours[size] != theirs[size]:
            return same + 1, size
        same = size
    return None if one[0] == other[0] else (same + 1, min(one[0], other[0]) + 1)  # one goes on where the other ends


@dataclass(frozen=True)
class Token:
    """The first sample that differs, in the order of the samples' places."""

    prompt: int  # its index in the data set
    sample: int  # of that prompt, from 0
    first: int  # the differing token lies between these two, counted from 1
    last: int
    differing: int  # samples of the rollout that differ
    samples: int


@dataclass(frozen=True)
class Apart:
    """The first rollout that differs between two runs: in its samples, or, without a token, in something that rounding
    does not choose."""

    rollout: int
    step: int  # the first optimizer step on it
    token: Token | None
    words: str  # in step 13 sample 2 of prompt 17 differs between token 5 and 8


class Record:
    """A run's rollouts.jsonl as one checksum per rollout. The lines are read again where two checksums differ."""

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
        common, own, others = np.intersect1d(self.rollouts, other.rollouts, assume_unique=True, return_indices=True)
        differ = np.flatnonzero(self.checksums[own] != other.checksums[others])
        if not len(differ):
            return None
        number = int(common[differ[0]])
        ours, theirs = (
            next((line for line in lines(each.path) if line["rollout"] == number), None) for each in (self, other)
        )
        return None if ours is None or theirs is None else described(ours, theirs)  # None: a resume just removed it


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the whole lines. While a run writes, the last line may be half a line."""
    try:
        text = files.read_regular(path, MOST)
    except OSError:
        return
    for line in text.splitlines(keepends=True):
        try:
            rollout = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        whole = line.endswith(b"\n") and isinstance(rollout, dict) and {"rollout", *PARTS} <= rollout.keys()
        if whole and isinstance(rollout["rollout"], int) and isinstance(rollout["step"], int):
            yield rollout


def checksum(line: dict[str, Any]) -> int:
    parts = orjson.dumps([line[part] for part in PARTS])
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little", signed=True)


def described(ours: dict[str, Any], theirs: dict[str, Any]) -> Apart | None:
    """Say how two runs' lines of one rollout differ."""
    rollout, step = ours["rollout"], min(ours["step"], theirs["step"])
    for part, what in (("step", "another first step"), ("n_samples", "more samples"), ("prompts", "other prompts")):
        if ours[part] != theirs[part]:
            return Apart(rollout, step, None, f"in step {step} rollout {rollout} has {what} in one of them")
    brackets = [bracket(one, other) for one, other in zip(ours["digests"], theirs["digests"], strict=True)]
    differing = [place for place, tokens in enumerate(brackets) if tokens is not None]
    if not differing:  # a resumed run is writing the line again just now
        return None
    place, tokens = differing[0], brackets[differing[0]]
    assert tokens is not None
    prompt, sample = ours["prompts"][place // ours["n_samples"]], place % ours["n_samples"]
    token = Token(prompt, sample, *tokens, len(differing), len(brackets))
    where = f"at token {token.first}" if token.first == token.last else f"between token {token.first} and {token.last}"
    several = f"{len(differing)} of {len(brackets)} samples"
    return Apart(rollout, step, token, f"in step {step} sample {sample} of prompt {prompt} differs {where} ({several})")
