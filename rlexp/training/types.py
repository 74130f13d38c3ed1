"""The frozen dataclasses that modules hand each other.

Shape letters: T tokens of a pack, t tokens of one rank's shard, S sequences, P pairs, H heads, D head size; N trained
tokens of a pack's sequences, n those of a shard: one that several sequences share stands there once for each of them.
u places of a shard whose targets are trained on, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlexp.config.schema.losses import CriticName

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]  # which tokens are trained on
Messages = Sequence[Mapping[str, Any]]  # of a chat: `role`, `content`, and what else the template takes
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Row:
    """A row of a data set as text: a prompt, and as many answers as its kind has; a pair has the chosen one first.

    A text stands for one message: of the user in a prompt, of the assistant in an answer. With an empty prompt nothing
    is asked: the answer is a text of its own, which no template writes.
    """

    prompt: str | Messages
    answers: tuple[str | Messages, ...]
    origin: str  # for error messages
    label: bool | None = None  # whether an unpaired answer is good
    expected: str | None = None  # the right answer, for rules that check one
    tools: Sequence[Any] | None = None  # that the template may describe
    options: Mapping[str, Any] = field(default_factory=dict)  # for the template
    margin: float | None = None  # by how much the chosen answer of a pair is better


@dataclass(frozen=True)
class Example:
    """A tokenized row: a prompt, and as many answers as its kind has; a pair has the chosen one first."""

    index: int  # its place in the data set, on every rank the same
    prompt: Ids
    answers: tuple[Ids, ...] = ()
    masks: tuple[Mask | None, ...] = ()  # which tokens of each answer are trained on; None: all
    origin: str = ""  # the row, for error messages
    label: bool | None = None  # whether an unpaired answer is good
    margin: float | None = None  # by how much the chosen answer of a pair is better, where rows say so
    text: str = ""  # the prompt's, where answers are drawn to it
    expected: str | None = None  # the right answer, for rules that check one
    notes: tuple[str, ...] = ()  # how it was not taken as it was read

    @property
    def masked(self) -> tuple[tuple[Ids, Mask | None], ...]:
        """Each answer with its mask."""
        return tuple(zip(self.answers, self.masks or (None,) * len(self.answers), strict=True))

    def longest(self) -> int:
        """Return the tokens of its longest sequence."""
        return len(self.prompt) + max((len(answer) for answer in self.answers), default=0)

    def highest(self) -> int:
        return max(int(part.max(initial=0)) for part in (self.prompt, *self.answers))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An answer drawn to a prompt. It lives in the host's memory, on the rank that drew it. Arrays have one value for
    each token of the answer."""

    place: int  # in its rollout: the prompt's place × n_samples + its number
    example: Example  # the prompt
    number: int  # among the samples of its prompt
    answer: Ids
    stopped: bool  # by a token that ends an answer, not by the limit
    text: str  # the answer, without the token that ended it
    behaviour: Floats  # log-probabilities under the weights that drew it


@dataclass(frozen=True, kw_only=True)
class ScoredSample(Sample):
    """A sample that the rewards have judged, and the models have computed where it is trained on."""

    score: float
    terms: Mapping[str, float]  # the parts of the score, by reward
    counts: bool  # it is trained on
    old: Floats | None = None  # log-probabilities before the first optimizer step on it
    reference: Floats | None = None
    values: Floats | None = None  # the critic's


@dataclass(frozen=True, kw_only=True)
class CreditedSample(ScoredSample):
    """A scored sample, of which each token has its advantage."""

    advantages: Floats
    returns: Floats | None = None  # the critic's targets


@dataclass(frozen=True)
class Segment:
    """A run of tokens of a pack that attends to itself, and to each of its ancestors as a whole.

    A pack is a forest: what sequences share has children, whose positions go on from its end. Where every sequence has
    its own copy of its prompt, all segments are roots (`parent` is None).
    """

    start: int  # the place of its first token in the pack
    length: int  # real tokens
    padded: int  # tokens it takes up, with the padding at its end
    parent: int | None = None  # the parent's place in the pack's list of segments
    trained: int = 0  # of its tokens, so many predict one that is trained on; a shared one counts once


class SequenceName(NamedTuple):
    """Which sequence of a run it is, whatever the layout: an answer of an example, by its place in the list of examples
    to train on, or in that of the held-out ones."""

    held_out: bool
    example: int
    answer: int


