"""Predict a run of many layers from rehearsals of a few."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlexp.config.schema import Config, Device
from rlexp.rehearse.children import Calls
from rlexp.rehearse.log import KINDS, Counts, Log, NotAlikeError, Pass, passes
from rlexp.rehearse.rates import Rates
from rlexp.rehearse.run import Plan, rehearse

FEWEST = 3  # layers of the smaller rehearsal; the larger has one more, and two layers between its ends can be compared
GIB = 1 << 30


@dataclass(frozen=True)
class Peak:
    """The largest sum of a phase, or of all."""

    phase: str
    by_kind: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True)
class Prediction:
    """What one rank does in a step, phase by phase."""

    passes: Sequence[Pass]
    layers: int
    grad_acc: int  # micro-batches of a step; two are rehearsed

    @cached_property
    def peaks(self) -> dict[str, Peak]:
        """The peak of each phase."""
        highest: dict[str, Peak] = {}
        live = dict.fromkeys(KINDS, 0)
        for each in self.passes:
            at = Peak(each.phase, {kind: live[kind] + each.highest[kind] for kind in KINDS})
            if each.phase not in highest or at.bytes > highest[each.phase].bytes:
                highest[each.phase] = at
            live = {kind: live[kind] + each.net[kind] for kind in KINDS}
        return highest

    def _first(self) -> list[bool]:
        """Say which passes are of the first micro-batch, and so stand for those that are not rehearsed."""
        phases = [each.phase for each in self.passes]
        begin = phases.index("forward") if "forward" in phases else len(phases)
        backward = phases.index("backward") if "backward" in phases else len(phases)
        end = next((at for at in range(backward, len(phases)) if phases[at] != "backward"), len(phases))
        return [begin <= at < end for at in range(len(phases))]

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)

    def counts(self, *phases: str) -> Counts:
        """Add up the counts of these phases, or of all phases of the step."""
        total = Counts()
        for each, first in zip(self.passes, self._first(), strict=True):
            if each.phase in phases or (not phases and each.phase not in ("build", "export")):
                total += each.counts.times(self.grad_acc - 1 if first and self.grad_acc > 1 else 1)
        return total


@dataclass(frozen=True)
class Slopes:
    """What one layer more adds to each part of a log that does not consist of layers: whatever the length."""

    parts: Sequence[Pass]
    few: int  # layers of the smaller rehearsal


def predict(cfg: Config, model: Any, rank: int = 0) -> Calls:
    """Rehearse a few layers, and tell all others from them. Layers that differ are all rehearsed.

    A task of `children.at_once`; the result is a prediction, the slopes (None where there are none), and the log of the
    fewest layers.
    """
    layers = int(model.num_hidden_layers)
    few = FEWEST
    while few < layers - 1:
        plan = plan_of(cfg, model, rank, few)
        logs = yield [(rehearse, (plan,)), (rehearse, (dataclasses.replace(plan, layers=few + 1),))]
        try:
            slopes = _slopes(logs[0], logs[1], few)
            return _stretched(logs[1], slopes, layers - few - 1, cfg), slopes, logs[0]
        except NotAlikeError:
            few *= 2
    (log,) = yield [(rehearse, (plan_of(cfg, model, rank, None),))]
    return Prediction(passes(log), layers, cfg.train.grad_acc), None, log


def predict_again(cfg: Config, model: Any, slopes: Slopes | None) -> Calls:
    """Predict the same run at another length, from one rehearsal where that is enough."""
    if slopes is not None:
        (log,) = yield [(rehearse, (plan_of(cfg, model, 0, slopes.few + 1),))]
        with contextlib.suppress(NotAlikeError):
            return _stretched(log, slopes, int(model.num_hidden_layers) - slopes.few - 1, cfg)
    prediction, *_ = yield from predict(cfg, model)
    return prediction


def plan_of(cfg: Config, model: Any, rank: int, layers: int | None) -> Plan:
    micro_batches = min(cfg.train.grad_acc, 2)
    batch = micro_batches * cfg.train.micro_batch_size * cfg.parallel.dp_size
    few = dataclasses.replace(cfg.train, batch_size=batch, grad_acc=micro_batches)
    return Plan(
        dataclasses.replace(cfg, train=few), model, rank, layers, gpu=cfg.launch.device is not Device.cpu,
        rates=Rates.of(cfg, cfg.parallel.ring_size),
    )  # fmt: skip


def _slopes(smaller: Log, larger: Log, few: int) -> Slopes:
    one, other = passes(smaller), passes(larger)
    if [each.phase for each in one] != [each.phase for each in other]:
        raise NotAlikeError("the phases")
    return Slopes([_difference(*pair) for pair in zip(one, other, strict=True)], few)


def _stretched(log: Log, slopes: Slopes, extra: int, cfg: Config) -> Prediction:
    parts, stretched = passes(log), passes(log, extra)
    if len(parts) != len(slopes.parts):
        raise NotAlikeError("another number of micro-batches")
    return Prediction(
        [
            whole if whole.layers else _further(part, slope, extra)
            for part, slope, whole in zip(parts, slopes.parts, stretched, strict=True)
        ],
        log.layers + extra,
        cfg.train.grad_acc,
    )


def _difference(one: Pass, other: Pass) -> Pass:
    def apart(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        return {kind: b[kind] - a[kind] for kind in KINDS}

    return Pass(other.phase, apart(one.highest, other.highest), apart(one.net, other.net), other.counts - one.counts)


def _further(part: Pass, slope: Pass, extra: int) -> Pass:
    """Go on by so many layers from a part."""

    def further(start: dict[str, int], each: dict[str, int]) -> dict[str, int]:
        return {kind: start[kind] + extra * each[kind] for kind in KINDS}

    counts = part.counts + slope.counts.times(extra)
    return Pass(part.phase, further(part.highest, slope.highest), further(part.net, slope.net), counts)
