"""All ranks draw, each its own samples; then all train."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlexp.config.schema import RolloutConfig
from rlexp.ring.groups import World
from rlexp.rollout.deal import deal, micro_batches
from rlexp.rollout.rewards.weighted import Rewards
from rlexp.rollout.sampling import Drawer
from rlexp.types import Prompt, Sample


class Colocated:
    def __init__(self, drawer: Drawer, cfg: RolloutConfig, world: World) -> None:
        self._drawer, self._cfg, self._world = drawer, cfg, world
        self.seconds = 0.0  # that this rank's last share took

    def draw(self, number: int, prompts: Sequence[Prompt], n_samples: int, rewards: Rewards) -> list[Sample]:
        cfg, began = self._cfg, time.monotonic()
        hand = deal(prompts, n_samples, self._world.size)[self._world.rank]
        parts = micro_batches(hand, cfg.micro_batch_size, cfg.micro_batch_tokens, cfg.max_new_tokens)
        mine: list[Sample] = []
        for samples in self._drawer.draw(parts, number):
            rewards.submit(samples)  # judged while the next are drawn
            mine += samples
        self.seconds = time.monotonic() - began
        return mine

    def waiting(self) -> list[Sample] | None:
        return None

    def restore(self, waiting: list[Sample]) -> None:
        raise AssertionError(waiting)

    def close(self) -> None:
        return
