"""Some ranks draw the next rollout while the others train on this one.

A rollout is drawn, whole, by the weights after the training on the last but one: a step behind, and always the same
step. So the curve is fixed by the configuration, here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlexp.config.schema import RolloutConfig
from rlexp.ring.groups import World
from rlexp.rollout.bridge import Bridge
from rlexp.rollout.colocated import Colocated
from rlexp.rollout.deal import deal, micro_batches
from rlexp.rollout.draws import Draws, Weights
from rlexp.rollout.rewards.weighted import Rewards
from rlexp.types import Prompt, Sample

STOP = -1


@dataclass
class Ahead:
    """A rollout that has been asked for, or was found in a checkpoint."""

    number: int
    samples: list[Sample] | None = None  # this rank's, once they are here


@dataclass
class Pipelined:
    """On a rank that trains: asks for a rollout, and takes it in."""

    bridge: Bridge
    world: World
    weights: Weights  # the policy's, whole, one after the other; a collective call
    dtype: torch.dtype  # that those that sample compute in
    rollouts: int  # of the whole run
    alone: Colocated  # what held-out prompts are answered by
    seconds: float = 0.0
    waited: float = 0.0  # for the last rollout
    spans: list[tuple[float, float]] = field(default_factory=list)  # of those that drew it, by the clock
    staleness: int = 0  # of the last one: rollouts trained on between its weights and now
    _ahead: Ahead | None = None

    def draw(self, number: int, prompts: Sequence[Prompt], n_samples: int, rewards: Rewards) -> list[Sample]:
        if number >= self.rollouts:  # held-out prompts: those that sample are busy
            return self.alone.draw(number, prompts, n_samples, rewards)
        self.staleness = 1
        if self._ahead is None:
            self._ask(number)
            self.staleness = 0
        assert self._ahead is not None
        assert self._ahead.number == number, (self._ahead.number, number)
        mine = self._received()
        if number + 1 < self.rollouts:
            self._ask(number + 1)
        else:
            self._ahead = None
        rewards.submit(mine)
        return mine

    def _ask(self, number: int) -> None:
        """Hand over the weights as they are now, and the task."""
        if self.bridge.rank == 0:
            self.bridge.tell(number)
        for _, weight in self.weights():
            if self.bridge.rank == 0:
                self.bridge.hand_over(weight.to(self.dtype))
        self._ahead = Ahead(number)

    def _received(self) -> list[Sample]:
        """This rank's part of what is drawn ahead: waits until it is."""
        assert self._ahead is not None
        if self._ahead.samples is None:
            began = time.monotonic()
            self.spans, mine = [], []
            for sampler in range(self.bridge.sampling):
                for message in self.bridge.shown(sampler):
                    if isinstance(message, tuple):
                        self.spans.append(message)
                    else:
                        mine += [s for s in message if s.place % self.world.size == self.world.rank]
            self._ahead.samples = sorted(mine, key=lambda sample: sample.place)
            self.waited = time.monotonic() - began
            self.seconds = max(ended - began_at for began_at, ended in self.spans)
        return self._ahead.samples

    def waiting(self) -> list[Sample] | None:
        return None if self._ahead is None else list(self._received())

    def restore(self, number: int, waiting: list[Sample]) -> None:
        self._ahead = Ahead(number, waiting)

    def finish(self) -> None:
        """Let those that sample end."""
        if self._ahead is not None:
            self._received()
        if self.bridge.rank == 0:
            self.bridge.tell(STOP)


def serve(
    bridge: Bridge, drawer: Draws, parameters: dict[str, Any], cfg: RolloutConfig,
    prompts_of: Callable[[int], Sequence[Prompt]],
) -> None:  # fmt: skip
    """On a rank that samples: until it is told to stop."""
    while (number := bridge.tell()) != STOP:
        for parameter in parameters.values():
            bridge.take_over(parameter.data)
        drawer.renew(lambda: iter(parameters.items()))
        began = time.time()
        hand = deal(prompts_of(number), cfg.n_samples, bridge.sampling)[bridge.sampler]
        parts = micro_batches(hand, cfg.micro_batch_size, cfg.micro_batch_tokens, cfg.max_new_tokens)
        drawn = list(drawer.draw(parts, number))
        span = (began, time.time())
        for sampler in range(bridge.sampling):
            if sampler != bridge.sampler:
                for _ in bridge.shown(sampler):
                    pass
                continue
            for samples in drawn:
                bridge.show(sampler, samples)
            bridge.show(sampler, span)
            bridge.show(sampler)
