"""What a run says of its first steps, as plain arrays which the launcher reads without torch.

The user's run, its plain run and the forward pass alone are recorded in the same form: a list of scenes, of which each
has values by quantity, and by what they belong to (`Key`). So any two of them are compared by one loop (`checks.py`).
"""

from __future__ import annotations

import math
import operator
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import SIDES

Array = npt.NDArray[Any]
Key = tuple[Any, ...]  # (sample, side) of an answer, (sample,) of an example, (name,) of anything else
ANSWER = "answer"  # the side of an answer that stands alone, or was drawn
START, HELD_OUT = "start", "held-out"
AGREE = 1e-9  # relative: what every rank of a ring computes is the same to the last bit on most devices


@dataclass(frozen=True)
class TokenExample:
    """An example as token ids, with the row that it came from. A mask says which tokens of an answer are trained on."""

    prompt: Array
    answers: Mapping[str, Array]
    masks: Mapping[str, Array]
    origin: str
    margin: float | None = None
    label: bool | None = None
    text: str = ""  # the prompt's, as a reward is given it
    right: str | None = None  # the row's own answer, for rewards that compare with it

    @property
    def sides(self) -> tuple[str, ...]:
        return tuple(self.answers)

    def sequence(self, side: str) -> Array:
        return np.concatenate((self.prompt, self.answers[side]))

    def trained(self, side: str) -> Array:
        """The places in the answer of the tokens that are trained on."""
        return np.flatnonzero(self.masks[side])

    @property
    def tokens(self) -> int:
        return sum(len(self.prompt) + len(answer) for answer in self.answers.values())


@dataclass
class DrawnSample:
    """A sample that the policy drew, and what is known of it when its rollout is complete."""

    place: int  # in the rollout
    index: int  # its prompt's place in the data set
    prompt: Array
    origin: str
    answer: Array
    stopped: bool  # by itself, and not by the limit
    text: str
    behaviour: Array
    terms: dict[str, float]  # of its reward
    score: float
    old: Array | None = None
    reference: Array | None = None
    values: Array | None = None
    advantages: Array | None = None
    returns: Array | None = None
    counts: bool = True
    asked: str = ""  # the prompt's text
    right: str | None = None

    @property
    def example(self) -> TokenExample:
        whole = np.ones(len(self.answer), dtype=bool)
        return TokenExample(self.prompt, {ANSWER: self.answer}, {ANSWER: whole}, self.origin, text=self.asked,
                            right=self.right)  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """What a run has drawn: its rollouts, and the coefficient of the divergence in each."""

    rollouts: Mapping[int, Sequence[DrawnSample]]
    coefficients: Mapping[int, float]


@dataclass
class Scene:
    """A moment of a run: its start, a rollout, an optimizer step, or its end.

    Of a token's values a rank has those of its own tokens, each with its place in the answer: `tokens`. What is a pair
    in `own` is to be equal within the recording: what is there, and what it must be by other values of the recording.
    """

    name: str
    step: int  # the optimizer step that it belongs to
    values: dict[str, dict[Key, Any]] = field(default_factory=dict)
    tokens: dict[str, dict[Key, list[tuple[Array, Array]]]] = field(default_factory=dict)
    own: dict[str, dict[Key, tuple[Any, Any]]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)  # checksums of gradients and weights
    row: dict[str, float] = field(default_factory=dict)

    def put(self, quantity: str, key: Key, value: Any) -> None:
        self.values.setdefault(quantity, {})[key] = value

    def put_all(self, quantity: str, keys: Sequence[Key], values: Any) -> None:
        if values is not None:
            self.values.setdefault(quantity, {}).update(zip(keys, np.asarray(values).tolist(), strict=False))

    def put_tokens(self, quantity: str, key: Key, places: Array, values: Array) -> None:
        self.tokens.setdefault(quantity, {}).setdefault(key, []).append((places, values))

    def expect(self, quantity: str, key: Key, got: Any, meant: Any) -> None:
        self.own.setdefault(quantity, {})[key] = (got, meant)


@dataclass
class Recording:
    """The first steps of a run: as one rank saw them, or put together from all ranks (`merged`)."""

    rank: int = 0
    ring_size: int = 1
    scenes: list[Scene] = field(default_factory=list)
    examples: dict[int, TokenExample] = field(default_factory=dict)  # that were trained on
    held_out: list[TokenExample] = field(default_factory=list)
    rollouts: dict[int, list[DrawnSample]] = field(default_factory=dict)
    answers: list[DrawnSample] = field(default_factory=list)  # to held-out prompts
    coefficients: dict[int, float] = field(default_factory=dict)  # of the divergence, by rollout
    facts: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None  # the probe's message, if it refused the model
    stopped: str | None = None  # why the run refused a step: a value was not finite
    kept: Any = None  # for the backward pass of the first micro-batch: a `KeptOnRank`
    folder: Path | None = None  # of gradients and weights
    loss: dict[int, tuple[float, float]] = field(default_factory=dict)  # by step: the loss, and the size of its terms

    def steps(self) -> list[Scene]:
        return [scene for scene in self.scenes if scene.name.startswith("step ")]

    @property
    def samples(self) -> Samples:
        return Samples(self.rollouts, self.coefficients)

    def complete(self, draws: bool) -> bool:
        """Whether all samples that were drawn are credited, if any is."""
        known = [sample.advantages is not None for samples in self.rollouts.values() for sample in samples]
        return all(known) and (bool(known) or not draws)

    @property
    def files(self) -> TensorFiles:
        assert self.folder is not None
        return TensorFiles(self.folder)


