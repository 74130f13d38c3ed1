"""The memory of one machine that a run needs: what all its ranks hold there together.

A rehearsal counts what a rank holds in the host's memory. The rest is arithmetic: copies of the state for a checkpoint,
the weights of the files that rank 0 writes at the end, and the processes themselves. Not counted are the samples, which
are memory-mapped, and what Python holds of drawn ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rlexp.base.byte_counts import GIB, MIB, size
from rlexp.config.schema import Config, Device, ExportDtype, Precision
from rlexp.config.sizes import ranks_of_machine

# A rank's own: Python, torch, DeepSpeed and, on a GPU, CUDA's and NCCL's host side. On CPU 100 to 260 MiB were measured
# (PSS of 1 to 4 forked ranks of model=tiny, with and without DeepSpeed). On a GPU it is an assumption.
PROCESS = {Device.cpu: 320 * MIB, Device.cuda: 3 * GIB}
FREE = 0.05  # of a machine's memory, for the system and for files on their way to the disk

TENSORS, PROCESSES, OFFLOADED = "tensors of the ranks", "processes", "tensors kept on the host"
REFERENCE, COPIES, EXPORT = "reference.offload, one copy", "copies for a checkpoint", "a file of the model"
KINDS = (TENSORS, PROCESSES, REFERENCE, OFFLOADED, COPIES, EXPORT)


@dataclass(frozen=True)
class Held:
    """Bytes that the rehearsal of a rank finds in the host's memory, or that follow from it."""

    shared: int = 0  # weights of the reference, which all ranks of a machine share
    offloaded: int = 0  # after the build, without what is pinned
    pinned: int = 0
    rounded: int = 0  # as torch takes it for what is pinned
    beside: int = 0  # what the steps take beside these at their peak
    state: int = 0  # what this rank writes of a checkpoint
    elements: int = 0  # of the trained model and its frozen weights

    def grown(self, more: Held, times: int) -> Held:
        """Return what more layers hold: `more` has one period of them more, and each adds the same."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        every = Held(*(larger + (larger - smaller) * times for smaller, larger in pairs))
        # A tensor of all layers is rounded up by another share than one of a few: we take the larger share seen.
        share = max(each.rounded / each.pinned if each.pinned else 1.0 for each in (self, more))
        return dataclasses.replace(every, rounded=int(every.pinned * share))


@dataclass(frozen=True)
class HostBytes:
    """Bytes of one machine, by kind, and how many a run may take there; None where that is not known."""

    ranks: int
    by_kind: Mapping[str, int]
    limit: int | None
    assumed: Collection[str] = ()  # kinds that nobody has measured: they are printed, and refuse no run

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.counted <= self.limit

    @property
    def counted(self) -> int:
        return self.bytes - sum(self.by_kind[kind] for kind in self.assumed)


def host_of(cfg: Config, held: Held, peak: int) -> HostBytes:
    """Return what the ranks of one machine hold. `peak` is a rank's on its device: on CPU, that is the host."""
    from rlexp.training.model.export import SHARD

    ranks = ranks_of_machine(cfg)
    on_cpu, gib = cfg.launch.device is Device.cpu, cfg.hardware.host_memory_gib
    copied = _copied(cfg, held, ranks)
    dtype, bf16 = cfg.checkpoint.export_dtype, cfg.train.precision is Precision.bf16
    wide = dtype is ExportDtype.fp32 or (dtype is ExportDtype.auto and not bf16)  # the elements of `<run>/model`
    return HostBytes(
        ranks,
        {
            TENSORS: ranks * peak if on_cpu else 0,
            PROCESSES: ranks * PROCESS[Device.cpu if on_cpu else Device.cuda],
            REFERENCE: held.shared,
            OFFLOADED: ranks * (held.offloaded + held.rounded + held.beside),
            COPIES: ranks * copied,
            EXPORT: min(SHARD, held.elements * (4 if wide else 2)) if cfg.checkpoint.export else 0,
        },
        int(gib * GIB * (1 - FREE)) if gib else None,
        assumed=() if on_cpu else (PROCESSES,),
    )


def told_short(host: HostBytes, cfg: Config) -> str:
    """Say what a machine has too little memory for, its largest parts, and the key that says how much it has."""
    counted = [(count, kind) for kind, count in host.by_kind.items() if count and kind not in host.assumed]
    largest = ", ".join(f"{size(count)} {kind}" for count, kind in sorted(counted, reverse=True)[:3])
    need = "its rank needs" if host.ranks == 1 else f"its {host.ranks} ranks on a machine need"
    return (
        f"{need} {size(host.counted)} of the host's memory ({largest}), and may take {size(host.limit or 0)}: "
        f"{1 - FREE:.0%} of hardware.host_memory_gib={cfg.hardware.host_memory_gib:g}"
    )


def _copied(cfg: Config, held: Held, ranks: int) -> int:
    from rlexp.training.checkpoint.host_copy import sizes

    checkpoint, most = cfg.checkpoint, cfg.checkpoint.host_memory_gib
    if checkpoint.save_every is None and not checkpoint.on_exit and checkpoint.keep_best <= 0:
        return 0
    piece, count = sizes(held.state, None if most is None else int(most * GIB / ranks))
    return piece * count


def power_of_two(count: int) -> int:
    """Return the bytes that torch takes for so many bytes of pinned memory (`CachingHostAllocator`)."""
    return 1 << (count - 1).bit_length() if count else 0