@dataclass(frozen=True)
class Pack:
    """The sequences of one micro-batch as a forest of segments, one after the other, before they are sharded over a
    ring.

    `targets_T` is already shifted: the token that follows the one in `tokens_T`. What is trained on is a list of the
    sequences' tokens, one sequence after the other, each by the place that predicts it.
    """

    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64
    positions_T: Tensor  # int64
    place_N: Tensor  # int64: where each trained token is predicted
    sequence_N: Tensor  # int64: whose token it is
    segments: tuple[Segment, ...]
    lengths: tuple[int, ...]  # tokens of each sequence, with those that it shares
    end_S: Tensor  # int64: the place of each sequence's last token
    names: tuple[SequenceName, ...] = ()  # of the sequences, where the rows give them

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def real_tokens(self) -> int:
        """The tokens that it holds, a shared one counted once."""
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True)
class Shard:
    """One ring rank's part of a pack, and what its attention needs to know of the rest."""

    tokens_t: Tensor
    targets_t: Tensor
    positions_t: Tensor
    index_t: Tensor  # the place of each token in the pack
    trained_u: Tensor  # the places in this shard whose targets are trained on
    reads_n: Tensor | None  # which of these predicts each trained token; None: they are the same
    sequence_n: Tensor  # whose token it is
    listed_n: Tensor  # where it stands in the pack's list of trained tokens
    sequences: int
    real_tokens: int  # on this rank
    sequence_tokens: int  # of the whole pack, a shared one counted for each sequence
    most_work: float  # attention work of the ring's busiest rank: pairs of a query and a key that it sees
    mean_work: float  # mean attention work of the ring's ranks
    most_tokens: int  # real tokens of the ring's fullest rank
    ring_tokens: int  # of all its ranks
    widths_S: tuple[int, ...]  # how many ranks hold tokens of each sequence
    estimate: tuple[float, float] | None  # work and sending of the ring's slowest rank, and of the mean one
    attention: Any  # rlexp.training.ring.base.RingBatch; opaque to every other module
    ring: Any  # rlexp.training.world.groups.Ring: the ranks that share the pack
    ends_n: Tensor | None = None  # the places in this shard at which sequences end, where scores are read there
    ended_n: Tensor | None = None  # and which sequences these are
    known_n: Tensor | None = None  # the reference's log-probabilities, where they were computed before training

    def by_token(self, values_u: Tensor) -> Tensor:
        """Return the values of places as those of the sequences' trained tokens."""
        return values_u if self.reads_n is None else values_u.index_select(0, self.reads_n)

    def to(self, device: torch.device) -> Shard:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        on_device: dict[str, Any] = {name: moved(value, device) for name, value in tensors.items()}
        return replace(self, **on_device, attention=self.attention.to(device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device while the device goes on computing: from pinned memory, without a wait."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Wanted:
    """All that a loss may want: of the models, of the rows, and of the train batch.

    A value of each token costs a field here, one of `TokenLogps`, and a formula in the head.
    """

    # of the models
    reference: bool = False  # log-probabilities of what the policy is compared with
    scores: bool = False  # of whole answers, by a head in the place of log-probabilities
    values: CriticName | None = None  # a critic's, of each token
    entropies: bool = False  # of each token's distribution
    entropy_gradient: bool = False
    likelihoods: bool = False  # log Σ p² of each token's distribution; detached
    hits: bool = False  # whether each token is the most probable one; detached
    temperature: float = 1.0  # at which log-probabilities are taken
    decoding: bool = False  # tokens drawn one by one
    # of the rows
    margins: bool = False
    labels: bool = False  # whether an answer is good
    tail_weight: float = 1.0  # of tokens beyond the length of the example's shortest answer
    # of the train batch
    mean_tokens: bool = False  # trained tokens of an example's first answer, on average
    mismatched: bool = False  # log-ratios of answers to other prompts
    whole_batch: bool = False  # all its examples at once

    def __or__(self, other: Wanted) -> Wanted:
        """Return what both want; where both say a number, the other's."""
        unset, given = vars(Wanted()), vars(other)
        return replace(self, **{name: value for name, value in given.items() if value != unset[name]})

    @property
    def frozen(self) -> Wanted:
        """What is wanted of a model that is not trained, and is compared with nothing."""
        return Wanted(scores=self.scores, temperature=self.temperature, decoding=self.decoding)


OF_TOKENS = ("entropies", "likelihoods", "hits")  # what may be wanted of a token's distribution


class TokenScores(NamedTuple):
    """The output of a model with a head for scores: one number for each sequence that ends in the shard."""

    scores_n: Tensor


class TokenLogps(NamedTuple):
    """A model's output for a shard's trained tokens.

    A tuple, not a dataclass: DeepSpeed hangs its hooks for the backward pass on the tensors that a model returns, and
    finds them in tuples only.
    """

    logps_n: Tensor  # log-probability of the target
    mean_logits_n: Tensor  # mean of the logits over the vocabulary, detached
    entropies_n: Tensor | None = None  # see `Wanted`, as the two below
    likelihoods_n: Tensor | None = None
    hits_n: Tensor | None = None  # 1 or 0
    values_n: Tensor | None = None

    @property
    def of_tokens(self) -> dict[str, Tensor]:
        """What was wanted of the targets' distributions, by its name in `Wanted`."""
        return {name: each_n for name in OF_TOKENS if (each_n := getattr(self, f"{name}_n")) is not None}