@dataclass(frozen=True)
class Update:
    """Norms for one parameter and step: difference of the weights to what they should be, the step, the weights."""

    apart: float
    step: float
    weight: float


class TensorFiles:
    """Gradients and weights by step and parameter, in files: they are too large for a pipe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, kind: str, step: int, name: str) -> Path:
        return self.folder / f"{kind}-{step}" / f"{name}.npy"

    def write(self, kind: str, step: int, name: str, values: Array) -> None:
        path = self._path(kind, step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # it may be another step's too
        np.save(path, values)

    def repeat(self, kind: str, step: int, name: str) -> None:
        """Let the file of the step before be this step's too."""
        path = self._path(kind, step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = self._path(kind, step - 1, name)
        try:
            path.hardlink_to(before)
        except OSError:  # not every file system has links
            shutil.copyfile(before, path)

    def names(self, kind: str, step: int) -> list[str]:
        folder = self.folder / f"{kind}-{step}"
        return sorted(path.stem for path in folder.iterdir()) if folder.is_dir() else []

    def moved(self, step: int) -> set[str]:
        """The weights that are not in the files of the start: they have changed."""
        names = self.names("weights", step)
        start, now = ([self._path("weights", number, name) for name in names] for number in (0, step))
        return {name for name, a, b in zip(names, start, now, strict=True) if not a.exists() or not a.samefile(b)}

    def read(self, kind: str, step: int, name: str) -> Array:
        """Map the file, so that it takes memory only while it is used."""
        values: Array = np.load(self._path(kind, step, name), mmap_mode="r")
        return values


def mark(values: Array) -> int:
    """A checksum: ranks that hold the same bits have the same mark."""
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)


def sides_of(cfg: Config) -> tuple[str, ...]:
    return (ANSWER,) if cfg.loss.draws else SIDES[cfg.loss.rows]


# ---- all ranks together ----


def merged(parts: Sequence[Recording], folder: Path) -> Recording:
    """Put together what all ranks have recorded."""
    first = parts[0]
    whole = replace(first, scenes=[], folder=folder)
    for part in parts[1:]:
        whole.examples |= part.examples
        for number, samples in part.rollouts.items():
            whole.rollouts[number] = [*whole.rollouts.get(number, []), *samples]
        whole.answers = [*whole.answers, *part.answers]
    for samples in (*whole.rollouts.values(), whole.answers):
        samples.sort(key=lambda sample: sample.place)
    for number in range(min(len(part.scenes) for part in parts)):
        whole.scenes.append(_scene_of([part.scenes[number] for part in parts]))
    whole.kept = [part.kept for part in parts[: first.ring_size]]
    return whole


def _scene_of(parts: Sequence[Scene]) -> Scene:
    """Put together one moment. What several ranks say must be the same."""
    whole = replace(parts[0], values={}, tokens={}, own={}, row=parts[0].row)
    for rank, part in enumerate(parts):
        for quantity, values in part.values.items():
            known = whole.values.setdefault(quantity, {})
            for key, value in values.items():
                if quantity in ADDED_UP or quantity in LARGEST:
                    add = max if quantity in LARGEST else operator.add
                    known[key] = add(known.get(key, 0), value)
                elif key not in known:
                    known[key] = value
                elif not same(known[key], value):
                    whole.expect("the same on all ranks", (quantity, *key, f"on rank {rank}"), value, known[key])
        for quantity, pairs in part.own.items():
            whole.own.setdefault(quantity, {}).update({(*key, rank): pair for key, pair in pairs.items()})
        for name, value in part.row.items():
            if not same(whole.row.get(name, math.nan), value) and not name.startswith(("memory/", "train/time")):
                whole.expect("the same on all ranks", (name, f"on rank {rank}"), value, whole.row.get(name))
        for name in whole.marks:
            if part.marks.get(name) != whole.marks[name]:
                pair = "another value", "what rank 0 has, to the bit"
                whole.expect("the same bits on all ranks", (name, f"on rank {rank}"), *pair)
                break
    for quantity in {quantity for part in parts for quantity in part.tokens}:
        whole.values[quantity] = _by_place([part.tokens.get(quantity, {}) for part in parts])
    return whole


# Over the ranks.
ADDED_UP = (
    "taken",
    "part of the loss",
    "sequence tokens",
    "shared tokens",
    "ranks that hold a sample",
    "answer to a held-out prompt",
)
LARGEST = ("placed tokens", "micro-batches")


def _by_place(parts: Sequence[Mapping[Key, list[tuple[Array, Array]]]]) -> dict[Key, Array]:
    """Join the ranks' tokens of each answer, in the order of their places. One that two ranks hold is there twice."""
    joined: dict[Key, list[tuple[Array, Array]]] = {}
    for part in parts:
        for key, pieces in part.items():
            joined.setdefault(key, []).extend(pieces)
    arrays = {}
    for key, pieces in joined.items():
        places = np.concatenate([place for place, _ in pieces])
        arrays[key] = np.concatenate([values for _, values in pieces])[np.argsort(places, kind="stable")]
    return arrays


def same(one: Any, other: Any) -> bool:
    """Say whether two ranks say the same."""
    if isinstance(one, str | bool | None) or isinstance(other, str | bool | None):
        return bool(one == other)
    a, b = np.asarray(one), np.asarray(other)
    if a.dtype.kind in "US" or b.dtype.kind in "US":
        return bool(one == other)
    if a.shape != b.shape:
        return False
    close = np.abs(a - b) <= AGREE * np.maximum(np.abs(b), 1e-300)
    return bool((close | (np.isnan(a) & np.isnan(b)) | (a == b)).all())
