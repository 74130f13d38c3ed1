"""What a rank did, operator by operator: storages made and freed, and counts by phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlexp.preflight.communicators import RankGroup
from rlexp.preflight.host import Held
from rlexp.preflight.rehearsal.rates import Attending, DeviceClock

Array = npt.NDArray[np.int64]

WEIGHTS, GRADIENTS, OPTIMIZER, REFERENCE = "weights", "gradients", "optimizer state", "reference"
ACTIVATIONS, BUFFERS, TEMPORARIES = "saved activations", "communication buffers", "temporaries"
CACHE = "cache of keys and values"
VLLM = "vLLM"  # all that it holds: none of it is rehearsed
STORAGE_KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, REFERENCE, ACTIVATIONS, CACHE, TEMPORARIES, BUFFERS, VLLM)
COLLECT = "collect"  # the phase in which a loss of the whole batch is given its values, once for all micro-batches


@dataclass
class Counts:
    """Counts of one phase on one rank."""

    flops: int = 0  # of matrix products and attention
    bytes: int = 0
    launches: int = 0
    sent: Counter[str] = field(default_factory=Counter)  # bytes, by collective
    syncs: Counter[str] = field(default_factory=Counter)  # by place in the code and what it waits for
    seconds: float = 0.0  # estimated: of computing
    launching: float = 0.0  # estimated: of the host, which launches kernels ahead of the device
    waited: float = 0.0  # estimated: for bytes that had not arrived

    @property
    def took(self) -> float:
        """Estimated seconds of work in which the host never waits for the device: the device's, or the host's if it
        needs longer to launch it."""
        return max(self.seconds + self.waited, self.launching)

    def __add__(self, other: Counts) -> Counts:
        return self._with(other, 1)

    def times(self, factor: float) -> Counts:
        return Counts()._with(self, factor)

    def _with(self, other: Counts, factor: float) -> Counts:
        """Add a multiple of other counts."""
        sums = {each.name: _sum(getattr(self, each.name), getattr(other, each.name), factor) for each in fields(Counts)}
        return Counts(**sums)

    def rounded(self) -> Counts:
        """Return whole numbers again, after counts were multiplied by halves."""
        whole: dict[str, Any] = {name: round(getattr(self, name)) for name in ("flops", "bytes", "launches")}
        for name in ("sent", "syncs"):
            whole[name] = Counter({key: round(count) for key, count in getattr(self, name).items()})
        return replace(self, **whole)


def _sum(one: Any, other: Any, factor: float) -> Any:
    if isinstance(one, Counter):
        return Counter({key: one[key] + factor * other[key] for key in {*one, *other}})
    return one + factor * other


@dataclass(frozen=True)
class Section:
    """What happens from the begin of a phase to the next one's."""

    phase: str
    first: int  # its first event
    counts: Counts
    times: float = 1  # how often the run does the same: once, unless a rehearsal leaves repetitions out


@dataclass
class Log:
    """Events are changes of a storage's size. Sections follow each other; a new one begins with a phase."""

    device: str
    numbers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    clock: DeviceClock = field(default_factory=DeviceClock)
    kinds: dict[int, str] = field(default_factory=dict)  # of the storages that are known for what they are
    received: set[int] = field(default_factory=set)  # storages into which the model received what others sent
    modules: dict[int, str] = field(default_factory=dict)  # in whose forward pass a storage was made
    module: str = ""  # whose forward pass is under way
    attending: set[str] = field(default_factory=set)  # modules that called an attention kernel
    recomputed: list[tuple[int, int]] = field(default_factory=list)  # events of each recomputation of a layer
    phase: str = ""
    layers: int = 0  # of the model
    learned: dict[Any, Any] = field(default_factory=dict)  # of operators' results, for rehearsals to come
    build_alone: bool = False  # no steps were taken
    closed: bool = False  # what is freed at the end of a rehearsal is not part of it
    times: float = 1  # of the sections that begin from now on
    host_live: int = 0  # bytes of floating-point tensors of the host, where the device is another
    host_peak: int = 0  # since the build
    groups: dict[str, RankGroup] = field(default_factory=dict)  # over which the device's collectives go, by name
    held: Held = field(default_factory=Held)  # in the host's memory

    def __post_init__(self) -> None:
        self.enter("")

    def changed(self, number: int, device: str, size: int) -> None:
        if device != self.device and device == "cpu" and not self.closed:
            self.host_live += size
            self.host_peak = max(self.host_peak, self.host_live)
        if device == self.device and not self.closed:
            self.numbers.append(number)
            self.sizes.append(size)
            if self.module and number not in self.modules:
                self.modules[number] = self.module

    def passing(self, size: int) -> None:
        """Note memory that is taken and given back within one operator."""
        self.numbers += [-1, -1]
        self.sizes += [size, -size]

    @property
    def counts(self) -> Counts:
        return self.sections[-1].counts

    def enter(self, phase: str) -> None:
        if self.sections:
            self.counts.waited += self.clock.wait(self.clock.link_free)
        self.phase = phase
        self.sections.append(Section(phase, len(self.sizes), Counts(), self.times))

    def again(self, times: float | None = None) -> None:
        """Begin the phase anew: what follows are other layers, or the same ones another time."""
        self.times = self.times if times is None else times
        self.enter(self.phase)

    # ---- work ----

    def computed(self, flops: int, size: int) -> None:
        counts = self.counts
        counts.launches += 1
        counts.flops += flops
        counts.bytes += size
        counts.seconds += self.clock.operator(flops, size)
        counts.launching += self.clock.rates.launch

    def attended(self, flops: int, by: Attending | None = None) -> None:
        """Count the arithmetic of an attention kernel; its launch and its bytes are counted with its operator."""
        self.counts.flops += flops
        self.counts.seconds += self.clock.attending(flops, by)

    def leaving(self, size: int) -> float:
        return self.clock.send(size)

    def awaits(self) -> None:
        return

    def awaited(self, ticket: float) -> None:
        self.counts.waited += self.clock.wait(ticket)

    def label(self, number: int | None, kind: str) -> None:
        if number is not None:
            self.kinds.setdefault(number, kind)


