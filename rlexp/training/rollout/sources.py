"""Where samples come from. Colocated: every rank draws its own samples, and then all ranks train. Pipelined: some ranks
draw the next rollout while the others train on this one. The methods of both are collective calls of the ranks that
train, which together get the same samples, whichever rank draws them.

In the pipelined mode a whole rollout is drawn with one set of weights: those after the training on the rollout before
the previous one. The delay is always the same, so the configuration alone fixes the curve, as in the colocated mode.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlexp.base.errors import CheckpointError, DrawError
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.rollout.bridge import Bridge
from rlexp.training.rollout.deal import Draws, Weights, deal, micro_batches
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.types import Example, Sample
from rlexp.training.world.groups import World

STOP = -1


class Colocated:
    def __init__(self, drawer: Draws, weights: Weights, cfg: RolloutConfig, world: World) -> None:
        self._drawer, self._weights, self._cfg, self._world = drawer, weights, cfg, world
        self.seconds = 0.0  # time that this rank's last share took
        self.spans: list[tuple[float, float]] = []  # its begin and end, in wall-clock time
        self.staleness = 0  # rollouts trained on between the weights that drew it and now
        self.waited = 0.0  # for ranks that only sample: there are none

    def draw(self, number: int, prompts: Sequence[Example], n_samples: int, rewards: Rewards) -> list[Sample]:
        """Return this rank's samples of rollout `number`, handing them to the rewards as they come."""
        cfg, began, clock = self._cfg, time.monotonic(), time.time()
        hand = deal(prompts, n_samples, self._world.size)[self._world.rank]
        parts = micro_batches(hand, cfg.micro_batch_size, cfg.micro_batch_tokens, cfg.max_new_tokens)
        self._drawer.renew(self._weights)
        drawn: list[Sample] = []
        for samples in self._drawer.draw(parts, number):
            rewards.submit(samples)  # they are judged while the next ones are drawn
            drawn += samples
        self.seconds = time.monotonic() - began
        self.spans = [(clock, clock + self.seconds)]
        places = {request.place: at for at, request in enumerate(hand)}
        return sorted(drawn, key=lambda sample: places[sample.place])  # in the order of requests, whichever ended first

    def waiting(self) -> list[Sample] | None:
        """Return this rank's part of the samples drawn ahead, for a checkpoint."""
        return None

    def restore(self, number: int, waiting: list[Sample]) -> None:
        raise CheckpointError(
            f"rollout.mode=colocated: the checkpoint holds rollout {number}, which a pipelined run drew ahead "
            f"({len(waiting)} samples on this rank). Go on with rollout=pipelined."
        )

    def finish(self) -> None:
        return


@dataclass
class Ahead:
    """A rollout that was requested, or restored from a checkpoint."""

    number: int
    samples: list[Sample] | None = None  # this rank's samples, once they have arrived


