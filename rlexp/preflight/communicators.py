"""What a run takes of a GPU beside tensors: the CUDA context, cuBLAS, and NCCL's buffers for each communicator.

A rehearsal counts the communicators that a step uses, and from how many ranks each one receives messages. What each of
them takes is an assumption, named here with its source: no machine with several GPUs was there to measure it. So the
sum refuses no run. It is printed, and where it exceeds `hardware.reserve_gib`, that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlexp.base.byte_counts import GIB, MIB
from rlexp.config.schema import Collectives, Config, HardwareConfig

# Driver, kernels and the heap of printf of a process, since kernels are loaded lazily (CUDA 11.7): 300 MB and more are
# reported (pytorch/pytorch#107667).
CONTEXT = 512 * MIB
# Measured on an H100 (docs/measured/gpu.md): two workspaces of 32 MiB, of cuBLAS and of cuBLASLt.
CUBLAS = 64 * MIB
# What one channel to one rank takes on the receiving side: NCCL's buffers for its protocols, 4 MiB (NCCL_BUFFSIZE),
# 4.7 MiB (LL128) and 0.5 MiB (LL), rounded up to 2 MiB together (NCCL 2.30, src/transport/p2p.cc and src/init.cc).
CONNECTION = 10 * MIB
# Channels of a collective, and connections for each: one of a ring, and one more of a tree. NVLS, which larger sums may
# take on NVSwitch, is not counted.
COLLECTIVE_CHANNELS, CONNECTIONS = 24, 2
# Channels to each rank that messages come from: two for each NVLink to it, a power of two, at most 32; without NVLink
# two (src/graph/paths.cc). All are connected with the first message.
MESSAGE_CHANNELS = 32
WITHOUT_NVLINK = 2
NVLINK_GB_S = 100  # a link that is faster is no PCIe

COLLECTIVES, MESSAGES = "collectives", "messages"


@dataclass
class RankGroup:
    """How a step uses one group of ranks: how many it has, whether all call together, and who sends to this rank."""

    ranks: int
    collective: bool = False
    senders: set[int] = field(default_factory=set)

    def note(self, name: str, source: int | None) -> None:
        if source is not None:
            self.senders.add(source)
        elif name == "all_to_all":  # NCCL sends and receives one by one
            self.senders |= set(range(1, self.ranks))
        elif name != "send":
            self.collective = True

    def bytes(self, hardware: HardwareConfig) -> int:
        nvlink = hardware.link_gb_s >= NVLINK_GB_S
        together = COLLECTIVE_CHANNELS if nvlink else WITHOUT_NVLINK
        messages = MESSAGE_CHANNELS if nvlink else WITHOUT_NVLINK
        return CONNECTION * (self.collective * together * CONNECTIONS + len(self.senders) * messages)

    def in_words(self) -> str:
        uses = [COLLECTIVES] * self.collective
        uses += [f"{MESSAGES} from {len(self.senders)} rank{'s' * (len(self.senders) > 1)}"] * bool(self.senders)
        return f"{self.ranks} ranks: {' and '.join(uses)}"


@dataclass(frozen=True)
class OutsideTensors:
    """Bytes of a GPU that no tensor takes, by what they are for."""

    assumed: Mapping[str, int]
    reserve: int

    @property
    def bytes(self) -> int:
        return sum(self.assumed.values())

    @property
    def exceeds(self) -> bool:
        return self.bytes > self.reserve


def beside(cfg: Config, groups: Mapping[str, RankGroup]) -> OutsideTensors:
    nccl = cfg.launch.carrier is Collectives.nccl  # else all goes through the host's memory
    several = sorted(
        (each for each in groups.values() if nccl and each.ranks > 1), key=lambda each: -each.bytes(cfg.hardware)
    )
    assumed = {"CUDA context": CONTEXT, "cuBLAS workspaces": CUBLAS}
    for number, group in enumerate(several, 1):
        assumed[f"communicator {number}, {group.in_words()}"] = group.bytes(cfg.hardware)
    return OutsideTensors(assumed, int(cfg.hardware.reserve_gib * GIB))
