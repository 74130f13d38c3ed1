"""Sampling by vLLM, with a stand-in for the package, which needs a GPU. Tested are the requests that vLLM receives and
the samples made from its answers, not vLLM itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlexp.config.schema import RolloutConfig
from rlexp.errors import ModelError
from rlexp.model.loading import byte_tokenizer
from rlexp.rollout.deal import Request
from rlexp.types import Prompt

PROMPTS = [Prompt(index, np.array([0, 5 + index], dtype=np.int32), "p", None, f"row {index}") for index in range(3)]
REQUESTS = [Request(place, PROMPTS[place // 2], place % 2) for place in range(6)]


class StandIn:
    """Stand-in for vllm.LLM. It answers each request with tokens that follow from the request's seed."""

    def __init__(self, **options: Any) -> None:
        assert Path(options["model"], "config.json").exists()
        self.options, self.loaded, self.asked, self.cleared = options, {}, [], 0
        model = SimpleNamespace(load_weights=lambda pairs: self.loaded.update(pairs))
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def reset_prefix_cache(self) -> None:
        self.cleared += 1

    def generate(self, prompts: list[dict[str, Any]], parameters: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.asked += zip(prompts, parameters, strict=True)
        outputs = []
        for each in parameters:
            tokens = [3 + each.seed % 200, 70, 1]
            logps = [{token: SimpleNamespace(logprob=-0.5 * (n + 1))} for n, token in enumerate(tokens)]
            answer = SimpleNamespace(token_ids=tokens, logprobs=logps, finish_reason="stop")
            outputs.append(SimpleNamespace(outputs=[answer]))
        return outputs


@pytest.fixture
def drawer(monkeypatch: pytest.MonkeyPatch) -> Any:
    package = ModuleType("vllm")
    package.LLM, package.SamplingParams = StandIn, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    from rlexp.rollout.vllm import VLLMDrawer

    cfg = RolloutConfig(minibatches=1, sampling_ranks=0, temperature=0.7, top_p=0.9, max_new_tokens=5, stop=["!"])
    write = lambda place: (place / "config.json").write_text("{}")  # noqa: E731
    return VLLMDrawer(write_model=write, tokenizer=byte_tokenizer(), ends=[1], cfg=cfg, seed=3, max_length=64,
                      dtype=np.dtype(np.float32))  # fmt: skip


def test_what_it_is_asked_and_what_comes_of_it(drawer: Any) -> None:
    (first, second) = drawer.draw([REQUESTS[:4], REQUESTS[4:]], 7)
    assert [sample.place for sample in (*first, *second)] == list(range(6))
    for request, (prompt, asked) in zip(REQUESTS, drawer._llm.asked, strict=True):
        assert prompt == {"prompt_token_ids": request.prompt.tokens.tolist()}
        assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.7, 0.9, -1, 5)
        assert asked.stop_token_ids == [1]
    sample = first[0]
    assert sample.stopped
    assert sample.behaviour.tolist() == [-0.5, -1.0, -1.5]
    assert sample.text == byte_tokenizer().decode(sample.answer[:2].tolist())


def test_a_request_has_a_seed_of_its_own_whoever_draws_it(drawer: Any) -> None:
    list(drawer.draw([REQUESTS], 7))
    together = [asked.seed for _, asked in drawer._llm.asked]
    assert len(set(together)) == 6
    list(drawer.draw([[request] for request in reversed(REQUESTS)], 7))
    assert [asked.seed for _, asked in drawer._llm.asked[6:]] == together[::-1]
    list(drawer.draw([REQUESTS], 8))
    assert not set(together) & {asked.seed for _, asked in drawer._llm.asked[12:]}


def test_it_gets_the_weights_one_by_one(drawer: Any) -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.arange(4.0)}
    drawer.renew(lambda: iter(weights.items()))
    assert {name: weight.dtype for name, weight in drawer._llm.loaded.items()} == dict.fromkeys("ab", torch.bfloat16)
    assert drawer._llm.cleared == 1
    drawer._llm.llm_engine.model_executor = None
    with pytest.raises(ModelError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        drawer.renew(lambda: iter(weights.items()))
