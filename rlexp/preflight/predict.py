"""Predict a run of many layers from rehearsals of a few."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlexp.base.engine_facts import ENGINES
from rlexp.config.checks.micro_batches import fullest_micro_batch, micro_batches
from rlexp.config.schema import Config, Device
from rlexp.preflight.align import Growth, Line, NotAlikeError, grown, grown_like, growth_of
from rlexp.preflight.children import Calls
from rlexp.preflight.communicators import RankGroup, beside
from rlexp.preflight.host import Held, HostBytes, host_of
from rlexp.preflight.rehearsal import memo
from rlexp.preflight.rehearsal.layers import FEWEST, cycle_of
from rlexp.preflight.rehearsal.log import COLLECT, STORAGE_KINDS, VLLM, Counts, Log, Pass, passes, peak_of
from rlexp.preflight.rehearsal.rates import Rates
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan, rehearse
from rlexp.preflight.vllm import VllmShare, share_of

# Layers from which on each adds the same to every peak, even where its work is in another order, and peaks go on along
# straight lines. ZeRO-3 gathers up to three layers ahead.
STEADY, STEADY_ZERO3 = 3, 5


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
    build_alone: bool = False  # the steps were not rehearsed: the build needs more than there is
    rank: int = 0
    groups: Mapping[str, RankGroup] = field(default_factory=dict)  # of ranks, over which the device's messages go
    host: HostBytes | None = None  # what one machine holds in the host's memory; None where only a build was rehearsed
    vllm: VllmShare | None = None  # where vLLM draws the samples, beside the ranks that train

    def fits(self, limit: float) -> bool:
        """Say whether the run has room on its devices, with so many bytes for each rank, and in its machines."""
        return self.fits_devices(limit) and self.short is None

    def fits_devices(self, limit: float) -> bool:
        return self.peak.bytes <= limit and (self.vllm is None or self.vllm.suffices)

    @property
    def short(self) -> HostBytes | None:
        """The machine, where it has less memory than the run needs there."""
        return None if self.host is None or self.host.fits else self.host

    @cached_property
    def peaks(self) -> dict[str, Peak]:
        """The peak of each phase."""
        highest: dict[str, Peak] = {}
        live = dict.fromkeys(STORAGE_KINDS, 0)
        for each in self.passes:
            at = Peak(each.phase, {kind: live[kind] + each.highest[kind] for kind in STORAGE_KINDS})
            if self.vllm is not None:
                at.by_kind[VLLM] = 0 if self.vllm.sleeps and each.phase != "rollout" else self.vllm.holds.bytes
            if each.phase not in highest or at.bytes > highest[each.phase].bytes:
                highest[each.phase] = at
            live = {kind: live[kind] + each.net[kind] for kind in STORAGE_KINDS}
        return highest

    def _first(self) -> list[bool]:
        """Say which passes are of the first micro-batch, and so stand for those that are not rehearsed."""
        phases = [*(each.phase for each in self.passes), "forward", "backward", ""]
        begin, backward = phases.index("forward"), phases.index("backward")
        end = next(at for at in range(backward, len(phases)) if phases[at] != "backward")
        return [begin <= at < end for at in range(len(self.passes))]

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)

    @property
    def beside_vllm(self) -> Peak:
        """What the rank itself holds at most while vLLM holds its share."""
        held = [each for each in self.peaks.values() if each.by_kind[VLLM]]
        most = max(held, key=lambda peak: peak.bytes)
        return Peak(most.phase, most.by_kind | {VLLM: 0})

    @property
    def refused(self) -> str | None:
        """Why vLLM and training do not both fit; None if they do, or if vLLM draws nothing."""
        if self.vllm is None:
            return None
        return self.vllm.refused(self.beside_vllm.bytes, self.beside_vllm.phase)

    def with_share(self) -> Prediction:
        """Return the prediction with the share that rollout.vllm_memory=auto takes: until then, vLLM has the least."""
        if self.vllm is None or self.build_alone:
            return self
        return dataclasses.replace(self, vllm=self.vllm.given(self.beside_vllm.bytes))

    def counts(self, *phases: str) -> Counts:
        """Add up the counts of these phases, or of all phases of the step."""
        total = Counts()
        for each, first in zip(self.passes, self._first(), strict=True):
            if each.phase in phases or (not phases and each.phase not in ("build", "export")):
                more = self.grad_acc - 1 if first and self.grad_acc > 1 else 1
                total += each.counts.times(self.grad_acc / 2 if each.phase == COLLECT else more)
        return total.rounded()

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step: the host waits for the device between these parts of it, and within none."""
        phases = {each.phase for each in self.passes} - {"build", "export"}
        apart = [phase for phase in ("rollout", "score", COLLECT, "optimizer") if phase in phases]
        parts = [(phase,) for phase in apart] + [tuple(phases.difference(apart))]
        drawn = self.vllm.given(self.beside_vllm.bytes).seconds if self.vllm is not None else 0.0
        return sum(self.counts(*part).took for part in parts if part) + drawn