@dataclass
class Pipelined:
    """On a training rank: requests rollouts and receives them."""

    bridge: Bridge
    world: World
    weights: Weights
    dtype: torch.dtype  # the dtype that the sampling ranks compute in
    rollouts: int  # number of rollouts in the whole run
    alone: Colocated  # draws the answers to held-out prompts, on the training ranks
    seconds: float = 0.0  # time that the slowest sampling rank took for the last rollout
    waited: float = 0.0  # time that this rank waited for it
    spans: list[tuple[float, float]] = field(default_factory=list)  # each sampling rank's begin and end of drawing it
    staleness: int = 0  # rollouts trained on since its weights were current
    _ahead: Ahead | None = None

    def draw(self, number: int, prompts: Sequence[Example], n_samples: int, rewards: Rewards) -> list[Sample]:
        if number >= self.rollouts:  # held-out prompts: the sampling ranks are busy
            return self.alone.draw(number, prompts, n_samples, rewards)
        self.staleness = 1
        if self._ahead is None:
            self._ask(number)
            self.staleness = 0
        assert self._ahead is not None
        assert self._ahead.number == number, (self._ahead.number, number)

        def judge(samples: list[Sample]) -> None:
            refuse_other_prompts(samples, prompts, n_samples)
            rewards.submit(samples)

        drawn = self._received(judge)
        if number + 1 < self.rollouts:
            self._ask(number + 1)
        else:
            self._ahead = None
        return drawn

    def _ask(self, number: int) -> None:
        """Request a rollout and hand over the current weights."""
        if self.bridge.rank == 0:
            self.bridge.tell(number)
        for _, weight in self.weights():
            if self.bridge.rank == 0:
                self.bridge.hand_over(weight.to(self.dtype))
        self._ahead = Ahead(number)

    def _received(self, judge: Callable[[list[Sample]], None] | None = None) -> list[Sample]:
        """Wait for the rollout that is drawn ahead, and return this rank's samples of it. They are judged as they come,
        or all together if they had come before."""
        assert self._ahead is not None
        samples = self._ahead.samples
        if samples is None:
            began = time.monotonic()
            self.spans, samples = [], []
            for sampler in range(self.bridge.sampling):
                for message in self.bridge.shown(sampler):
                    if isinstance(message, tuple):
                        self.spans.append(message)
                        continue
                    part = [s for s in message if s.place % self.world.size == self.world.rank]
                    samples += part
                    if judge is not None:
                        judge(part)
            samples.sort(key=lambda sample: sample.place)
            self._ahead.samples = samples
            self.waited = time.monotonic() - began
            self.seconds = max(ended - began_at for began_at, ended in self.spans)
        elif judge is not None:
            judge(samples)
        return samples

    def waiting(self) -> list[Sample] | None:
        return None if self._ahead is None else list(self._received())

    def restore(self, number: int, waiting: list[Sample]) -> None:
        self._ahead = Ahead(number, waiting)

    def finish(self) -> None:
        """Let the sampling ranks end."""
        if self._ahead is not None:
            self._received()
        if self.bridge.rank == 0:
            self.bridge.tell(STOP)


Source = Colocated | Pipelined


def refuse_other_prompts(samples: Sequence[Sample], prompts: Sequence[Example], n_samples: int) -> None:
    """Refuse answers to other prompts than this rank has: another machine reads other rows, or tokenizes otherwise."""
    for sample in samples:
        asked = prompts[sample.place // n_samples]
        if not np.array_equal(sample.example.prompt, asked.prompt):
            raise DrawError(
                f"{asked.origin}: a sampling rank drew an answer to another prompt ({sample.example.origin}). Give all "
                f"machines the same rows and the same tokenizer."
            )


def serve(
    bridge: Bridge, drawer: Draws, handed_over: dict[str, Any], weights: Weights, cfg: RolloutConfig,
    prompts_of: Callable[[int], Sequence[Example]],
) -> None:  # fmt: skip
    """On a sampling rank: draw the rollouts that rank 0 requests, until it says stop. What is trained is handed over
    before each; `weights` is all that the policy is made of."""
    while (number := bridge.tell()) != STOP:
        for parameter in handed_over.values():
            bridge.take_over(parameter.data)
        drawer.renew(weights)
        hand = deal(prompts_of(number), cfg.n_samples, bridge.sampling)[bridge.sampler]
        parts = micro_batches(hand, cfg.micro_batch_size, cfg.micro_batch_tokens, cfg.max_new_tokens)
        showing = Showing(bridge)
        began = time.time()
        for samples in drawer.draw(parts, number):
            showing.add(samples)
        showing.finish((began, time.time()))


class Showing(threading.Thread):
    """Shows a sampling rank's samples as they end, while it draws on: the training ranks take them when they can."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(name="showing", daemon=True)
        self._bridge = bridge
        self._drawn: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for sampler in range(self._bridge.sampling):
                if sampler != self._bridge.sampler:
                    for _ in self._bridge.shown(sampler):
                        pass
                    continue
                while (message := self._drawn.get()) is not None:
                    self._bridge.show(sampler, message)
                self._bridge.show(sampler)
        except Exception as error:
            self._error = error

    def add(self, message: Any) -> None:
        if self._error is not None:
            raise self._error
        self._drawn.put(message)

    def finish(self, span: tuple[float, float]) -> None:
        """Show when the rollout was drawn, and wait until all is shown."""
        self.add(span)
        self.add(None)
        self.join()
        if self._error is not None:
            raise self._error
