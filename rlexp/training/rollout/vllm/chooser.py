"""Choose tokens inside vLLM, as `native` chooses them: by rlexp's own random numbers, one for each token.

vLLM lets a logits processor change the logits of each step. This one decides: it leaves the chosen token as the only
possible one, so vLLM's own sampling, which would have other random numbers, has nothing left to decide. It also notes
the token's log-probability in the whole distribution. vLLM could only return that before the temperature, or after
top-k, top-p and min-p, and would hand it over as Python objects, token by token.

Shape letters: B rows of vLLM's batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.rollout.choose import choose, uniform
from rlexp.training.types import Floats, Ids

OWN = "rlexp"  # our entry among a request's extra arguments
ELEMENTS = 1 << 24  # of the logits that are computed with at once: half a GB, in float64 with what comes of them


class Notes:
    """What was chosen for each answer that has begun: a line of tokens and log-probabilities, on the device."""

    def __init__(self, longest: int, device: torch.device) -> None:
        self.device = device
        self._lines: dict[int, int] = {}  # by the request's number
        self._free: list[int] = []
        wide = longest + 1  # a step may be on its way when vLLM learns that an answer has ended
        self.tokens = torch.zeros(0, wide, dtype=torch.int64, device=device)
        self.logps = torch.zeros(0, wide, dtype=torch.float64, device=device)

    def line_of(self, request: int) -> int:
        """Return a request's line. vLLM may take a request out of its batch and put it in again."""
        if request not in self._lines:
            if not self._free:
                self._grow()
            self._lines[request] = self._free.pop()
        return self._lines[request]

    def _grow(self) -> None:
        had = len(self.tokens)
        more = max(16, had)
        self.tokens = torch.cat((self.tokens, self.tokens.new_zeros(more, self.tokens.shape[1])))
        self.logps = torch.cat((self.logps, self.logps.new_zeros(more, self.logps.shape[1])))
        self._free += range(had, had + more)

    def write(self, lines: Sequence[int], places: Sequence[int], token_B: Tensor, logp_B: Tensor) -> None:
        at = torch.tensor([lines, places]).to(self.device, non_blocking=True)
        self.tokens[at[0], at[1]] = token_B
        self.logps[at[0], at[1]] = logp_B

    def taken(self, request: int, length: int) -> tuple[Ids, Floats]:
        """Return a finished answer's tokens and log-probabilities, and free its line."""
        line = self._lines.pop(request)
        self._free.append(line)
        return self.tokens[line, :length].cpu().numpy(), self.logps[line, :length].cpu().numpy()

    def clear(self) -> None:
        """Forget the answers that will not be finished."""
        self._free += self._lines.values()
        self._lines.clear()


@dataclass(frozen=True)
class BatchRow:
    line: int
    key: int  # of its random numbers
    answer: Sequence[int]  # vLLM's own list of its tokens so far, which grows


class BatchRows:
    """The rows of vLLM's batch, in its order, which changes as requests begin and end."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._rows: dict[int, BatchRow] = {}

    def update(self, change: Any) -> None:
        for place in change.removed:
            self._rows.pop(place, None)
        for place, parameters, _, answer in change.added:
            own = parameters.extra_args[OWN]
            self._rows[place] = BatchRow(self._notes.line_of(own["request"]), own["key"], answer)
        for one, other, way in change.moved:
            moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if replaced is not None and way.name == "SWAP":
                self._rows[one] = replaced

    def first(self, number: int) -> list[BatchRow]:
        return [self._rows[place] for place in range(number)]


def chosen_only(logits_BV: Tensor, rows: Sequence[BatchRow], notes: Notes, cfg: RolloutConfig) -> Tensor:
    """Choose a token for each row, note it, and leave it as the only possible one."""
    places = [len(row.answer) for row in rows]
    keys = np.array([row.key for row in rows], dtype=np.uint64)
    number_B = torch.from_numpy(uniform(keys, np.array(places))).to(logits_BV.device, non_blocking=True)
    logits_BV.div_(cfg.temperature)
    size = max(1, ELEMENTS // logits_BV.shape[-1])
    parts = [choose(*part, cfg) for part in zip(logits_BV.split(size), number_B.split(size), strict=True)]
    token_B, logp_B = (torch.cat(each) for each in zip(*parts, strict=True))
    notes.write([row.line for row in rows], places, token_B, logp_B)
    return logits_BV.fill_(-torch.inf).scatter_(-1, token_B.unsqueeze(-1), 0.0)


def chooser(notes: Notes, cfg: RolloutConfig) -> type:
    """Return the class that vLLM makes its logits processor of."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Chooser(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            self._rows = BatchRows(notes)

        def is_argmax_invariant(self) -> bool:
            return False  # vLLM would then leave it out where it takes the likeliest token

        def update_state(self, batch_update: Any) -> None:
            if batch_update is not None:
                self._rows.update(batch_update)

        def apply(self, logits: Tensor) -> Tensor:
            return chosen_only(logits, self._rows.first(len(logits)), notes, cfg)

    return Chooser
