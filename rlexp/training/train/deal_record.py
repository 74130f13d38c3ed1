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
from rlexp.training.train.task import MicroBatch, Step, Watch
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
        self.packed: dict[int, RankDeal] = {}  # this rank's part of packs, by the micro-batch
        self.dealt: list[RankDeal] = []  # of those that are trained on

    def loaded(self, step: Step, batch: Any, pack: Pack) -> None:
        if step.batch.step != self.due:
            return
        run, layout, ring = self.run, self.run.layout, self.run.world.ring
        if self.computing is None:
            self.computing = Computing(run.device, ring.traffic)
        dealt = layout.deal(pack.segments, ring.size)
        assert dealt is not None
        assert layout.costs is not None
        parts = [SequencePart(*each) for each in held_by(ring.rank, dealt, pack.segments, layout.costs)]
        self.packed[id(batch)] = RankDeal(dealt.work[ring.rank], dealt.sending[ring.rank], None, parts)

    def handed(self, batch: MicroBatch, loss: Any, last: bool) -> None:  # noqa: ARG002
        if self.computing is not None:
            self.dealt.append(self.packed[id(batch)])

    def differentiated(self, step: Step) -> None:
        if self.computing is None:
            return
        self.computing.stop()
        work, sending = sum(each.work for each in self.dealt), sum(each.sending for each in self.dealt)
        parts = fewer([*chain.from_iterable(each.parts for each in self.dealt)])
        own = RankDeal(work, sending, self.computing.seconds(), parts)
        self.computing, self.due = None, None
        ranks = gather_objects(own, self.run.world.size)
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
