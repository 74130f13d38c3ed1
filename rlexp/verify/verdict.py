"""What comes of verifying one configuration: the first difference, and what was compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlexp.preflight.rehearsal.sharding import Sharding
    from rlexp.verify.gap import Gap
    from rlexp.verify.jobs import VerifyPlan
    from rlexp.verify.precision import Measured


@dataclass
class Failure:
    """The first difference: the settings that make it, if any does, and the folder whose code it points to."""

    precision: str
    step: int
    stage: str
    quantity: str
    got: str
    expected: str
    module: str
    note: str = ""
    evidence: str = ""
    beside: str = "plain run"  # what the run was beside when it differed
    settings: list[dict[str, str]] = field(default_factory=list)  # each with its key, its value and the plain one
    around: list[str] = field(default_factory=list)  # settings with which the step agrees
    not_tried: list[str] = field(default_factory=list)
    starts: int | None = None  # of the search; None: there was none


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
    widths: Mapping[int, int] = field(default_factory=dict)  # sequences that so many ranks hold, up to twice as many
    doubtful: int = 0  # drawn tokens of which rounding decides whether top_k, top_p and min_p let them be drawn


@dataclass
class Verification:
    """The result of verifying one configuration."""

    plan: VerifyPlan | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)  # in which the run differs from its plain run
    largest: dict[str, float] = field(default_factory=dict)  # differences in float64, by quantity
    measured: list[Measured] = field(default_factory=list)
    failure: Failure | None = None
    gap: Gap | None = None  # of answers by vLLM
    sharding: Sharding | None = None  # None for a ring of one, and after a failure
    not_held: Sequence[str] = ()
    met: Met | None = None  # None if nothing was computed alone
    given: dict[str, dict[str, str]] = field(default_factory=dict)  # by precision: what is taken as given, and why
    scores: bool = False  # the loss is given a score of each answer
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether all values agree."""
        return self.failure is None

    @property
    def passed(self) -> bool:
        """Whether the ring also shards every module: one that keeps the whole sequence makes it useless."""
        return self.agrees and (self.sharding is None or not self.sharding.whole)
