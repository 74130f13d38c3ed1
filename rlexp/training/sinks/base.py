"""The interface of a sink."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlexp.run_files.metrics_jsonl import MetricRow


@dataclass(frozen=True)
class Shown:
    prompt: str
    answer: str
    score: float
    terms: Mapping[str, float]  # the terms of the score, by reward
    length: int  # of the answer, in tokens
    stopped: bool  # the answer ended by itself


@dataclass(frozen=True)
class RolloutFacts:
    """One rollout. A sample's place is its prompt's place × n_samples + its number."""

    rollout: int
    step: int  # the first optimizer step on it
    n_samples: int  # per prompt
    prompts: Sequence[int]  # indices in the data set, by place
    digests: Sequence[Sequence[int]]  # digests of all answers, by place (run_files/rollouts_jsonl.py)
    shown: Sequence[Shown] = ()  # empty where no table of samples is due
    spans: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)  # start and end of each stage


@dataclass(frozen=True)
class Ending:
    """How a process ended. `facts` holds where a run ran out of memory, and its peaks."""

    exit_code: int = 0  # 0: it ended well; 128 + signal: it was stopped
    reason: str = ""
    facts: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return 0 < self.exit_code <= 128


class Sink:
    """A sink defines the methods that concern it."""

    def log(self, row: MetricRow) -> None:
        """Take the row of one optimizer step. Its first key is `step`."""

    def within_step(self, facts: Mapping[str, Any]) -> None:
        """Learn that another phase of a step begins, and how far the step has come (launch/rank_progress.py)."""

    def rollout(self, facts: RolloutFacts) -> None:
        """Take a rollout when its samples are scored, some steps before the row of `facts.step` or with it."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """Learn that a checkpoint is complete, under its final name."""

    def close(self, ending: Ending) -> None:
        """Close. This is the last call, however the process ends."""


class Companion(Protocol):
    """Something that adds values to a row before any sink gets it."""

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

    def within_step(self, facts: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.within_step(facts)

    def rollout(self, facts: RolloutFacts) -> None:
        for sink in self.sinks:
            sink.rollout(facts)

    def saved(self, step: int, checkpoint: Path) -> None:
        for sink in self.sinks:
            sink.saved(step, checkpoint)

    def close(self, ending: Ending) -> None:
        """Close every sink, even when closing another one fails."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close, ending)
            if self.companion is not None:
                stack.callback(self.companion.close)