@dataclass(frozen=True)
class Grows:
    """What more layers add to the log of a few."""

    layers: int  # of the larger log that was compared
    period: int  # layers after which they are alike again
    growth: Sequence[Growth | Line]
    held: Held = field(default_factory=Held)  # of all layers, in the host's memory

    def times(self, model: Any) -> int:
        return (int(model.num_hidden_layers) - self.layers) // self.period


@dataclass(frozen=True)
class Found:
    """A prediction, and what it was told from."""

    prediction: Prediction
    grows: Grows | None  # None where all layers were rehearsed
    log: Log  # of fewest layers


def predict(
    cfg: Config, model: Any, rank: int | None = None, known: Grows | None = None, limit: float = math.inf,
    answers: int | None = None,
) -> Calls[Found]:  # fmt: skip
    """Rehearse a few layers, and tell all others from them, or all layers if they differ.

    `rank` is the one that holds most if it is not given, and `known` says how many layers were enough at another
    length. Where all layers must be rehearsed, a build that needs more bytes than `limit` is enough. `answers` are the
    tokens of each answer of pairs that share their prompt; None: nothing is shared.
    """
    ranks = fullest(cfg) if rank is None else [rank]
    layers = int(model.num_hidden_layers)
    cycle, zero3 = cycle_of(model), cfg.engine.name.value == "zero3"
    steady = STEADY_ZERO3 if zero3 else STEADY
    fewest = steady if zero3 or (known is not None and known.layers - cycle.lead > steady) else FEWEST
    logs: dict[int, Log] = {}
    for few in cycle.few(layers, fewest) if alike(cfg) else ():
        counts = [each for each in (few, few + cycle.period) if each not in logs]
        more = yield from rehearsals(plan_of(cfg, model, ranks[0], each, answers) for each in counts)
        logs |= dict(zip(counts, more, strict=True))
        with contextlib.suppress(NotAlikeError):
            growth = growth_of(logs[few], logs[few + cycle.period], lines=few - cycle.lead >= steady)
            grows = Grows(few + cycle.period, cycle.period, growth)
            held = logs[few].held.grown(logs[few + cycle.period].held, grows.times(model))
            grows = dataclasses.replace(grows, held=held)
            again = None if cfg.loss.draws else grows  # a layer's cache grows with the length
            return prediction_of(cfg, model, ranks[0], grown(growth, grows.times(model)), logs[few], again, held)
    plans = [dataclasses.replace(plan_of(cfg, model, each, None, answers), limit=limit) for each in ranks]
    whole = yield from rehearsals(plans)
    log, rank = max(zip(whole, ranks, strict=True), key=lambda each: (each[0].build_alone, peak_of(each[0])))
    return prediction_of(cfg, model, rank, passes(log), log, None, log.held)


