"""What a preview found: plain numbers and texts, which the terminal, the page and the JSON file show alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlexp.config.schema.cadence import plural
from rlexp.config.schema.row_kinds import ROWS_OF, Kind


@dataclass(frozen=True)
class SourceFacts:
    """A source's rows, or those that are held out of it."""

    key: str
    path: str
    held_out: bool
    shape: str  # what its rows were recognised as, in words
    kind: str
    read: int
    kept: int
    tokens: int  # each prompt once
    weight: float | None = None
    taken: int = 0  # examples to train on: those kept that data.eval_size does not hold out
    per_epoch: int | None = None  # samples; None for held-out rows, and for those of a kind that is not trained on


@dataclass(frozen=True)
class Reason:
    """Rows that were not taken as they were read."""

    key: str  # of their source
    held_out: bool
    what: str
    count: int
    first: str | None  # the first such row; None for generated rows
    file: str | None = None  # the whole list, where there is one
    lines: tuple[str, ...] = ()  # the first of that list


@dataclass(frozen=True)
class Lengths:
    """How long a part of the examples is, in tokens."""

    part: str
    count: int
    mean: float
    percentiles: dict[str, int]  # min, 5, 25, 50, 75, 95, 99, max
    edges: tuple[int, ...]  # of the histogram: bar i counts lengths from edge i to below edge i + 1
    bars: tuple[int, ...]  # the last one also counts what is longer
    at_limit: int | None = None  # sequences that have all tokens that they may have
    limit: int | None = None

    @property
    def longer(self) -> bool:
        """Whether the last bar counts lengths beyond its edge."""
        return self.percentiles["max"] >= self.edges[-1]

    @property
    def end(self) -> str:
        """What stands at the end of the histogram."""
        return f"{self.edges[-2]:,} and more" if self.longer else f"{self.edges[-1]:,}"


@dataclass(frozen=True)
class Sharing:
    """Prompts that stand more than once in what is trained on, and rows that do."""

    examples: int
    prompts: int  # distinct ones
    sharing: int  # examples whose prompt another example has too
    duplicates: int  # examples with the tokens of an earlier one
    copies: int  # of its prompt in an example
    tokens: int  # of all sequences, with every copy of a prompt
    prompt_tokens: int  # of these, in prompts
    saved_within: int  # if each example held its prompt once
    saved_across: int  # if each distinct prompt stood once


@dataclass(frozen=True)
class RingFacts:
    """The packs of the first steps on a ring of some size. Where `why` says why not, the rest is None."""

    size: int
    own: bool  # the run's
    layout: str | None = None
    ranks: int | None = None
    replicas: int | None = None
    grad_acc: float | None = None  # micro-batches of a replica in a step, on average
    packed: float | None = None  # real tokens / tokens held, with packing
    padded: float | None = None  # the same without packing
    shared: float | None = None  # tokens that need not be computed, because others stand for them / all
    work: float | None = None  # attention of the busiest rank / of the mean rank
    tokens: float | None = None  # tokens of the fullest rank / of the mean rank
    cut: float | None = None  # sequences that several ranks hold / all
    step: float | None = None  # estimated time of a step / that of the best ring; None: not known
    why: str | None = None
    elastic: bool = False  # parallel=elastic, which makes the ranks a ring of this size

    @property
    def name(self) -> str:
        return "elastic" if self.elastic else f"{self.size}"


@dataclass(frozen=True)
class Steps:
    """How examples become optimizer steps."""

    per_epoch: int
    batch: int  # samples of a step
    run: int  # optimizer steps of this run
    epochs: float  # that they make
    left_out: int  # samples of an epoch that fill no batch
    tokens_mean: float  # of a step
    tokens_most: int
    tokens_per_epoch: int
    measured: str  # what a step's tokens are counted of


@dataclass(frozen=True)
class Piece:
    """Some tokens and their text: one token, or the few that a character is spread over. Without ids: left out."""

    text: str
    ids: tuple[int, ...]
    trained: bool = False
    special: bool = False
    hidden: int = 0  # tokens left out here


@dataclass(frozen=True)
class RowPart:
    name: str  # prompt, chosen, rejected, answer
    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ShownSample:
    origin: str
    parts: tuple[RowPart, ...]
    label: bool | None = None
    expected: str | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Preview:
    loss: str
    needs: str  # the kind of rows that the loss trains on
    kind: str  # the kind of rows that were found, and that the numbers below describe
    data: str
    model: str
    max_length: int
    packing: bool
    sources: tuple[SourceFacts, ...]
    reasons: tuple[Reason, ...]
    lengths: tuple[Lengths, ...] = ()
    sharing: Sharing | None = None
    steps: Steps | None = None
    rings: tuple[RingFacts, ...] = ()
    sampled: str = ""  # what the rings' packs were made of
    samples: tuple[ShownSample, ...] = ()
    problems: tuple[str, ...] = ()  # why the run cannot train on these rows

    @property
    def verdict(self) -> str:
        if self.problems:
            return " ".join(self.problems)
        steps = self.steps
        assert steps is not None
        examples = sum(each.per_epoch or 0 for each in self.sources)
        rows = ROWS_OF[Kind(self.kind)]
        return (
            f"loss={self.loss} trains on {examples:,} {rows} an epoch: {plural(steps.per_epoch, 'step')} of "
            f"{steps.batch:,}, and {plural(steps.run, 'step')} in this run ({epochs(steps.epochs)})."
        )


def plain(facts: Preview) -> dict[str, Any]:
    """Return the same for scripts."""
    known = asdict(facts)
    for reason in known["reasons"]:
        reason["said"] = reason.pop("lines")
    return {"verdict": facts.verdict, "trains": not facts.problems, **known}


def epochs(number: float) -> str:
    return f"{number:.3g} epoch{'' if number == 1 else 's'}"
