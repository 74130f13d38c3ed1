"""Decide when to save, which checkpoints to keep, and when the ranks stop."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlexp.base.errors import CheckpointError, ConfigError
from rlexp.config.schema import Best, CheckpointConfig
from rlexp.config.schema.cadence import save_cadence
from rlexp.launch import stops, watch
from rlexp.run_files import checkpoint_folder
from rlexp.run_files.metrics_jsonl import MetricRow
from rlexp.training.checkpoint.saver import Describe, Saver
from rlexp.training.world.groups import World
from rlexp.training.world.objects import from_rank0

SCORE = "score"  # key in a checkpoint's position: its value of `checkpoint.best_metric`


@dataclass
class Keeper:
    """Every rank must call the same methods after the same steps."""

    cfg: CheckpointConfig
    saver: Saver
    world: World
    device: torch.device
    run_dir: Path
    describe: Callable[[int, dict[str, float]], Describe]
    say: Callable[[str], None]
    saved: Callable[[int, Path], None]
    steps_per_epoch: int
    saved_step: int
    within: Callable[[str], contextlib.AbstractContextManager[None]]  # says that a rank is about to save
    failed: str | None = None  # why the last save failed, if it did

    def __post_init__(self) -> None:
        self._every, self._since = save_cadence(self.cfg.save_every), time.monotonic()
        self._prepared = False
        self._scores = self._agreed_scores()
        self._pruning: threading.Thread | None = None

    def after_step(self, row: MetricRow) -> signal.Signals | None:
        """Save where a save is due. Return the signal by which all ranks now stop, if any rank was asked to."""
        step, score = int(row["step"]), self._score(row)
        stop, clock, writing = self._agree()
        if not self._prepared and self.cfg.save_every is not None:
            self.saver.prepare()
        self._prepared = True
        if not writing:
            self.settle()
        if self._every.due(step, self.steps_per_epoch) or clock or self._is_best(score):
            self._save(step, score)
        return signal.Signals(stop) if stop else None

    def close(self, row: MetricRow | None) -> None:
        """End the run with its last row, or None without one: save if configured, and wait for the save."""
        self.settle()
        for _ in range(2):  # a second try, since it is the last chance
            if row is not None and self.cfg.on_exit and (self.failed or row["step"] != self.saved_step):
                self._save(int(row["step"]), self._score(row))
                self.settle()
        self._pruned()

    def _score(self, row: MetricRow) -> float | None:
        """Return by what a checkpoint is kept. An unknown metric is refused at the first step that should have it."""
        if not self.cfg.keep_best:
            return None
        name = self.cfg.best_metric
        family = f"{name.partition('/')[0]}/"
        siblings = [each for each in row if each.startswith(family)]
        if name not in row and (siblings or family != "eval/"):
            raise ConfigError(
                f"checkpoint.best_metric={name}: there is no such metric. There are {', '.join(siblings or row)}."
            )
        return row.get(name)

    def _agree(self) -> tuple[int, bool, bool]:
        """Agree, in one reduction a step, on any rank's signal, rank 0's clock, and whether any rank still writes."""
        asked = stops.asked()
        every = self._every.seconds
        due = every is not None and time.monotonic() - self._since >= every
        own_wishes = [float(asked or 0), float(due and self.world.rank == 0), float(self.saver.writing)]
        wishes = torch.tensor(own_wishes, device=self.device)
        if self.world.size > 1:
            dist.all_reduce(wishes, op=dist.ReduceOp.MAX)
        stop, clock, writing = wishes.tolist()
        return int(stop), bool(clock), bool(writing)

    def _save(self, step: int, score: float | None) -> None:
        if step == self.saved_step and not self.failed:
            return
        self.settle()  # a second save waits for the first
        scored = {} if score is None else {self.cfg.best_metric: score}
        with self.within("save"):
            self.saver.begin(step, self.describe(step, scored))
        self._since, self.saved_step = time.monotonic(), step
        if score is not None:
            self._scores[step] = score

    def settle(self) -> None:
        if not self.saver.pending:
            return
        with self.within("save"):
            self.failed = self.saver.settle()
        if self.failed:
            self._scores.pop(self.saved_step, None)
            if self.world.rank == 0:
                self.say(
                    f"rlexp: the checkpoint of step {self.saved_step} could not be saved ({self.failed}). "
                    f"Training continues, and saves again when the next save is due. {self._room()}\n"
                )
        elif self.world.rank == 0:
            self.saved(self.saved_step, checkpoint_folder.folder_of(self.run_dir, self.saved_step))
            self._pruned()
            best, checkpoints = self._best(), checkpoint_folder.latest_first(self.run_dir)
            doomed = [path for path in checkpoints[self.cfg.keep_last :] if checkpoint_folder.step_of(path) not in best]
            self._pruning = threading.Thread(target=_discard, args=(doomed,), daemon=True)
            self._pruning.start()

    def _pruned(self) -> None:
        if self._pruning is not None:
            with watch.elsewhere():
                self._pruning.join()

    def _room(self) -> str:
        whole = checkpoint_folder.latest_first(self.run_dir)
        return f"The run can resume from {whole[0].name}." if whole else "There is no checkpoint to resume from yet."

    def _best(self) -> list[int]:
        """Return the steps of the best checkpoints. Among equals, the earlier wins."""
        sign = -1 if self.cfg.best is Best.max else 1
        return sorted(self._scores, key=lambda step: (sign * self._scores[step], step))[: self.cfg.keep_best]

    def _is_best(self, score: float | None) -> bool:
        if score is None or not math.isfinite(score):
            return False
        best = self._best()
        if len(best) < self.cfg.keep_best:
            return True
        worst = self._scores[best[-1]]
        return score > worst if self.cfg.best is Best.max else score < worst

    def _agreed_scores(self) -> dict[int, float]:
        """Return the scores of the existing checkpoints, as rank 0 reads them."""
        scores: dict[int, float] = {}
        if self.world.rank == 0 and self.cfg.keep_best:
            for path in checkpoint_folder.latest_first(self.run_dir):
                with contextlib.suppress(CheckpointError):  # a damaged checkpoint has no score
                    score = checkpoint_folder.read_position(path).get(SCORE) or {}
                    if self.cfg.best_metric in score:
                        scores[checkpoint_folder.step_of(path)] = score[self.cfg.best_metric]
        return from_rank0(scores, self.world.size)


def _discard(doomed: list[Path]) -> None:
    for path in doomed:
        with contextlib.suppress(OSError):
            checkpoint_folder.discard(path)
