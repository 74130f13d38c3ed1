"""What `verify` keeps of a run and of the reference, as plain arrays: the launcher reads it without torch.

Shape letters: T packed tokens, t tokens of one rank, S sequences, P pairs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SIDES = ("chosen", "rejected")
Key = tuple[int, str]  # a sample and a side of it: one sequence


@dataclass(frozen=True)
class TokenPair:
    """A pair as token ids, with where it came from."""

    prompt: Array
    chosen: Array
    rejected: Array
    origin: str

    def answer(self, side: str) -> Array:
        answer: Array = getattr(self, side)
        return answer

    def sequence(self, side: str) -> Array:
        return np.concatenate((self.prompt, self.answer(side)))

    @property
    def tokens(self) -> int:
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PackSeen:
    tokens_T: Array
    targets_T: Array
    positions_T: Array
    sequence_T: Array
    segments: tuple[tuple[int, int, int], ...]  # start, length, padded


@dataclass
class Micro:
    """One micro-batch as one rank saw it. What has not been reached is None."""

    samples: tuple[int, ...]
    pack: PackSeen | None = None
    tokens_t: Array | None = None
    targets_t: Array | None = None
    positions_t: Array | None = None
    sequence_t: Array | None = None
    real_tokens: int = 0
    policy_t: Array | None = None  # log-probability of each target
    logits_t: Array | None = None  # mean over the vocabulary
    reference_t: Array | None = None
    sums: dict[str, Array] = field(default_factory=dict)  # policy/chosen, …: what the loss was given, (P,)
    losses_P: Array | None = None
    slopes: dict[str, Array] = field(default_factory=dict)  # of the losses, by the policy's sums: chosen, rejected
    values_P: dict[str, Array] = field(default_factory=dict)  # what else the loss answered
    handed: float | None = None  # the scalar that the engine was given
    last: bool = False  # and whether it was told that it was the last


@dataclass
class StepSeen:
    """One optimizer step as one rank saw it."""

    planned: tuple[tuple[int, ...], ...] = ()  # the micro-batches that the sampler has for this replica
    micros: list[Micro] = field(default_factory=list)
    lr: float = 0.0
    gradient_marks: dict[str, int] = field(default_factory=dict)
    weight_marks: dict[str, int] = field(default_factory=dict)
    stale: tuple[str, ...] = ()  # parameters that compute with something else than what was stepped
    row: dict[str, float | int] = field(default_factory=dict)


@dataclass
class Trace:
    """A run as one rank saw it."""

    rank: int
    ring_size: int
    pairs: int = 0  # in the data set
    parameters: int = 0
    total_steps: int = 0
    engine: str = ""
    layout: str = ""
    dtypes: tuple[str, ...] = ()  # of the model's parameters
    refused: str | None = None  # what the probe says of the model
    tokens: dict[int, TokenPair] = field(default_factory=dict)  # of the samples this rank has seen
    held_tokens: dict[int, TokenPair] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    held_out: list[Micro] = field(default_factory=list)
    stopped: str | None = None  # why the product refused to take a step: something was not finite

    @property
    def replica(self) -> int:
        return self.rank // self.ring_size

    @property
    def ring_rank(self) -> int:
        return self.rank % self.ring_size


@dataclass
class StepExpected:
    """One optimizer step by the reference."""

    number: int
    samples: tuple[int, ...]
    policy: dict[Key, Array]  # log-probability of each token of the answer
    reference: dict[Key, Array]
    logits: dict[Key, Array]  # means over the vocabulary
    losses: dict[int, float]
    loss: float
    grad_norm: float
    lr: float
    row: dict[str, float]


@dataclass
class Expected:
    """The reference's steps."""

    pairs: int
    total_steps: int
    tokens: dict[int, TokenPair]
    steps: list[StepExpected]
    held_tokens: dict[int, TokenPair] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """Norms, of one parameter and step: from what the weights are to what they should be; the step; the weights."""

    apart: float
    step: float
    weight: float


class TensorFiles:
    """Gradients and weights by step and parameter: too many for a pipe, and for memory twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, kind: str, step: int, name: str) -> Path:
        return self.folder / f"{kind}-{step}" / f"{name}.npy"

    def write(self, kind: str, step: int, name: str, values: Array) -> None:
        path = self._path(kind, step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values)

    def names(self, kind: str, step: int) -> list[str]:
        folder = self.folder / f"{kind}-{step}"
        return sorted(path.stem for path in folder.iterdir()) if folder.is_dir() else []

    def read(self, kind: str, step: int, name: str) -> Array:
        """Mapped, so that it costs memory as long as it is looked at."""
        values: Array = np.load(self._path(kind, step, name), mmap_mode="r")
        return values


def joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def mark(values: Array) -> int:
    """Two ranks that hold the same bits have the same mark."""
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)
