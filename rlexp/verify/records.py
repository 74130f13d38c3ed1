"""Records of a run and of the reference, as plain arrays, which the launcher reads without torch.

Shape letters: T packed tokens, t tokens of one rank, N and n trained tokens of these, S sequences, E examples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rlexp.config.schema.row_kinds import SIDES as SIDES_OF
from rlexp.config.schema.row_kinds import Kind

Array = npt.NDArray[Any]
SIDES = SIDES_OF[Kind.pairs]
Key = tuple[int, str]  # a sequence: the sample and its side
MISMATCHED = "log-ratios of mismatched answers"


class TokenExample:
    """An example as token ids, with the file and line it came from: a prompt, and an answer for each of its sides.

    A mask says which tokens of an answer are trained on; None: all of them.
    """

    sides: ClassVar[tuple[str, ...]]
    prompt: Array
    origin: str
    margin: float | None = None
    label: bool | None = None

    def but(self, **parts: Any) -> TokenExample:
        return replace(self, **parts)  # type: ignore[type-var]

    def ids(self, side: str) -> Array:
        answer: Array = getattr(self, side)
        return answer

    def trained(self, side: str) -> Array:
        """Return, for each token of an answer, whether it is trained on."""
        mask: Array | None = getattr(self, f"{side}_mask")
        return np.ones(len(self.ids(side)), dtype=bool) if mask is None else mask

    def sequence(self, side: str) -> Array:
        return np.concatenate((self.prompt, self.ids(side)))

    @property
    def tokens(self) -> int:
        return sum(len(self.prompt) + len(self.ids(side)) for side in self.sides)


@dataclass(frozen=True)
class TokenPair(TokenExample):
    sides: ClassVar[tuple[str, ...]] = SIDES

    prompt: Array
    chosen: Array
    rejected: Array
    origin: str
    chosen_mask: Array | None = None
    rejected_mask: Array | None = None
    margin: float | None = None  # by how much the chosen answer is better, where the row says so


@dataclass(frozen=True)
class TokenAnswer(TokenExample):
    sides: ClassVar[tuple[str, ...]] = SIDES_OF[Kind.supervised]

    prompt: Array
    answer: Array
    origin: str
    answer_mask: Array | None = None
    label: bool | None = None  # whether the answer is good, where the row says so


@dataclass(frozen=True)
class TokenPrompt(TokenExample):
    """A prompt to which the policy draws its answers."""

    sides: ClassVar[tuple[str, ...]] = SIDES_OF[Kind.prompts]

    prompt: Array
    origin: str
    text: str  # the prompt as a reward is given it
    right: str | None = None  # the row's own answer, for rewards that compare with it


@dataclass(frozen=True)
class Counts:
    """What the reference counts of a batch's examples for the loss."""

    tokens: Mapping[str, Array]  # trained tokens of each answer, by side
    mean_tokens: float  # of the first answers
    margins: Array | None  # 0 where a row has none
    labels: Array | None  # 1 for a good answer, 0 for a bad one


@dataclass(frozen=True)
class PackSeen:
    """A pack as rank 0 of a ring built it."""

    tokens_T: Array
    targets_T: Array
    positions_T: Array
    place_N: Array
    sequence_N: Array
    end_S: Array
    segments: tuple[tuple[int, int, int, int | None], ...]  # start, length, padded, parent


@dataclass(frozen=True)
class Losses:
    """What the loss's formula makes of some examples' sums, (E,)."""

    losses_E: Array
    slopes: dict[str, Array]  # derivatives of the losses' sum by the policy's sums, by side
    values_E: dict[str, Array]  # the formula's other results
    weights_E: dict[str, Array] = field(default_factory=dict)  # of examples in the mean of a result, where they differ
    carried: Mapping[str, float] = field(default_factory=dict)  # what the step before left to it

    def __getitem__(self, some: slice | list[int]) -> Losses:
        slopes, values_E, weights_E = ({name: each[some] for name, each in of.items()}
                                       for of in (self.slopes, self.values_E, self.weights_E))  # fmt: skip
        return Losses(self.losses_E[some], slopes, values_E, weights_E, self.carried)


@dataclass(frozen=True)
class Applied:
    """One call of the loss's formula on a rank: what it was given, and what it returned."""

    sums: dict[str, Array]
    counts: Counts
    mismatched: Array | None
    losses: Losses


@dataclass(frozen=True)
class Terms:
    """What the formula of a policy loss makes of some tokens."""

    loss: float
    weighted: dict[str, float]  # parts of the loss that are sums over tokens
    replicated: dict[str, float]  # parts of the loss that are sums over whole answers
    means: dict[str, Array]  # values of each token whose mean is logged
    peaks: dict[str, Array]  # and those whose maximum is
    slopes: dict[str, Array]  # the loss's derivatives by what the models say of each token
    kl_coef: float
    configured: float = math.nan  # the loss by the formula that the configuration asks for, where it was recorded


