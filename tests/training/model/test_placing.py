"""Weights go to their place one by one, with every bit that the optimizer needs; no engine's build needs more than its
steps do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlexp.config.load import compose_config
from rlexp.config.schema import HFModelConfig
from rlexp.launch.joining import RankSpec
from rlexp.preflight.predict import Prediction
from rlexp.preflight.rehearsal.log import passes
from rlexp.preflight.rehearsal.rehearse import rehearse
from rlexp.preflight.vllm import count_parameters
from rlexp.training.model import placing
from rlexp.training.model.loading import load_config, load_model
from rlexp.training.model.placing import Placing, by_rows, evenly, put_all, take_exact
from tests.helpers.faults.plant import plant
from tests.helpers.models import starting_weights
from tests.helpers.ranks import on_ranks
from tests.helpers.rehearsals import ENGINES, alone, elsewhere, fast, plan

CPU = torch.device("cpu")
PRETRAINED = ("launch.device=cpu", "logger=none", "data.max_length=256", "train.batch_size=4", "launch.nproc=2",
              "parallel=ring2", "train.precision=bf16", "model=hf")  # fmt: skip


FIRST = ("zero1", "fsdp2")  # one that cuts evenly, and one that cuts by rows
OTHERS = [each for each in ENGINES if each not in FIRST]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.ones(2))


def test_tied_weights_stay_one_and_buffers_keep_their_dtype() -> None:
    model = Tied()
    put_all(model, Placing(CPU, torch.bfloat16))
    assert model.first.weight is model.last.weight
    assert (model.first.weight.dtype, model.table.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cut", ["evenly", "by_rows"])
def test_the_parts_of_all_ranks_are_the_whole(cut: str, ranks: int) -> None:
    value = torch.arange(15.0).view(5, 3) / 7
    parts = []
    for rank in range(ranks):
        place = placing.Placing(CPU, torch.float32, partial(getattr(placing, cut), rank, ranks), whole=False)
        put = place.put(nn.Parameter(value.clone()))
        assert put.is_meta
        parts.append(placing.take_exact(put))
        assert placing.take_exact(put) is None  # it is handed over once
    assert torch.equal(torch.cat(parts), value.view(-1))


def test_only_bits_that_are_lost_are_kept() -> None:
    short, long = torch.tensor([1.0, 0.5, 3.0]), torch.tensor([1.0, 0.1, 3.0])
    place = Placing(CPU, torch.bfloat16, partial(evenly, 0, 2))
    assert take_exact(place.put(nn.Parameter(short))) is None
    kept = take_exact(place.put(nn.Parameter(long)))
    assert kept is not None
    assert torch.equal(kept, long[:2])


def sizes_while_loading(_spec: RankSpec, path: str) -> tuple[int, int]:
    """The largest storage that a parameter has once it is placed, and the model's largest; in elements."""
    cfg = HFModelConfig(path=path)
    place = Placing(CPU, torch.bfloat16, partial(by_rows, 0, 2), whole=False)
    model = load_model(cfg, load_config(cfg, 256), 256, place)
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta), len(list(model.parameters()))


def test_a_pretrained_model_is_never_whole_where_it_is_sharded(shared: Path) -> None:
    assert on_ranks(1, sizes_while_loading, str(shared / "models" / "stories260K"))[0][0] == 0


@pytest.mark.parametrize("engines", [FIRST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=" ".join)
def test_masters_have_every_bit_of_a_pretrained_file(engines: Sequence[str], shared: Path) -> None:
    from safetensors.torch import load_file

    path = shared / "models" / "stories260K"
    cfgs = [compose_config([*PRETRAINED, f"model.path={path}", f"engine={engine}"]) for engine in engines]
    saved = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert any(not torch.equal(value.bfloat16().float(), value) for value in saved.values()), "nothing could be lost"
    for of_rank in on_ranks(2, starting_weights, cfgs):
        for held, engine in zip(of_rank, engines, strict=True):
            assert all(torch.equal(weight, saved[name].double()) for name, weight in held.items()), engine


def peaks_of_build_and_step(cfg) -> tuple[int, int]:
    """Bytes: the build's peak, and what a rank holds between the steps."""
    log = rehearse(plan(cfg, 1, gpu=True))
    peaks = Prediction(passes(log), 0, 1).peaks
    kept = ("weights", "gradients", "optimizer state", "reference")
    return peaks["build"].bytes, sum(peaks["optimizer"].by_kind[kind] for kind in kept)


WIDE = ("model.hidden_size=512", "model.intermediate_size=1024", "model.layers=3")
LARGEST = 4 * 512 * 1024  # bytes of the largest weight in float32
# Bytes a parameter when the build has ended, on one of 4 ranks: weights, reference, masters with their two moments, and
# the gradients of ZeRO-3, which keeps its part of them and a bucket.
BUILT = {"torch": 2 + 2 + 12, "zero0": 2 + 2 + 12, "zero1": 2 + 2 + 3, "zero2": 2 + 2 + 3,
         "zero3": 0.5 + 0.5 + 3 + 1 + 0.31, "fsdp2": 0.5 + 3}  # fmt: skip


def most(engine: str, cfg) -> float:
    """The bytes that a build may need at its peak."""
    return BUILT[engine] * count_parameters(plan(cfg, 1).model) + LARGEST


@pytest.mark.parametrize("engine", fast("zero1"))
def test_no_build_needs_more_than_its_steps_hold(engine: str) -> None:
    cfg = elsewhere(f"engine={engine}", "parallel=ring2", "launch.nproc=4", "train.precision=bf16", *WIDE)
    built, held = alone(peaks_of_build_and_step, cfg)
    assert built <= held + 2 * LARGEST, f"{built:,} bytes at build, {held:,} between steps"
    assert built <= most(engine, cfg)


def cloned(original: Any, name: Any, policy: Any, *args: Any) -> Any:
    clones = [each.detach().float().clone() for each in policy.parameters()]
    engine = original(name, policy, *args)
    engine.clones = clones
    return engine


def peaks_with_clones(cfg) -> tuple[int, int]:
    plant("rlexp.training.train.build:build_engine", cloned, lambda: None)
    return peaks_of_build_and_step(cfg)


def test_a_planted_clone_of_all_weights_is_found() -> None:
    """A float32 copy of every weight at the build, as there was once."""
    cfg = elsewhere("engine=zero1", "parallel=ring2", "launch.nproc=4", "train.precision=bf16", *WIDE)
    built, _ = alone(peaks_with_clones, cfg)
    assert built > 1.4 * most("zero1", cfg)