def prediction_of(
    cfg: Config, model: Any, rank: int, passed: Sequence[Pass], log: Log, grows: Grows | None, held: Held
) -> Found:
    """Return the prediction of these passes, with the groups of the log, and what a machine holds, of which a rank
    holds so much in the host's memory."""
    layers, vllm = int(model.num_hidden_layers), share_of(cfg, model)
    prediction = Prediction(passed, layers, micro_batches(cfg), log.build_alone, rank, vllm=vllm)
    if not log.build_alone:
        nccl = beside(cfg, log.groups)
        vllm = vllm and dataclasses.replace(vllm, kept=max(nccl.bytes - nccl.reserve, 0))
        host = host_of(cfg, held, prediction.peak.bytes)
        prediction = dataclasses.replace(prediction, host=host, groups=log.groups, vllm=vllm)
    return Found(prediction, grows, log)


def fullest(cfg: Config) -> list[int]:
    """Return the ranks of which one holds most: with ZeRO-1 and ZeRO-2 one of the last two. They keep the gradients of
    the last layers and of the head, which come first, when the most activations are held. Else all hold the same.

    Where there are few layers, another rank may hold more: 2 % were seen with two.
    """
    last = cfg.parallel.world_size - 1
    return [last, last - 1] if last and ENGINES[cfg.engine.name.value].stage in (1, 2) else [0]


def predict_fuller(
    cfg: Config, model: Any, first: int, known: Grows | None, limit: float, answers: int | None = None
) -> Calls[Found]:
    """Predict the rank that holds most, or one that holds more bytes than `limit`, and `first` before the others: which
    one it is may change with the length."""
    fuller: Found | None = None
    for rank in sorted(fullest(cfg), key=lambda rank: rank != first):
        outcome = yield from predict(cfg, model, rank, known, answers=answers)
        if fuller is None or outcome.prediction.peak.bytes > fuller.prediction.peak.bytes:
            fuller = outcome
        if outcome.prediction.peak.bytes > limit:
            break
    assert fuller is not None
    return fuller


def alike(cfg: Config) -> bool:
    """Say whether the engine does the same for each layer: whether it gathers and shards them one by one.

    With ZeRO-1 and ZeRO-2 a rank has one stretch of all parameters, which is a part of the embedding where there are
    few layers, and the embedding with some layers where there are many. Replicated engines reduce buckets that begin in
    one layer and end in another, and so do buckets of the user's own size.
    """
    return ENGINES[cfg.engine.name.value].sharded and not cfg.engine.overrides


def predict_again(cfg: Config, model: Any, before: Found, limit: float, answers: int | None = None) -> Calls[Found]:
    """Predict the same run at another length, from one rehearsal where that is enough. Of ranks that differ, one that
    holds more bytes than `limit` is enough."""
    grows, rank = before.grows, before.prediction.rank
    if grows is not None and not any(isinstance(each, Line) for each in grows.growth):
        (log,) = yield from rehearsals([plan_of(cfg, model, rank, grows.layers, answers)])
        with contextlib.suppress(NotAlikeError):
            passed = grown_like(log, grows.growth, grows.times(model))
            return prediction_of(cfg, model, rank, passed, log, grows, grows.held)
    return (yield from predict_fuller(cfg, model, rank, grows, limit, answers))


def rehearsals(plans: Iterable[RehearsalPlan]) -> Calls[Sequence[Log]]:
    """Rehearse in processes of their own, which are forked with what others learned."""
    logs: Sequence[Log] = yield [(rehearse, (plan,)) for plan in plans]
    for log in logs:
        memo.KNOWN.update(log.learned)
        log.learned.clear()
    return logs


def plan_of(cfg: Config, model: Any, rank: int, layers: int | None, answers: int | None = None) -> RehearsalPlan:
    alike = min(micro_batches(cfg), 2)
    batch = alike * len(fullest_micro_batch(cfg)) * cfg.parallel.dp_size
    few = dataclasses.replace(cfg.train, batch_size=batch, grad_acc=cfg.train.grad_acc and alike)
    return RehearsalPlan(
        dataclasses.replace(cfg, train=few), model, rank, layers, gpu=cfg.launch.device is not Device.cpu,
        rates=Rates.of(cfg, cfg.parallel.ring_size), answers=answers,
    )  # fmt: skip