@dataclass
class Micro:
    """One micro-batch as one rank saw it. Values that the run did not reach are None."""

    samples: tuple[int, ...]
    pack: PackSeen | None = None
    tokens_t: Array | None = None
    targets_t: Array | None = None
    positions_t: Array | None = None
    index_t: Array | None = None  # places in the pack
    sequence_n: Array | None = None  # whose trained token it is
    position_n: Array | None = None  # at which it is predicted
    target_n: Array | None = None
    real_tokens: int = 0  # of this rank
    placed_tokens: int = 0  # of this rank, by the layout
    sequence_tokens: int = 0  # of the pack's sequences, a shared token counted for each
    policy_n: Array | None = None  # log-probability of each target
    logits_n: Array | None = None  # mean over the vocabulary
    reference_n: Array | None = None
    likelihoods_n: Array | None = None  # log Σ p² of each target's distribution
    entropies_n: Array | None = None  # the distribution's entropy
    hits_n: Array | None = None  # 1 where the target is the most probable token
    values_n: Array | None = None  # the critic's
    sums: dict[str, Array] = field(default_factory=dict)  # the loss's arguments by name (policy/chosen, …), (E,)
    counts: Counts | None = None  # what else the loss is given
    mismatched: Array | None = None  # log-ratios of all the train batch's mismatched answers, as the loss is given them
    losses: Losses | None = None
    given: Losses | None = None  # the same by the formula alone, from these sums
    applied: Applied | None = None  # the formula's call, where it sees one micro-batch
    handed_slopes: dict[str, Array] = field(default_factory=dict)  # derivatives of `handed` by the policy's sums
    handed: float | None = None  # the scalar given to the engine
    scaled: float = 1.0  # by which the engine multiplies it before its derivatives
    last: bool = False  # the engine's mark of the last micro-batch
    known: dict[str, Array] = field(default_factory=dict)  # of a drawn sample's tokens, as the formula is given them
    terms: Terms | None = None  # what the formula of a policy loss made of them on this rank

    def column(self, name: str) -> Array | None:
        """Values of this rank's trained tokens."""
        values: Array | None = self.known[name] if name in self.known else getattr(self, name, None)
        return values


@dataclass
class StepSeen:
    """One optimizer step as one rank saw it."""

    planned: tuple[int, ...] = ()  # the train batch, by the sampler alone
    dealt: tuple[int, ...] = ()  # the places of its units in the packs of all replicas
    micros: list[Micro] = field(default_factory=list)
    others: list[Micro] = field(default_factory=list)  # with mismatched answers, where the loss asks for them
    other_tokens: dict[int, TokenExample] = field(default_factory=dict)
    applied: Applied | None = None  # the formula's call, where it sees the whole batch
    lr: float = 0.0
    gradient_marks: dict[str, int] = field(default_factory=dict)
    weight_marks: dict[str, int] = field(default_factory=dict)
    stale: tuple[str, ...] = ()  # parameters whose computing copy differs from the stepped one
    row: dict[str, float | int] = field(default_factory=dict)
    tokens: dict[int, TokenExample] = field(default_factory=dict)  # drawn samples, by their places in the rollout
    rollout: int | None = None  # the number of the rollout that they are from

    @property
    def trained(self) -> bool:
        """Say whether its backward passes are over. What is then packed is looked at, not trained on: the samples of a
        loss that is not finite."""
        return bool(self.micros) and self.micros[-1].last


@dataclass
class Drawn:
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

    @property
    def tokens(self) -> TokenAnswer:
        return TokenAnswer(self.prompt, self.answer, self.origin)


@dataclass
class RolloutSeen:
    """A rollout as one rank saw it."""

    number: int
    step: int  # the first that takes samples of it
    kl_coef: float
    samples: list[Drawn]  # that this rank holds
    planned: tuple[int, ...] = ()  # its prompts, by the sampler alone
    outcomes: dict[str, Array] = field(default_factory=dict)  # of all samples, as the formula's `credit` was given them
    credit: Array | None = None  # what it returned


