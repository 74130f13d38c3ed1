"""The terminal: one progress bar, or a line now and then if the output is not a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tqdm import tqdm

from rlexp.base.printable import printable_lines
from rlexp.launch.rank_progress import seconds_in_step, within_step
from rlexp.run_files import evaluations
from rlexp.run_files.curve_distance import SCORE
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.sinks import legible
from rlexp.training.sinks.base import Ending, RolloutFacts, Sink

LINES = 10  # per run, where there is no terminal
SHOWN, SAID = 5.0, 30.0  # seconds of a step after which it is shown in a terminal how far it is, and said elsewhere


def say(text: str) -> None:
    """Write to standard error. A closed pipe must not end a training run."""
    with contextlib.suppress(OSError):
        sys.stderr.write(printable_lines(text))
        sys.stderr.flush()


class ConsoleSink(Sink):
    def __init__(self, total_steps: int, *, first_step: int = 1) -> None:
        self.total_steps = total_steps
        self.started = time.monotonic()
        self.first_step = first_step
        self.last_line_at = 0.0  # when a line said how far a step is
        self.score: float | None = None  # of the last rollout: only the row of its first step has it
        self.is_terminal = sys.stderr.isatty()

    @cached_property
    def bar(self) -> tqdm[Any] | None:
        """The progress bar, drawn on its first use: below the run's header."""
        if not self.is_terminal:
            return None
        first = self.first_step - 1
        return tqdm(total=self.total_steps, initial=first, unit="step", dynamic_ncols=True, smoothing=0.1)

    def log(self, row: MetricRow) -> None:
        if row["step"] == 0:
            self._evaluated("before training", row)
            return
        shown = {"loss": f"{row['train/loss']:.4f}"}
        self.score = row.get(SCORE, self.score)
        if self.score is not None:
            shown["score"] = f"{self.score:.3f}"
        if "train/rewards/accuracies" in row:
            shown["acc"] = f"{row['train/rewards/accuracies']:.2f}"
        shown["tok/s"] = f"{row['train/tokens_per_second']:,.0f}"
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.set_postfix(shown, refresh=False)
                self.bar.update(1)
        else:
            self._step(int(row["step"]), shown)
        self._evaluated(f"step {row['step']}/{self.total_steps}", row)

    def _step(self, step: int, shown: Mapping[str, str]) -> None:
        """Print a line for some of the steps."""
        if step == self.first_step or step == self.total_steps or step % max(1, self.total_steps // LINES) == 0:
            seconds = time.monotonic() - self.started
            left = seconds / (step - self.first_step + 1) * (self.total_steps - step)
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            say(f"step {step}/{self.total_steps}  {values}  {left:.0f} s left\n")

    def within_step(self, facts: Mapping[str, Any]) -> None:
        now = time.time()
        seconds = seconds_in_step(facts, now)
        if self.bar is None:
            if seconds >= SAID and now - self.last_line_at >= SAID:
                self.last_line_at = now
                say(f"step {facts['step']}/{self.total_steps}  {within_step(facts, now)}\n")
            return
        text = within_step(facts, now) if seconds >= SHOWN else ""
        if text != self.bar.desc:
            with contextlib.suppress(OSError):
                self.bar.set_description_str(text)

    def _evaluated(self, when: str, row: MetricRow) -> None:
        if values := evaluations.in_words(row):
            self._write(f"{when}  held-out rows: {values}")

    def _write(self, text: str) -> None:
        if self.bar is None:
            say(f"{text}\n")
            return
        with contextlib.suppress(OSError):
            self.bar.write(text, file=sys.stderr)  # above the bar

    def rollout(self, facts: RolloutFacts) -> None:
        if not facts.shown:
            return
        self._write("\n".join(legible.lines(facts, shutil.get_terminal_size().columns)))

    def close(self, ending: Ending) -> None:  # noqa: ARG002
        if "bar" in self.__dict__ and self.bar is not None:
            self.bar.close()
