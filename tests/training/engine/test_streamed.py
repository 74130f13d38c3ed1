"""A reference model in the host's memory: the same bits as one on the device, of which two layers at most are there."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.engine.streamed import Copies, Part, Streamed
from rlexp.training.metrics.live_tensors import LiveTensors
from rlexp.training.train.build import build, build_reference, models_of
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers.models import saved
from tests.helpers.ranks import on_ranks

BASE = ("launch.device=cpu", "logger=none", "data.size=8", "data.eval_size=0", "data.max_length=256",
        "train.batch_size=2", "optim.lr=1e-2")  # fmt: skip
WHOLE, KEPT = "reference.offload=false", "reference.offload=true"
GRPO = ("loss=grpo", "loss.beta=0.1", "reward.text=e", "rollout.max_new_tokens=8", "rollout.batch_size=2",
        "rollout.n_samples=2", "train.batch_size=4")  # fmt: skip
GPT2 = GPT2Config(vocab_size=259, n_embd=32, n_layer=3, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=1)
OTHERS = [("engine=zero0", "fp32"), ("engine=zero2", "fp32"), ("engine=zero3", "fp32"), ("engine=fsdp2", "fp32"),
          ("engine=torch", "fp32"), ("engine=zero1", "bf16"), ("engine=zero3", "bf16"), ("engine=fsdp2", "bf16"),
          ("engine=torch", "bf16")]  # fmt: skip
FEW = [("engine=torch", "fp64"), ("engine=zero1", "fp32"), ("engine=fsdp2", "fp64")]


def two_steps(_spec: RankSpec, pairs: Sequence[Sequence[Config]]) -> list[list[tuple[Any, ...]]]:
    """Return of each run what holds its reference, the reference's log-probabilities after a step, and that of the
    second step."""

    def taken(cfg: Config) -> tuple[Any, ...]:
        task = build(cfg, around=UNPROBED)
        draws = cfg.loss.draws
        held = None if draws else task.begin(1).load(0)
        train_step(task, 1)
        logps_n = torch.zeros(0) if held is None else task.reference.logps(held.shard)
        row = train_step(task, 2)
        task.close()
        exact = {key: value for key, value in row.items() if key.startswith(("train/loss", "train/grad_norm"))}
        return None if draws else type(task.reference.frozen).__name__, logps_n, exact

    return [[taken(cfg) for cfg in pair] for pair in pairs]


def hold_alike(ranks: int, kinds: Sequence[tuple[str, ...]]) -> None:
    words = [(*BASE, f"parallel.ring_size={ranks}", *kind) for kind in kinds]
    pairs = [[compose_config([*each, where]) for where in (WHOLE, KEPT)] for each in words]
    for rank in on_ranks(ranks, two_steps, pairs):
        for kind, ((_, logps, row), (held, kept_logps, kept_row)) in zip(kinds, rank, strict=True):
            assert torch.equal(logps, kept_logps), kind
            assert row == kept_row, kind
            if not kind[0].endswith(("zero3", "fsdp2")) and held is not None:
                assert held == "Streamed", kind


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(2, FEW), *(pytest.param(ranks, [*FEW, *OTHERS], marks=pytest.mark.slow) for ranks in (1, 2))],
    ids=["three on 2 ranks", "all on 1 rank", "all on 2 ranks"],
)
def test_it_has_the_bits_of_a_model_in_memory(ranks: int, kinds: list[tuple[str, str]]) -> None:
    hold_alike(ranks, [(engine, f"train.precision={precision}") for engine, precision in kinds])


@pytest.mark.parametrize(
    "engine", ["zero3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero1", "fsdp2"))]
)
def test_an_adapter_is_compared_with_it(engine: str) -> None:
    """The pass that has a gradient is the only one of the trained weights. ZeRO-3 must not reduce too early then."""
    hold_alike(1, [(f"engine={engine}", "adapter=lora", "reference=model")])


@pytest.mark.slow
def test_drawn_samples_are_scored_by_it() -> None:
    hold_alike(2, [(f"engine={engine}", *GRPO) for engine in ("zero2", "zero3", "fsdp2")])


@pytest.mark.slow
def test_tied_embeddings_and_a_table_of_positions(tmp_path: Path) -> None:
    hold_alike(1, [("engine=torch", "train.precision=fp64", "model=hf", f"model.path={saved(tmp_path / 'm', GPT2)}")])


# ---- what is on the device ----


def bytes_held(_spec: RankSpec, cfg: Config) -> tuple[int, int, int, list[int]]:
    """Return the bytes of a reference, the most that it holds beside while it computes, those that are left then, and
    the bytes of each part."""
    task = build(cfg, around=UNPROBED)
    shard = task.begin(1).load(0).shard
    models = models_of(cfg, UNPROBED.model_config(cfg.model, cfg.data.max_length), task.wanted, UNPROBED)
    task.reference = None
    gc.collect()
    with LiveTensors() as live:
        live.find()
        before = live.held("cpu").live
        reference: Any = build_reference(task.run, models[-1], task.wanted, UNPROBED)
        reference.logps(shard)
        gc.collect()
        there = live.held("cpu").live
        live.reset_peaks()
        reference.logps(shard)
        peak = live.held("cpu").peak
        gc.collect()
        left = live.held("cpu").live - there
    parts = list(reference.frozen.copies.next) if isinstance(reference.frozen, Streamed) else []
    return there - before, peak - there, left, [sum(each.nbytes for each in part.hosts.values()) for part in parts]


def test_two_layers_at_most_are_beside_the_host_s_copy() -> None:
    sizes = ("model.layers=6", "model.hidden_size=128", "model.intermediate_size=512")
    one, kept = [compose_config([*BASE, *sizes, "engine=torch", where]) for where in (WHOLE, KEPT)]
    (weights, computing, _, _), (host, streaming, left, parts) = (
        on_ranks(1, bytes_held, each)[0] for each in (one, kept)
    )
    layer = max(parts)
    assert host == pytest.approx(weights, rel=0.01)
    assert left == 0
    assert 1.9 * layer < streaming - computing <= 2 * layer


# ---- in which order ----


class Watched(Copies):
    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(torch.device("cpu"), parts)
        self.fetched: list[Part] = []

    def _fetch(self, part: Part) -> None:
        self.fetched.append(part)
        super()._fetch(part)


def test_another_order_is_learned_in_one_pass_and_a_layer_may_come_twice() -> None:
    """A copy that was not used is given up, and every part computes with its own weights all the same."""
    modules = [nn.Linear(2, 2, bias=False).requires_grad_(False) for _ in range(3)]
    one, two, three = parts = [Part([module]) for module in modules]
    hosts = [module.weight for module in modules]
    copies = Watched(parts)

    def in_order(*used: Part) -> list[Part]:
        copies.fetched.clear()
        with copies:
            for part in used:
                copies.enter(part)
                module, host = modules[parts.index(part)], hosts[parts.index(part)]
                assert module.weight is not host
                assert torch.equal(module.weight, host)
                assert sum(each.copied is not None for each in parts) <= 2
                part.take_back()
        assert all(each.copied is None for each in parts)
        assert [module.weight for module in modules] == hosts
        return list(copies.fetched)

    assert in_order(one, two, three) == [one, two, three]
    assert in_order(one, three, two) == [one, two, three, two, three]
    assert in_order(one, three, two) == [one, three, two]
    assert in_order(one, one, three) == [one, three, one, three, two]


def test_a_tied_weight_is_copied_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    part, copies = Part([first, second]), Copies(torch.device("cpu"), [])
    with copies:
        copies.enter(part)
        made: Tensor = first.weight
        assert second.weight is made
        part.take_back()
    assert first.weight is second.weight
    assert first.weight is not made