@dataclass
class Trace:
    """A run as one rank saw it."""

    rank: int
    ring_size: int
    examples: int = 0  # in the data set
    parameters: int = 0
    total_steps: int = 0
    engine: str = ""
    layout: str = ""
    dtypes: tuple[str, ...] = ()  # of the model's parameters
    refused: str | None = None  # the probe's message, if it refused the model
    tokens: dict[int, TokenExample] = field(default_factory=dict)  # samples that this rank has seen
    held_tokens: dict[int, TokenExample] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    held_out: list[Micro] = field(default_factory=list)
    held_others: list[Micro] = field(default_factory=list)  # the held-out examples with mismatched answers
    held_other_tokens: dict[int, TokenExample] = field(default_factory=dict)
    rollouts: list[RolloutSeen] = field(default_factory=list)
    held_rollout: list[Drawn] | None = None  # this rank's answers to held-out prompts
    stopped: str | None = None  # why the run refused a step: a value was not finite
    kept: Any = None  # for the backward pass of the first micro-batch: a `KeptOnRank`, which the reference must not see

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
    policy: dict[Key, Array]  # log-probability of each token that is trained on; or an answer's score, (1,)
    loss: float
    row: dict[str, float]
    grad_norm: float = field(default=0.0, kw_only=True)
    lr: float = field(default=0.0, kw_only=True)


@dataclass
class RowsExpected(StepExpected):
    """One step on answers that the rows give."""

    reference: dict[Key, Array]
    logits: dict[Key, Array]  # means over the vocabulary
    likelihoods: dict[Key, Array]
    entropies: dict[Key, Array]
    hits: dict[Key, Array]
    others: dict[int, TokenExample]  # the samples with mismatched answers, where the loss asks for them
    of_others: dict[str, dict[Key, Array]]  # what policy and reference say of them
    counts: Counts
    losses: dict[int, float]


@dataclass
class RolloutExpected:
    """A rollout by the reference: all that it makes of the drawn tokens, by the samples' places."""

    number: int
    step: int
    indices: list[int]  # of the prompts
    prompts: list[TokenPrompt]
    texts: list[str]
    stopped: list[bool]
    answers: list[tuple[int, ...]]  # as they were drawn
    beyond: list[int | None]  # how many tokens an answer should have that goes on after its end
    terms: dict[str, Array]  # rewards that were computed again
    given: dict[str, str]  # why others were not
    notes: dict[str, str]
    scores: Array
    row: dict[str, float]
    behaviour: list[Array] = field(default_factory=list)
    strayed: list[Array] = field(default_factory=list)  # by how much each number lies outside its token's part
    doubtful: int = 0  # drawn tokens of which rounding decides whether they may be drawn
    old: list[Array] = field(default_factory=list)
    reference: list[Array] | None = None
    values: list[Array] | None = None
    counts: Array = field(default_factory=lambda: np.zeros(0, dtype=bool))
    advantages: list[Array] = field(default_factory=list)
    returns: list[Array] | None = None
    kl_coef: float = 0.0


@dataclass
class DrawnExpected(StepExpected):
    """One step on samples that the policy drew."""

    rollout: RolloutExpected
    entropies: dict[Key, Array]
    values: dict[Key, Array]  # the critic's; none without one
    terms: Terms
    scale: float  # the size of the loss's terms: they may cancel
    learned: int  # tokens that count and whose advantage is not 0


@dataclass(frozen=True)
class Asked:
    """What the loss asks for besides sums of log-probabilities."""

    tail_weight: float
    mean_tokens: bool
    margins: bool
    scores: bool  # one number for each answer, in the place of its tokens' log-probabilities


@dataclass
class Expected:
    """The reference's steps."""

    asks: Asked

    examples: int
    total_steps: int
    tokens: dict[int, TokenExample]
    steps: list[Any]  # RowsExpected, or DrawnExpected
    held_tokens: dict[int, TokenExample] = field(default_factory=dict)
    rollouts: list[RolloutExpected] = field(default_factory=list)
    held_rollout: RolloutExpected | None = None
    apart: float = 0.0  # of drawn samples: the largest difference of weights after a step that began with the run's


@dataclass(frozen=True)
class Met:
    """How much of the data the verified steps have met."""

    examples: int  # pairs, answers or prompts
    of: int  # in the data set
    shortest: int  # tokens of a sequence
    longest: int
    rollouts: int = 0
    samples: int = 0  # drawn answers
    counting: int = 0  # that are trained on
    advantages: int = 0  # tokens of train batches that count and whose advantage, whitened or not, is not 0
    alike: int = 0  # prompts whose answers are all the same, of those with several
    values: bool = True  # whether a critic has said anything but 0
    doubtful: int = 0  # drawn tokens of which rounding decides whether top_k, top_p and min_p let them be drawn


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
        np.save(path, values)

    def names(self, kind: str, step: int) -> list[str]:
        folder = self.folder / f"{kind}-{step}"
        return sorted(path.stem for path in folder.iterdir()) if folder.is_dir() else []

    def read(self, kind: str, step: int, name: str) -> Array:
        """Map the file, so that it takes memory only while it is used."""
        values: Array = np.load(self._path(kind, step, name), mmap_mode="r")
        return values


def joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def mark(values: Array) -> int:
    """A checksum: ranks that hold the same bits have the same mark."""
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)
