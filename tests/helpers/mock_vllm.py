"""Mock of vLLM, which needs gigabytes or a GPU. Its classes have the names, the parameters and the ways of vLLM 0.26 to
0.32 that rlexp uses; tests/training/rollout/test_vllm_signatures.py holds them to vLLM's own. Where a real vLLM is
installed, tests/training/rollout/test_vllm_itself.py uses that.

Its model is a table: the last token's logits of the next one. Its engine has a batch of few rows, which it fills,
empties and turns about as vLLM does: a request waits, is read in two steps, is put out of the batch and in again, and
changes its row. Nothing of that may change an answer. Where all requests are greedy, a processor is left out that says
that it never changes the likeliest token.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROWS = 3  # of the engine's batch
WORDS = 259  # of the byte tokenizer


class LogitsProcessor:
    """What vLLM makes a logits processor of ours from."""


class Directionality(Enum):
    UNIDIRECTIONAL = 1
    SWAP = 2


@dataclass(frozen=True)
class BatchUpdate:
    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, Directionality]]


class RequestOutputKind(Enum):
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind | None = None
    extra_args: dict[str, Any] | None = None


class Table(nn.Module):
    """The mock's model. Like vLLM's it knows weights by their names in files, and keeps two as one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2 * WORDS, WORDS), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.calls: list[str] = []

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.calls.append(name)
            match name:
                case "odd":
                    self.table.data[1::2].copy_(weight)
                case "even":
                    self.table.data[::2].copy_(weight.t())
                case "scale":
                    self.scale.data.copy_(weight + 1)  # not simply copied
                case _:  # a policy's
                    self.table.data.copy_(self.table.clone())
                    self.scale.data.copy_(self.scale.clone())

    def forward(self, tokens: Sequence[int]) -> Tensor:
        at = torch.tensor(tokens) % WORDS
        return (self.table[2 * at] + self.table[2 * at + 1]) * self.scale


@dataclass
class Asked:
    id: str
    prompt: list[int]
    params: SamplingParams
    answer: list[int] = field(default_factory=list)
    steps: int = 0  # in the batch since it was put in


class Engine:
    def __init__(self, model: Table, processors: Sequence[Any]) -> None:
        self.model, self.processors = model, processors
        self.waiting: deque[Asked] = deque()
        self.rows: list[Asked] = []
        self.asked: list[Asked] = []
        self.steps = self.most = 0
        self.failing: Exception | None = None
        self._freed: list[int] = []  # rows whose answers ended in the last step

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        asked = Asked(request_id, prompt["prompt_token_ids"], params)
        self.asked.append(asked)
        self.waiting.append(asked)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) or len(self.rows) > len(self._freed)

    def _changed(self) -> BatchUpdate | None:
        """Take rows out and put rows in, so that those of the batch stay side by side."""
        removed = list(self._freed)
        if self.steps % 5 == 4 and len(self.rows) > 1 and len(self.rows) - 1 not in removed:
            removed.append(len(self.rows) - 1)  # put out, for lack of memory
            self.rows[-1].steps = 0
            self.waiting.appendleft(self.rows[-1])
        removed.sort(reverse=True)
        self._freed, added, moved = [], [], []
        while self.waiting and (removed or len(self.rows) < ROWS):
            place = removed.pop() if removed else len(self.rows)  # a row that is put in again is no longer removed
            asked = self.waiting.popleft()
            self.rows[place : place + 1] = [asked]
            added.append((place, asked.params, asked.prompt, asked.answer))
        free = set(removed)
        while free:  # the last row moves to a place that is free
            last = len(self.rows) - 1
            if last not in free:
                place = min(free)
                self.rows[place] = self.rows[last]
                moved.append((last, place, Directionality.UNIDIRECTIONAL))
                free.discard(place)
            free.discard(last)
            self.rows.pop()
        if self.steps % 3 == 1 and len(self.rows) > 1:
            self.rows[0], self.rows[1] = self.rows[1], self.rows[0]
            moved.append((0, 1, Directionality.SWAP))
        return BatchUpdate(len(self.rows), removed, added, moved) if removed or added or moved else None

    def step(self) -> list[Any]:
        update = self._changed()
        for processor in self.processors:
            processor.update_state(update)
        self.steps += 1
        self.most = max(self.most, len(self.rows))
        if self.failing is not None and self.steps > 2:
            raise self.failing
        logits = self.model([(asked.prompt + asked.answer)[-1] for asked in self.rows]).clone()
        greedy = all(asked.params.temperature == 0 for asked in self.rows)
        for processor in self.processors:
            if not (greedy and processor.is_argmax_invariant()):
                logits = processor.apply(logits)
        ended = []
        for place, (asked, token) in enumerate(zip(self.rows, logits.argmax(-1).tolist(), strict=True)):
            asked.steps += 1
            if asked.steps == 1:
                continue  # its prompt is not read to the end: what was chosen does not count
            asked.answer.append(token)
            stopped = token in (asked.params.stop_token_ids or ())
            if stopped or len(asked.answer) == asked.params.max_tokens:
                self._freed.append(place)
                answer = SimpleNamespace(token_ids=list(asked.answer), finish_reason="stop" if stopped else "length")
                ended.append(SimpleNamespace(request_id=asked.id, finished=True, outputs=[answer]))
        return ended


class LLM:
    made: ClassVar[list[LLM]] = []

    def __init__(self, model: str, **options: Any) -> None:
        assert options["distributed_executor_backend"] == "external_launcher"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # what that executor asks for, and reads:
        self.place = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK")}
        self.world = dist.get_world_size()
        self.described = json.loads(Path(model, "config.json").read_text())
        self.options, self.told, self.table = options, list[str](), Table()
        torch.manual_seed(options["seed"])  # as vLLM does
        self.llm_engine = Engine(
            self.table, [each(None, torch.device("cpu"), False) for each in options["logits_processors"]]
        )
        self.made.append(self)

    def collective_rpc(self, method: Callable[..., Any], timeout: float | None = None, args: Any = ()) -> list[Any]:  # noqa: ARG002
        self.told.append("collective_rpc")
        return [method(SimpleNamespace(model_runner=SimpleNamespace(model=self.table)), *args)]

    def sleep(self, level: int = 1) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.told.append(f"wake_up {tags}")

    def reset_prefix_cache(self) -> bool:
        self.told.append("reset_prefix_cache")
        return True


def modules() -> dict[str, ModuleType]:
    """Return the mock by the names under which rlexp imports it, for `sys.modules`."""
    made = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.sampling_params")}
    made["vllm"].__dict__.update(LLM=LLM, SamplingParams=SamplingParams)
    layers = made["vllm.model_executor.layers"] = ModuleType("vllm.model_executor.layers")
    layers.__dict__.update(utils=SimpleNamespace(dispatch_cpu_unquantized_gemm=None))
    made["vllm.sampling_params"].__dict__.update(RequestOutputKind=RequestOutputKind)
    processors = made["vllm.v1.sample.logits_processor"] = ModuleType("vllm.v1.sample.logits_processor")
    processors.__dict__.update(LogitsProcessor=LogitsProcessor)
    return made
