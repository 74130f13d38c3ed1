"""The terminal: one progress bar, or a line now and then if the output is not a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rlexp.base.printable import printable_lines
from rlexp.launch.rank_progress import seconds_in_step, within_step
from rlexp.run_files.curve_distance import SCORE
from rlexp.training.sinks import legible
from rlexp.training.sinks.base import Ending, RolloutFacts, Sink

if TYPE_CHECKING:  # importing it would import torch, which readers do without
    from rlexp.run_files.metrics_jsonl import MetricRow

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
        self.said = 0.0  # when a line said how far a step is
        self.score: float | None = None  # of the last rollout: only the row of its first step has it
        self.bar = (
            tqdm(total=total_steps, initial=first_step - 1, unit="step", dynamic_ncols=True, smoothing=0.1)
            if sys.stderr.isatty()
            else None
        )

    def log(self, row: MetricRow) -> None:
        if row["step"] == 0:
            self._before_training(row)
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
            return
        step = int(row["step"])
        if step == self.first_step or step == self.total_steps or step % max(1, self.total_steps // LINES) == 0:
            seconds = time.monotonic() - self.started
            left = seconds / (step - self.first_step + 1) * (self.total_steps - step)
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            say(f"step {step}/{self.total_steps}  {values}  {left:.0f} s left\n")

    def within_step(self, facts: Mapping[str, Any]) -> None:
        now = time.time()
        seconds = seconds_in_step(facts, now)
        if self.bar is None:
            if seconds >= SAID and now - self.said >= SAID:
                self.said = now
                say(f"step {facts['step']}/{self.total_steps}  {within_step(facts, now)}\n")
            return
        with contextlib.suppress(OSError):
            self.bar.set_description_str(within_step(facts, now) if seconds >= SHOWN else None)

    def _before_training(self, row: MetricRow) -> None:
        values = "  ".join(f"{name} {row[name]:.4f}" for name in ("eval/loss", "eval/objective/scores") if name in row)
        self._write(f"before training  {values}")

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
        if self.bar is not None:
            self.bar.close()