@dataclass(frozen=True)
class Stretch:
    """The events of a phase from its begin to its end."""

    phase: str
    sizes: Array
    kinds: Array  # places in STORAGE_KINDS
    counts: Counts


@dataclass(frozen=True)
class Pass:
    """What a phase comes to. Bytes are by kind, relative to its begin."""

    phase: str
    highest: dict[str, int]  # where the sum is largest
    net: dict[str, int]  # at the end
    counts: Counts

    def plus(self, other: Pass, times: int) -> Pass:
        """Add a multiple of another pass."""
        highest, net = ({kind: ours[kind] + times * theirs[kind] for kind in STORAGE_KINDS}
                        for ours, theirs in ((self.highest, other.highest), (self.net, other.net)))  # fmt: skip
        return Pass(self.phase, highest, net, self.counts + other.counts.times(times))


def kinds_of(log: Log) -> list[str]:
    """Return the kind of each event's storage: as labelled, or else by when it was made and freed."""
    events = np.diff([*(section.first for section in log.sections), len(log.sizes)])
    phases = np.repeat([section.phase for section in log.sections], events)
    made: dict[int, str] = {}
    freed: dict[int, str] = {}
    held: defaultdict[int, int] = defaultdict(int)
    for number, size, phase in zip(log.numbers, log.sizes, phases, strict=True):
        made.setdefault(number, str(phase))
        held[number] += size
        if held[number] == 0:
            freed[number] = str(phase)
    kinds = {number: log.kinds.get(number) or _by_life(made[number], freed.get(number)) for number in made}
    for number in log.received:  # what is received and kept: for the backward pass, or as FSDP's gradients after it
        if kinds.get(number) == BUFFERS and (kept := _by_life(made[number], freed.get(number))) != TEMPORARIES:
            kinds[number] = kept
    kinds[-1] = TEMPORARIES
    return [kinds[number] for number in log.numbers]


def _by_life(made: str, freed: str | None) -> str:
    if freed is None:
        return {"build": OPTIMIZER, "optimizer": OPTIMIZER, "backward": GRADIENTS}.get(made, ACTIVATIONS)
    if made == "backward" and freed != "backward":
        return GRADIENTS
    return ACTIVATIONS if made in ("forward", "data") and freed != made else TEMPORARIES


def runs(log: Log) -> list[Stretch]:
    """Return the events of each phase, one after the other; a phase may come again."""
    kinds = np.array([STORAGE_KINDS.index(kind) for kind in kinds_of(log)], dtype=np.int64)
    sizes = np.array(log.sizes, dtype=np.int64)
    ends = [*(section.first for section in log.sections[1:]), len(sizes)]
    stretches = ((section, slice(section.first, end)) for section, end in zip(log.sections, ends, strict=True))
    return [Stretch(each.phase, sizes[at], kinds[at], each.counts.times(each.times)) for each, at in stretches]


def peak_of(log: Log) -> int:
    """Return the largest sum of bytes so far."""
    return int(np.cumsum([0, *log.sizes]).max())


def passes(log: Log) -> list[Pass]:
    return [pass_of(run) for run in runs(log)]


def pass_of(run: Stretch) -> Pass:
    highest = int(np.argmax(np.concatenate(([0], np.cumsum(run.sizes))))) if len(run.sizes) else 0

    def by_kind(until: int) -> dict[str, int]:
        totals = np.bincount(run.kinds[:until], weights=run.sizes[:until], minlength=len(STORAGE_KINDS))
        return {kind: int(total) for kind, total in zip(STORAGE_KINDS, totals, strict=True)}

    return Pass(run.phase, by_kind(highest), by_kind(len(run.sizes)), run.counts)
