"""The colocated mode: every rank draws its own samples, and then all ranks train."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlexp.base.errors import CheckpointError
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.rollout.deal import deal, micro_batches
from rlexp.training.rollout.draws import Draws, Weights
from rlexp.training.rollout.rewards.weighted import Rewards
from rlexp.training.types import Example, Sample
from rlexp.training.world.groups import World


class Colocated:
    def __init__(self, drawer: Draws, weights: Weights, cfg: RolloutConfig, world: World) -> None:
        self._drawer, self._weights, self._cfg, self._world = drawer, weights, cfg, world
        self.seconds = 0.0  # time that this rank's last share took
        self.spans: list[tuple[float, float]] = []  # its begin and end, in wall-clock time
        self.staleness = 0
        self.waited = 0.0

    def draw(self, number: int, prompts: Sequence[Example], n_samples: int, rewards: Rewards) -> list[Sample]:
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
        return None

    def restore(self, number: int, waiting: list[Sample]) -> None:
        raise CheckpointError(
            f"rollout.mode=colocated: the checkpoint holds rollout {number}, which a pipelined run drew ahead "
            f"({len(waiting)} samples on this rank). Go on with rollout=pipelined."
        )

    def finish(self) -> None:
        return
