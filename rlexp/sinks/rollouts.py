"""rollouts.jsonl: a line per rollout, by which two runs' samples are held against each other without being kept.

Of each sample it has the length and checksums of its first 1, 2, 4, 8, … tokens and of all: two samples of which the
first 4 tokens agree and the first 8 do not differ between token 5 and token 8.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlexp.sinks.base import Ending, RolloutFacts, Sink
from rlexp.sinks.jsonl import LineFile, whole_lines

if TYPE_CHECKING:  # it would import torch, which who only reads does without
    from rlexp.types import Ids

ROLLOUTS = "rollouts.jsonl"


def sizes(length: int) -> list[int]:
    """How many tokens each checksum of an answer is of: 11 tokens have 1, 2, 4, 8, 11."""
    return [*(1 << power for power in range((length - 1).bit_length() if length else 0)), length]


def digests(answer: Ids) -> list[int]:
    """Its length, then a CRC-32 of the tokens up to each of `sizes`, as little-endian int32."""
    data = np.ascontiguousarray(answer, dtype="<i4").tobytes()
    found, crc, before = [len(answer)], 0, 0
    for size in sizes(len(answer)):
        crc, before = zlib.crc32(data[4 * before : 4 * size], crc), size
        found.append(crc)
    return found


def bracket(one: Sequence[int], other: Sequence[int]) -> tuple[int, int] | None:
    """Between which tokens, counted from 1, two samples differ for the first time, by their digests."""
    ours, theirs = (dict(zip(sizes(each[0]), each[1:], strict=True)) for each in (one, other))
    same = 0
    for size in sorted(ours.keys() & theirs.keys()):
        if ours[size] != theirs[size]:
            return same + 1, size
        same = size
    return None if one[0] == other[0] else (same + 1, min(one[0], other[0]) + 1)  # one goes on where the other ends


class RolloutsSink(Sink):
    """A run that goes on keeps the rollouts that were begun by the step it goes on from: the checkpoint has their
    samples. There is no file before the first rollout."""

    def __init__(self, path: Path, upto: int) -> None:
        self._path = path
        self._file: LineFile | None = None
        self._last = 0
        kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= upto]
        if kept or path.exists():
            self._last = json.loads(kept[-1])["rollout"] if kept else 0
            self._file = LineFile(path, kept, keep=False)

    def rollout(self, facts: RolloutFacts) -> None:
        if facts.rollout <= self._last:  # begun before a stop, and told again
            return
        if self._file is None:
            self._file = LineFile(self._path, [], keep=False)
        self._last = facts.rollout
        self._file.append(line_of(facts))

    def log(self, row: object) -> None:
        pass

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        if self._file is not None:
            self._file.close()


def line_of(facts: RolloutFacts) -> bytes:
    known = {
        "rollout": facts.rollout,
        "step": facts.step,
        "n_samples": facts.n_samples,
        "prompts": [int(index) for index in facts.prompts],
        "digests": [list(each) for each in facts.digests],
        "spans": {name: [list(span) for span in spans] for name, spans in facts.spans.items()},
    }
    return (json.dumps(known, separators=(",", ":")) + "\n").encode()
