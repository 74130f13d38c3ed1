"""Stands in for vLLM in a rehearsal: it takes the weights and gives samples, and draws nothing.

What vLLM itself holds is counted apart (`preflight/vllm.py`). Here is what it makes a rank hold beside that: weights
that are gathered to be handed over, and the numbers from which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.config.vllm_memory import AT_ONCE
from rlexp.training.rollout.choose import choose
from rlexp.training.rollout.deal import Request, Weights
from rlexp.training.rollout.vllm.chooser import ELEMENTS, Notes
from rlexp.training.rollout.vllm.weights import BUCKET
from rlexp.training.types import Sample


class GivenDrawer:
    """Gives samples, as long as they may be. `most` is how many it returns, and `None` stands for all of them."""

    def __init__(
        self, *, vocabulary: int, most: int | None, cfg: RolloutConfig, device: torch.device, dtype: np.dtype[Any],
        **_: Any,
    ) -> None:  # fmt: skip
        self._vocabulary, self._most = vocabulary, most
        self._cfg, self._device, self._dtype = cfg, device, dtype
        self._notes = Notes(cfg.max_new_tokens, device)

    def renew(self, weights: Weights) -> None:
        """Hold weights until there are enough to be copied together."""
        held: list[Tensor] = []
        for _, weight in weights():
            held.append(weight)
            if sum(each.nbytes for each in held) >= BUCKET:
                held.clear()

    def draw(self, micro_batches: Iterable[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:  # noqa: ARG002
        requests = [request for part in micro_batches for request in part]
        self._choose(min(len(requests), AT_ONCE))
        yield [self._sample(request) for request in requests[: self._most]]

    def _choose(self, rows: int) -> None:
        """Choose a token for each row. The logits are vLLM's."""
        for row in range(rows):
            self._notes.line_of(row)
        size = max(1, min(rows, ELEMENTS // self._vocabulary))
        logits_BV = torch.empty(1, self._vocabulary, device=self._device).expand(size, self._vocabulary)
        choose(logits_BV, torch.zeros(size, dtype=torch.float64, device=self._device), self._cfg)
        self._notes.clear()

    def _sample(self, request: Request) -> Sample:
        answer = np.zeros(self._cfg.max_new_tokens, dtype=np.int32)
        behaviour = np.ones(len(answer), dtype=self._dtype)
        return Sample(**vars(request), answer=answer, behaviour=behaviour, stopped=False, text="")
