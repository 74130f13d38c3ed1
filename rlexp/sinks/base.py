"""What a sink answers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it would import torch, which who only reads does without
    from rlexp.types import MetricRow


@dataclass(frozen=True)
class Shown:
    """A sample for people to read."""

    prompt: str
    answer: str
    score: float
    terms: Mapping[str, float]  # of the score, by the reward's names
    length: int  # of the answer, in tokens
    stopped: bool  # it came to an end by itself


@dataclass(frozen=True)
class RolloutFacts:
    """What was drawn. A sample's place is its prompt's place × n_samples + its number."""

    rollout: int
    step: int  # the first optimizer step on it
    n_samples: int  # of each prompt
    prompts: Sequence[int]  # their indices in the data set, by place
    digests: Sequence[Sequence[int]]  # of all samples' answers, by place (sinks/rollouts.py)
    shown: Sequence[Shown] = ()  # empty where no table is due
    spans: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # of its making, by the clock


@dataclass(frozen=True)
class Ending:
    """How a process ended. The facts are what a run that died of memory leaves: where, and its peaks."""

    exit_code: int = 0  # 0 for a run that ended well; 128 + signal for one that was stopped
    reason: str = ""
    facts: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return 0 < self.exit_code <= 128


class Sink(Protocol):
    """All but `log` may be left as it is."""

    def log(self, row: MetricRow) -> None:
        """One optimizer step; `step` comes first."""

    def rollout(self, facts: RolloutFacts) -> None:  # noqa: ARG002
        """Samples are drawn and scored. It may come some steps before the row of `facts.step`."""
        return

    def saved(self, step: int, checkpoint: Path) -> None:  # noqa: ARG002
        """A checkpoint has its final name."""
        return

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        """The last call, however the process ends."""
        return


class Companion(Protocol):
    """What adds to a row before any sink sees it."""

    def beside(self, row: MetricRow) -> MetricRow: ...

    def close(self) -> None: ...


class Sinks:
    def __init__(self, sinks: Sequence[Sink], companion: Companion | None = None) -> None:
        self.sinks, self.companion = sinks, companion

    def log(self, row: MetricRow) -> None:
        if self.companion is not None:
            row = self.companion.beside(row)
        for sink in self.sinks:
            sink.log(row)

    def rollout(self, facts: RolloutFacts) -> None:
        for sink in self.sinks:
            sink.rollout(facts)

    def saved(self, step: int, checkpoint: Path) -> None:
        for sink in self.sinks:
            sink.saved(step, checkpoint)

    def close(self, ending: Ending) -> None:
        """Every sink is closed, also when closing one before it fails."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close, ending)
            if self.companion is not None:
                stack.callback(self.companion.close)
