"""Draw the answers of one rank, a micro-batch at a time. A row leaves the batch when its answer ends.

If parameters are sharded, a forward pass is a collective call and the ranks go in step: a rank that is done computes
an empty row until all ranks are done.

Shape letters: B rows, U prompts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.base.errors import DrawError
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.launch import watch
from rlexp.training.model.decoding import GROWTH, Decoding, KeyValues
from rlexp.training.rollout.choose import choose, stream, uniform
from rlexp.training.rollout.deal import Request, Weights
from rlexp.training.types import Ids, Sample

PREFILL = 2048  # tokens of a micro-batch's prompts in one forward pass

Forward = Callable[[Decoding], Tensor]


@dataclass
class Drawn:
    """The rows of a micro-batch so far."""

    requests: Sequence[Request]
    answers: list[list[int]]
    logps: list[list[float]]
    stopped: list[bool]


class Drawer:
    def __init__(
        self,
        *,
        forward: Forward,
        tokenizer: Any,
        ends: Sequence[int],
        cfg: RolloutConfig,
        seed: int,
        device: torch.device,
        dtype: np.dtype[Any],  # of the log-probabilities that samples keep
        in_step: bool,  # a forward pass is a collective call of all ranks
    ) -> None:
        self._forward, self._tokenizer, self._ends = forward, tokenizer, frozenset(ends)
        self._cfg, self._seed, self._device, self._dtype, self._in_step = cfg, seed, device, dtype, in_step
        self._tail = max((len(stop.encode()) for stop in cfg.stop), default=0) + 1  # last tokens that may hold a stop

    def renew(self, weights: Weights) -> None:
        """Do nothing: the forward pass uses the weights that are trained."""

    def draw(self, micro_batches: Iterable[Sequence[Request]], rollout: int) -> Iterator[list[Sample]]:
        """Yield the samples of each micro-batch, in the order of its requests. Every rank must exhaust it."""
        for requests in micro_batches:
            yield self._samples(self._drawn(requests, rollout))
        while self._in_step and self._any_goes_on(goes_on=False):
            row = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            self._forward(Decoding(row, row, KeyValues(row[0], 1, padded=False)))

    def _any_goes_on(self, *, goes_on: bool) -> bool:
        flag = torch.tensor(float(goes_on), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _next(self, batch: Decoding) -> Tensor:
        watch.note()
        if self._in_step:
            self._any_goes_on(goes_on=True)
        return self._forward(batch)

    def _walk(self, cache: KeyValues, places: range) -> Iterable[int]:  # noqa: ARG002
        """Return the places in the prompts, or in the answers, at which a forward pass begins. A seam: a rehearsal
        leaves out those that are like others."""
        return places

    def _drawn(self, requests: Sequence[Request], rollout: int) -> Drawn:
        cfg, drawn = self._cfg, Drawn(requests, [[] for _ in requests], [[] for _ in requests], [False] * len(requests))
        streams_B = stream(self._seed, rollout, [r.example.index for r in requests], [r.number for r in requests])
        cache, logits_BV, lengths_B = self._read(requests)
        rows = list(range(len(requests)))  # the request that each row of the batch answers
        for position in self._walk(cache, range(cfg.max_new_tokens)):
            uniform_B = torch.from_numpy(uniform(streams_B[rows], position)).to(self._device)
            token_B, logp_B = choose(logits_BV, uniform_B, cfg)
            staying = self._note(drawn, rows, token_B.tolist(), logp_B.tolist())
            if not staying or position + 1 == cfg.max_new_tokens:
                break
            if len(staying) < len(rows):
                staying_B = torch.tensor(staying, device=self._device)
                cache.take(staying_B)
                token_B, lengths_B = token_B[staying_B], lengths_B[staying_B]
                rows = [rows[place] for place in staying]
            logits_BV = self._next(Decoding(token_B.unsqueeze(-1), (lengths_B + position).unsqueeze(-1), cache))
        return drawn

    def _note(self, drawn: Drawn, rows: Sequence[int], tokens: list[int], logps: list[float]) -> list[int]:
        """Add a token to each row, and return the places of the rows that go on."""
        staying = []
        for place, (row, token, logp) in enumerate(zip(rows, tokens, logps, strict=True)):
            if not math.isfinite(logp):
                refuse_not_finite(drawn.requests[row], len(drawn.answers[row]))
            drawn.answers[row].append(token)
            drawn.logps[row].append(logp)
            drawn.stopped[row] = token in self._ends or self._stops(drawn.answers[row])
            if not drawn.stopped[row]:
                staying.append(place)
        return staying

    def _stops(self, answer: list[int]) -> bool:
        """Whether the text of the answer's last tokens holds one of `rollout.stop`."""
        if not self._cfg.stop:
            return False
        text = self._tokenizer.decode(answer[-self._tail :], skip_special_tokens=True)
        return any(stop in text for stop in self._cfg.stop)

    def _read(self, requests: Sequence[Request]) -> tuple[KeyValues, Tensor, Tensor]:
        """Read each prompt once, in pieces, then make a row for each of its samples.

        Return the cache, and for each row the logits of its first token and its length so far.
        """
        prompts, of_row = _distinct(requests)
        longest = max(len(prompt) for prompt in prompts)
        pads = [longest - len(prompt) for prompt in prompts]
        pads_U = torch.tensor(pads, device=self._device)
        tokens = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt
        tokens_UL = torch.from_numpy(tokens).to(self._device)
        positions_UL = (torch.arange(longest, device=self._device) - pads_U.unsqueeze(-1)).clamp(min=0)
        most = longest + self._cfg.max_new_tokens - 1  # the last token is not read
        cache = KeyValues(pads_U, min(longest + GROWTH, most), most, padded=any(pads))
        piece = max(1, PREFILL // len(prompts))
        for first in self._walk(cache, range(0, longest, piece)):
            part = slice(first, first + piece)
            logits_UV = self._next(Decoding(tokens_UL[:, part], positions_UL[:, part], cache))
        rows_B = torch.tensor(of_row, device=self._device)
        if of_row != list(range(len(prompts))):
            cache.take(rows_B)
        return cache, logits_UV[rows_B], (longest - pads_U)[rows_B]

    def _samples(self, drawn: Drawn) -> list[Sample]:
        return [
            Sample(
                **vars(request),
                answer=np.asarray(drawn.answers[row], dtype=np.int32),
                behaviour=np.asarray(drawn.logps[row], dtype=self._dtype),
                stopped=drawn.stopped[row],
                text=text_of(self._tokenizer, drawn.answers[row], self._cfg.stop),
            )
            for row, request in enumerate(drawn.requests)
        ]


def refuse_not_finite(request: Request, tokens: int) -> NoReturn:
    raise DrawError(
        f"{request.example.origin}: the policy's log-probabilities are not finite after {tokens} tokens of an answer. "
        f"A smaller optim.lr or a warm-up may help."
    )


def text_of(tokenizer: Any, answer: Sequence[int], stop: Sequence[str]) -> str:
    """Return an answer's text without special tokens, cut before the first of `stop`."""
    text = str(tokenizer.decode(list(answer), skip_special_tokens=True))
    return text[: min((text.find(each) for each in stop if each in text), default=len(text))]


def _distinct(requests: Sequence[Request]) -> tuple[list[Ids], list[int]]:
    """Return the prompts without repetition, and the place of each request's prompt among them."""
    prompts = {request.example.index: request.example.prompt for request in requests}
    places = {index: place for place, index in enumerate(prompts)}
    return list(prompts.values()), [places[request.example.index] for request in requests]
