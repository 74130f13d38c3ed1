"""The parts of a run that every task needs: the world, the layout, the engine, and how tokens are packed and held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlexp.config.checks.layout import Choice
from rlexp.config.schema import BackendName, Config, TransportName
from rlexp.training.dealer.deal import Dealer
from rlexp.training.dealer.forest import Forest
from rlexp.training.dealer.packing import pack_sequences, shard_pack
from rlexp.training.engine.base import Engine
from rlexp.training.metrics.memory import Phases
from rlexp.training.model.policy import DTYPES
from rlexp.training.ring.base import Window
from rlexp.training.ring.kernels import BlockKernel
from rlexp.training.ring.layouts import Layout
from rlexp.training.ring.layouts.ringwise import is_short
from rlexp.training.train.operations import Operations
from rlexp.training.train.schedule import Schedule
from rlexp.training.types import Ids, Pack, Shard
from rlexp.training.world.groups import World


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how a run computes, before it has weights. Built on every rank from the same configuration."""

    cfg: Config
    world: World
    device: torch.device
    choice: Choice
    layout: Layout
    dealer: Dealer
    kernel: BlockKernel
    windows: tuple[Window, ...]  # of the policy's layers, and of those of a reference model of its own
    tokenizer: Any
    schedule: Schedule
    phases: Phases

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.cfg.train.precision]

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    @property
    def attention(self) -> str:
        """Layout and kernel, for people."""
        native = self.cfg.parallel.backend is BackendName.native
        around = self.choice.transport is TransportName.neighbour
        inner, longest = self.choice.ulysses_size, [self.cfg.data.max_length]
        short = any(each and is_short(each, longest, self.world.ring.size // inner) for each in self.windows)
        windows = ", direct where a window is short" if around and short else ""
        return f"{self.choice.name}{windows}, {self.kernel.name if native else self.cfg.parallel.backend.value}"

    @property
    def padding(self) -> dict[str, Any]:
        """The arguments of `pack_examples` and `pack_sequences` that follow from the layout."""
        size = self.world.ring.size
        return {
            "multiple": self.layout.multiple(size),
            "unit": self.layout.unit(size),
            "spare": self.layout.spare(size),
            "packing": self.cfg.data.packing,
            "share": self.dealer.share,
        }

    def pack(self, sequences: Sequence[tuple[Ids, Ids]], forest: Forest | None = None) -> Pack:
        """Pack prompts with their answers."""
        return pack_sequences(sequences, **self.padding, forest=forest)

    def shard(self, pack: Pack) -> Shard:
        """Return this rank's part of a pack, in the host's memory."""
        longest = self.cfg.data.max_length
        return shard_pack(pack, self.world.ring, self.layout, self.kernel, longest, self.windows)

    def to_device(self, pack: Pack) -> Shard:
        """Return this rank's part of a pack, on its device."""
        return self.shard(pack).to(self.device)


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Setting):
    """A setting with the policy's weights. It knows nothing of what is trained: that is the task's."""

    engine: Engine
    parameters: int  # of the model
    trained: int  # of these, and of an adapter; without a critic
    operations: Operations  # that the models need for a micro-batch, by formula
    peak: float | None  # operations per second that the data sheet promises of this rank's GPU; None: not known
