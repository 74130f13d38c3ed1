"""Sampling by vLLM, with a stand-in for the package, which needs a GPU. Tested are the requests that vLLM receives and
the samples made from its answers, not vLLM itself."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rlexp.base.errors import ConfigError, ModelError
from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.rollouts import RolloutConfig, RolloutEngine
from rlexp.launch import run_folder
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.run import job
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.rollout.deal import Request
from rlexp.training.types import Prompt

PROMPTS = [Prompt(index, np.array([0, 5 + index], dtype=np.int32), "p", None, f"row {index}") for index in range(3)]
REQUESTS = [Request(place, PROMPTS[place // 2], place % 2) for place in range(6)]


class StandIn:
    """Stand-in for vllm.LLM. It answers each request with tokens that follow from the request's seed."""

    made: ClassVar[list[StandIn]] = []
    free = 0.5  # share of the GPU's memory

    def __init__(self, **options: Any) -> None:
        if options["gpu_memory_utilization"] > self.free:
            raise ValueError("Free memory on device (40/80 GiB) on startup is less than desired GPU memory utilization")
        assert options["distributed_executor_backend"] == "external_launcher"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # what that executor asks for, and reads:
        self.place = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK")}
        self.world = dist.get_world_size()
        self.described = json.loads(Path(options["model"], "config.json").read_text())
        self.made.append(self)
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


def stand_in() -> ModuleType:
    package = ModuleType("vllm")
    package.LLM, package.SamplingParams = StandIn, SimpleNamespace  # type: ignore[attr-defined]
    return package


READ = ("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    for name in READ:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what is set below
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "vllm", stand_in())
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def drawer(make: Callable[[], Any]) -> Any:
    return make()


def made() -> Any:
    from rlexp.training.rollout.vllm import VLLMDrawer

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
    with pytest.raises(ModelError, match="this version of vLLM keeps its model in another process"):
        drawer.renew(lambda: iter(weights.items()))


def test_what_it_cannot_have_is_named(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "free", 0.1)
    with pytest.raises(ModelError, match=r"rollout\.vllm_memory=0\.4: vLLM cannot start beside .* Set another share"):
        make()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ModelError, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        make()


def test_ranks_that_share_a_gpu_have_their_shares_together() -> None:
    asked = ["loss=ppo", "reward.rule=length", "rollout.engine=vllm", "rollout.batch_size=4", "rollout.n_samples=2"]
    with assumed_gpus(1), pytest.raises(ConfigError, match="it makes its own groups of ranks"):
        compose_config([*asked, "launch.ranks_per_gpu=3"])
    pipelined = ("rollout.mode=pipelined", "rollout.sampling_ranks=3")
    said = r"vllm_memory=0\.4: .* puts 3 of them on one\. Use less than 0"
    with assumed_gpus(1), pytest.raises(ConfigError, match=said):
        compose_config([*asked, "launch.ranks_per_gpu=4", *pipelined])
    pipelined = ("rollout.mode=pipelined", "rollout.sampling_ranks=1")
    with assumed_gpus(1), pytest.raises(ConfigError, match="the package vllm is not installed"):  # one rank samples
        compose_config([*asked, "launch.ranks_per_gpu=3", *pipelined])


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 100}  # fmt: skip


def test_models_whose_new_weights_it_would_not_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlexp.training.train import build_rollouts

    mixture = MixtralConfig(**SMALL, num_local_experts=4)
    build_rollouts.refuse_renamed(LlamaForCausalLM(LlamaConfig(**SMALL)))
    with pytest.raises(ModelError, match="MixtralForCausalLM is a mixture of experts"):
        build_rollouts.refuse_renamed(MixtralForCausalLM(mixture))
    monkeypatch.setattr(build_rollouts, "is_mixture", lambda _: False)
    with pytest.raises(ModelError, match="other names in files"):
        build_rollouts.refuse_renamed(MixtralForCausalLM(mixture))
    mixture.save_pretrained(tmp_path)
    asked = ["loss=ppo", "reward.rule=length", "rollout.engine=vllm", "rollout.batch_size=4", "rollout.n_samples=2"]
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm: samples on GPUs, and launch\.device=cpu\. Use"):
        compose_config([*asked, "launch.device=cpu"])
    monkeypatch.setattr("rlexp.config.resolvers.visible_gpus", lambda: 1)
    monkeypatch.setattr("rlexp.config.checks.across_fields.visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"the model is a mixture of experts \(num_"):
        compose_config([*asked, "launch.device=cuda", "model=hf", f"model.path={tmp_path}"])


def rank(spec: RankSpec, run_dir: str) -> list[tuple[dict[str, int], int, list[str] | None, list[str]]]:
    """Train or sample with the stand-in; return what each engine of vLLM on this rank was made in and was given."""
    sys.modules["vllm"] = stand_in()
    job.train_rank(spec, run_dir)
    return [(each.place, each.world, each.described["architectures"], [*each.loaded]) for each in StandIn.made]


def trained_with_it(tmp_path: Path, *overrides: str) -> list[Any]:
    small = """launch.device=cpu loss=ppo reward.rule=length rollout.batch_size=4 rollout.n_samples=2 train.batch_size=8
        data.max_length=160 rollout.max_new_tokens=4 train.max_steps=2 data.size=16 data.eval_size=2 train.eval_every=2
        engine=torch logger=none checkpoint.export=false"""
    cfg: Config = compose_config([*small.split(), *overrides])
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, engine=RolloutEngine.vllm))
    assert run_folder.enter(cfg, tmp_path / "run")
    return run_ranks(rank, 2, (str(tmp_path / "run"),), log_dir=tmp_path, timeout=240)


@pytest.mark.slow
def test_only_ranks_that_sample_have_one_and_each_is_a_world_of_its_own(tmp_path: Path) -> None:
    """The training rank draws the held-out answers with its own engine: its GPU is for training."""
    training, sampling = trained_with_it(tmp_path, "rollout=pipelined", "launch.nproc=2")
    assert training == []
    ((place, world, architectures, names),) = sampling
    assert (place, world, architectures) == ({"RANK": 0, "LOCAL_RANK": 0}, 1, ["LlamaForCausalLM"])
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(names)


@pytest.mark.slow
def test_colocated_ones_meet_in_the_world_of_the_training_ranks(tmp_path: Path) -> None:
    for number, ((place, world, _, names),) in enumerate(trained_with_it(tmp_path, "parallel=ring2")):
        assert (place, world) == ({"RANK": number, "LOCAL_RANK": number}, 2)
        assert not any(name.startswith("critic") for name in names)
