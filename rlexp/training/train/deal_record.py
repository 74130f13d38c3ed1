"""Write down one step's deal for the report: what each rank was dealt, and how long it computed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from rlexp.run_files import deal_json
from rlexp.run_files.deal_json import DEAL, RankDeal, SequencePart, StepDeal
from rlexp.training.metrics.meter import Computing
from rlexp.training.ring.widths import held_by
from rlexp.training.train.parts import TrainingRun
from rlexp.training.train.task import Step, Watch
from rlexp.training.types import Pack
from rlexp.training.world.objects import gather_objects

SECOND = 2  # the step, of those that a process takes: in its first one, things are made that are kept
DRAWN = 100  # parts of a rank that are written down one by one


class DealRecord(Watch):
    """Looks on at a step until its gradient is whole."""

    def __init__(self, run: TrainingRun, run_dir: Path, after: int, last: int) -> None:
        """`after` is the step after which training begins, `last` the one after which it ends."""
        self.run, self.run_dir = run, run_dir
        self.due = min(after + SECOND, last) if run.layout.costs is not None and run.world.ring.size > 1 else None
        self.computing: Computing | None = None
        self.dealt: list[RankDeal] = []  # this rank's part of each pack
        if run.world.rank == 0:
            (run_dir / DEAL).unlink(missing_ok=True)  # of another layout, or of steps that are taken again

    def prepared(self, step: Step) -> None:
        if step.batch.step == self.due:
            self.computing = Computing(self.run.device, self.run.world.ring.traffic)

    def loaded(self, step: Step, batch: Any, pack: Pack) -> None:  # noqa: ARG002
        layout, ring = self.run.layout, self.run.world.ring
        if self.computing is None or (dealt := layout.deal(pack.segments, ring.size)) is None or layout.costs is None:
            return
        parts = [SequencePart(*each) for each in held_by(ring.rank, dealt, pack.segments, layout.costs)]
        self.dealt.append(RankDeal(dealt.work[ring.rank], dealt.sending[ring.rank], None, parts))

    def handed(self, batch: Any, loss: Any, last: bool) -> None:  # noqa: ARG002
        """On a GPU, waiting takes time, and in the last backward pass all ranks wait for each other."""
        if self.computing is not None and last and self.run.device.type == "cuda":
            self.computing.stop()

    def differentiated(self, step: Step) -> None:
        if self.computing is None:
            return
        self.computing.stop()
        joined = self.run.device.type == "cuda" and self.run.engine.sharded  # each layer's weights come from all ranks
        seconds = None if joined else self.computing.seconds()
        work, sending = sum(each.work for each in self.dealt), sum(each.sending for each in self.dealt)
        parts = fewer([*chain.from_iterable(each.parts for each in self.dealt)])
        self.computing, self.due, self.dealt = None, None, []
        ranks = gather_objects(RankDeal(work, sending, seconds, parts), self.run.world.size)
        if self.run.world.rank == 0:
            deal_json.write(self.run_dir / DEAL, StepDeal(step.batch.step, ranks))


def fewer(parts: list[SequencePart]) -> list[SequencePart]:
    """Return the heaviest parts, and the others together by their width."""
    parts = sorted(parts, key=lambda part: -part.work)
    others: dict[int, SequencePart] = {}
    for width, tokens, work in parts[DRAWN:]:
        before = others.get(width, SequencePart(width, 0, 0.0))
        others[width] = SequencePart(width, before.tokens + tokens, before.work + work)
    return [*parts[:DRAWN], *(others[width] for width in sorted(others))]
