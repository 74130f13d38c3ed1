"""The interface between training and what is trained. A task is one file; nothing outside asks which one it is.

`build` makes a task of examples before there is a model: the task says what is `wanted` of the models. Once the engine
stands, `start` hands it the run. From then on `train_step` asks it for one `Step` after the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlexp.base.errors import NonFiniteError
from rlexp.config.schema.cadence import plural
from rlexp.training.dataset.sampler import Batch
from rlexp.training.dealer.deal import Dealt
from rlexp.training.dealer.forest import Forest
from rlexp.training.metrics.meter import Meter
from rlexp.training.reference.models import Reference
from rlexp.training.sinks.base import RolloutFacts
from rlexp.training.train.examples import Examples
from rlexp.training.train.parts import TrainingRun
from rlexp.training.types import Pack, Shard, Wanted


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on its way to this rank's device. A task adds what its loss wants."""

    shard: Shard


class Watch:
    """Looks on at training, and changes nothing: each method is told what a step has just made."""

    def prepared(self, step: Step) -> None:
        """The passes without gradient that go before the first micro-batch are done."""

    def loaded(self, step: Step, batch: Any, pack: Pack) -> None:
        """A micro-batch is packed, and this rank has its part."""

    def compared(self, batch: Any, logps_n: Tensor) -> None:
        """The reference has computed a micro-batch."""

    def returned(self, batch: Any, outputs: Any) -> None:
        """The model has."""

    def judged(self, batch: Any, given: Any, made: Any, slopes: Any = None) -> None:
        """The loss has made of what it was given what is sent backward. `slopes` are derivatives of a whole batch's."""

    def handed(self, batch: Any, loss: Tensor, last: bool) -> None:
        """The engine is about to be handed a micro-batch's loss."""

    def differentiated(self, step: Step) -> None:
        """The gradient is whole."""


NOTHING = Watch()


class Step(ABC):
    """One optimizer step of a task on this rank."""

    batch: Batch
    dealt: Dealt  # the samples of all replicas
    micro_batches: Sequence[Sequence[int]]  # this replica's samples
    tokens: Sequence[int]  # of each micro-batch
    forests: Sequence[Forest]  # of each, where the dealer keeps them
    prepared: Any = None  # what `prepare` has returned

    def take(self, dealt: Dealt, replica: int) -> None:
        """Take this replica's share of the train batch."""
        self.dealt = dealt
        self.micro_batches, self.tokens = self.dealt.packs[replica], self.dealt.tokens(replica)
        self.forests = self.dealt.forests[replica] if self.dealt.forests else ()

    def prepare(self) -> Any:
        """Run the passes without gradient before the first micro-batch; return what they find. A collective call."""
        return None

    @abstractmethod
    def load(self, number: int) -> MicroBatch:
        """Pack a micro-batch and start copying this rank's part to its device, without waiting for the device."""

    @abstractmethod
    def loss(self, batch: Any, meter: Meter) -> Tensor:
        """Return the loss of a micro-batch as the engine takes it.

        The loss is this rank's share of the train batch's sum, divided by the train batch's count and multiplied by the
        world size, since engines average over the ranks (`training/engine/base.py`). The metrics go to the meter.
        """

    @abstractmethod
    def samples(self) -> Sequence[str]:
        """Name the samples of the train batch, for errors."""

    def samples_without_finite_loss(self) -> Sequence[str]:
        """Name the samples to suspect when the loss is not finite. A collective call."""
        return self.samples()

    def measure(self, meter: Meter) -> None:
        """Meter what is known only after the last micro-batch."""
        return

    def finish(self, values: dict[str, float]) -> None:
        """Complete the values of the train batch, the same on every rank, after the reduction."""
        return


class Task(ABC):
    """One kind of training: on answers that the rows give, or on samples that the policy draws itself."""

    kind: str  # the name of one example
    if_not_finite = ""  # what may help where an evaluation is not finite
    examples: Examples
    wanted: Wanted  # of the models, the rows and the train batch
    wanted_of_evaluation: Wanted
    steps_per_epoch: int
    run: TrainingRun  # from `start` on
    reference: Reference | None

    def start(self, run: TrainingRun, reference: Reference | None) -> None:
        """Take the run, whose engine stands, and the reference if the task needs one. A collective call."""
        self.run, self.reference = run, reference

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the samples of an optimizer step, by their places among the examples or in their rollout."""

    @abstractmethod
    def begin(self, step: int, watch: Watch = NOTHING) -> Step:
        """Begin optimizer step `step`, counted from 1. A collective call."""

    def evaluate(self, step: int, watch: Watch = NOTHING) -> dict[str, float]:
        """Return the values of the held-out examples. A collective call."""
        values = {f"eval/{name}": value for name, value in self.evaluated(watch).items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"step {step}: {', '.join(bad)} of the held-out {self.kind}s is not finite.{self.if_not_finite}"
            )
        return values

    @abstractmethod
    def evaluated(self, watch: Watch) -> dict[str, float]:
        """Return the values of the held-out examples, by their names without `eval/`. A collective call."""

    def news(self, step: int) -> RolloutFacts | None:
        """Return on rank 0 what the sinks are told beside the row. A collective call."""
        return None

    # ---- checkpoints ----

    def position(self) -> dict[str, Any] | None:
        """Return the task's part of the position: small, and the same on every rank."""
        return None

    def writer(self, step: int) -> Callable[[Path], list[Path]]:
        """Return a function that writes this rank's part of the task's state and names the files. Called between two
        steps; the function runs while training goes on."""
        return lambda _folder: []

    def restore(self, folder: Path, position: Any, step: int) -> None:
        """Take up what `position` and `writer` left in a checkpoint."""
        return

    # ---- the end ----

    def finish(self) -> None:
        """End well, after the last step. A collective call."""
        return

    def close(self) -> None:
        """Release what the task holds, however the run ends."""
        return

    # ---- words ----

    def describe(self) -> str:
        """Say what is trained on, for the header."""
        return plural(len(self.examples.train), self.kind)

    def sharing(self) -> str | None:
        """Say what sequences of the first train batch share; None where that is not known before samples are drawn."""
        return None

    def cuts(self) -> str | None:
        """Say how many ranks hold the sequences of the first train batch; None where that is not known, or all are cut
        alike."""
        return None

    def counts(self) -> dict[str, int]:
        """Count the examples, for run.json."""
        return {f"{self.kind}s": len(self.examples.train), f"eval_{self.kind}s": len(self.examples.held_out)}
