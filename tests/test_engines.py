"""Two engines, one gradient: DeepSpeed in float32 against the plain engine, which the textbook holds in float64."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from rlexp.config.load import compose_config
from rlexp.errors import UserError
from rlexp.launch.place import Place
from tests.ranks import largest_gap, on_ranks, train_steps

BASE = ("launch.device=cpu", "logger=none", "train.batch_size=8", "data.size=16", "optim.lr=1e-3")
# float32 against float64, relative to the largest element of each tensor. Measured 6.0e-7; a missing factor of a
# ring or of the accumulation steps would be 0.5 and more.
FLOAT32 = 5e-6


def steps_of(*overrides: str, steps: int = 1):
    cfg = compose_config([*BASE, *overrides])
    return on_ranks(cfg.parallel.world_size, train_steps, cfg, steps)


@pytest.fixture(scope="module")
def exact():
    return steps_of("parallel=ring1", "train.precision=fp64", steps=2)[0]


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2", "torch"])
@pytest.mark.parametrize("layout", [("ring1", 1, 8), ("ring1", 4, 1), ("ring2", 4, 2), ("ring4", 4, 4)], ids=str)
def test_gradient_over_ring_and_replicas_is_exact(exact, engine: str, layout: tuple[str, int, int]) -> None:
    ring, nproc, micro = layout
    results = steps_of(f"parallel={ring}", f"launch.nproc={nproc}", f"train.micro_batch_size={micro}",
                       f"engine={engine}", "train.precision=fp32", steps=2)  # fmt: skip
    for result in results:
        assert largest_gap(exact.gradients[0], result.gradients[0]) < FLOAT32
        assert largest_gap(exact.gradients[1], result.gradients[1]) < 1e-4  # after an Adam step; 2.3e-5 measured
        for row, expected in zip(result.rows, exact.rows, strict=True):
            assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=FLOAT32)
            assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=FLOAT32)


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2", "torch"])
@pytest.mark.parametrize("layout", [("ring1", 1, 1), ("ring2", 4, 2)], ids=str)
def test_bf16_adds_up_its_micro_batches_once(exact, engine: str, layout: tuple[str, int, int]) -> None:
    """bfloat16 against float64: rounding measured 0.02; a micro-batch that counts twice is 0.5 and more."""
    ring, nproc, micro = layout
    result = steps_of(f"parallel={ring}", f"launch.nproc={nproc}", f"train.micro_batch_size={micro}",
                      f"engine={engine}", "train.precision=bf16", steps=2)[0]  # fmt: skip
    for step in (0, 1):
        assert largest_gap(exact.gradients[step], result.gradients[step]) < 0.06
        norm = exact.rows[step]["train/grad_norm"]
        assert result.rows[step]["train/grad_norm"] == pytest.approx(norm, rel=0.01)


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2", "torch"])
def test_clipping_sees_the_whole_gradient(engine: str) -> None:
    """With a tiny limit and a huge eps, Adam's first step is −lr · clipped gradient / eps: its norm shows the clip."""
    for limit, expected in ((0.5, 0.5), (0.0, None)):
        result = steps_of("parallel=ring2", "launch.nproc=4", f"engine={engine}", "optim.eps=1e6", "optim.lr=1e6",
                          f"optim.max_grad_norm={limit}")[0]  # fmt: skip
        start = steps_of("parallel=ring1", "engine=torch", "optim.lr=0")[0].weights
        moved = math.sqrt(sum(float((result.weights[n] - start[n]).square().sum()) for n in start))
        assert moved == pytest.approx(expected or result.rows[0]["train/grad_norm"], rel=1e-2)


def resumed_rank(place: Place, cfg, folder: str, then) -> tuple:
    """Two steps, save; a fresh engine of the configuration `then` loads and takes the third."""
    from rlexp.checkpoint.folder import folder_of, read_manifest
    from rlexp.checkpoint.saver import Saver
    from rlexp.checkpoint.tensors import Reader, load
    from rlexp.engine.base import shape_of, trained
    from rlexp.train.build import build
    from rlexp.train.step import train_step

    def nothing(place: Path) -> None:
        (place / "model").mkdir(exist_ok=True)
        for name in ("position.json", "metrics.jsonl"):
            (place / name).touch()

    run, path = build(cfg), Path(folder)
    for batch in run.sampler.batches(1, 2):
        train_step(run, batch)
    shapes = {name: shape_of(parameter) for name, parameter in trained(run.engine.policy).items()}
    saver = Saver(run.engine, run.world, path, {"parameters": {n: list(shape) for n, shape in shapes.items()}})
    saver.begin(2, nothing)
    straight = train_step(run, run.sampler.batch(3))  # while the files are written: a copy, not a view
    assert saver.settle() is None
    expected = {name: weight.double().cpu().clone() for name, weight in run.engine.weights()}
    fresh = build(then)
    reader = Reader(folder_of(path, 2), read_manifest(folder_of(path, 2)))
    load(fresh.engine, reader, shapes, 2)
    row = train_step(fresh, fresh.sampler.batch(3))
    return straight, row, expected, {name: weight.double().cpu().clone() for name, weight in fresh.engine.weights()}


KINDS = [
    ("engine=zero0",),
    ("engine=zero1",),
    ("engine=zero2", "engine.offload=optimizer"),
    ("engine=zero3",),
    ("engine=zero3", "engine.offload=all"),
    ("engine=fsdp2",),
    ("engine=torch",),
]
PAIRS = [(kind, kind) for kind in KINDS] + [(KINDS[n], KINDS[n - 1]) for n in range(len(KINDS))]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda kind: "+".join(kind).replace("engine=", ""))
def test_what_one_engine_saves_another_loads(tmp_path: Path, one: tuple, other: tuple) -> None:
    layout = ("parallel=ring2", "launch.nproc=4", "train.max_steps=3", "train.batch_size=4", "optim.weight_decay=0.01")
    cfg, then = (compose_config([*BASE, *layout, *engine]) for engine in (one, other))
    for straight, row, expected, got in on_ranks(4, resumed_rank, cfg, str(tmp_path), then):
        assert row["train/loss"] == pytest.approx(straight["train/loss"], rel=1e-6)
        # Same engine: to the bit. Across engines, Adam's third step rounds otherwise.
        assert largest_gap(expected, got) <= (0.0 if one == other else 1e-6)


FROZEN = "model.freeze=['model.embed_tokens.*', '*.norm.*']"


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2", "torch"])
def test_frozen_parameters_stay_and_the_others_do_not_notice_the_engine(engine: str) -> None:
    exact = steps_of("parallel=ring1", "train.precision=fp64", FROZEN, steps=2)[0]
    layout = (
        "parallel=ring2",
        "launch.nproc=4",
        "train.micro_batch_size=2",
        f"engine={engine}",
        "train.precision=fp32",
    )
    start = steps_of("parallel=ring1", "engine=torch", "optim.lr=0")[0].weights
    for result in steps_of(*layout, FROZEN, steps=2):
        assert (
            set(result.gradients[0])
            == set(exact.gradients[0])
            == set(start)
            - {
                "model.embed_tokens.weight",
                "model.norm.weight",
            }
        )
        assert largest_gap(exact.gradients[0], result.gradients[0]) < FLOAT32
        assert torch.equal(result.weights["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


def poor_rank(place: Place, cfg) -> list[float]:
    """A step on two pairs whose answers are one token: with a ring of 4, ranks without a trained token."""
    from rlexp.train.build import build
    from rlexp.train.step import train_step

    run = build(cfg)
    return [train_step(run, run.sampler.batch(step))["train/grad_norm"] for step in (1, 2)]


@pytest.mark.parametrize("engine", ["zero0", "zero1", "zero2", "zero3", "fsdp2", "torch"])
def test_a_rank_without_a_trained_token_does_not_hang_the_others(tmp_path: Path, engine: str) -> None:
    rows = [{"prompt": "a long prompt " * 3, "chosen": "y", "rejected": "n"} for _ in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = ("data=jsonl", f"data.path={path}", "train.batch_size=2", "launch.device=cpu", "logger=none")
    exact = on_ranks(1, poor_rank, compose_config([*data, "train.precision=fp64"]))[0]
    got = on_ranks(4, poor_rank, compose_config([*data, "parallel=ring4", f"engine={engine}"]))
    for norms in got:
        assert norms == pytest.approx(exact, rel=1e-5)


def test_bf16_keeps_float32_masters() -> None:
    """A step far below bfloat16's resolution moves the masters; both engines move them alike."""
    layout = ("parallel=ring2", "train.precision=bf16", "optim.lr=1e-5", "train.max_steps=3")
    zero = steps_of(*layout, "engine=zero1", steps=3)[0]
    plain = steps_of(*layout, "engine=torch", steps=3)[0]
    start = steps_of("parallel=ring1", "engine=torch", "optim.lr=0")[0].weights
    moved = max(float((zero.weights[name] - start[name]).abs().max()) for name in start)
    assert 1e-6 < moved < 3e-5  # no more than the learning rates add up to: the masters started from float32
    assert zero.rows[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert [row["train/loss"] for row in zero.rows] == pytest.approx([r["train/loss"] for r in plain.rows], rel=1e-2)


class Poison:
    """A loss that is not finite for one pair of the data set."""

    needs_reference = True

    def __init__(self, loss, value: float, in_gradient: bool) -> None:
        self.loss, self.value, self.in_gradient, self.calls = loss, value, in_gradient, 0

    def __call__(self, policy, reference):
        result = self.loss(policy, reference)
        hit = (policy.chosen_P - self.value).abs() < 1e-9
        bad = torch.where(hit, torch.nan, 0.0)
        if self.in_gradient:  # the value stays finite, its gradient does not
            spoiled = result.losses_P + torch.where(hit, (policy.chosen_P - policy.chosen_P.detach()).abs().sqrt(), 0.0)
            return dataclasses.replace(result, losses_P=spoiled)
        return dataclasses.replace(result, losses_P=result.losses_P + bad)


def poisoned_rank(place: Place, cfg, in_gradient: bool) -> tuple[str, bool]:
    from rlexp.metrics.meter import Meter
    from rlexp.train.build import build
    from rlexp.train.step import pair_losses, train_step

    run = build(cfg)
    victim = run.sampler.batch(1).indices[5]
    seen: list[float] = []

    def listening(policy, reference):
        seen.append(float(policy.chosen_P[0]))
        return run.loss(policy, reference)

    listening.needs_reference = True
    with torch.no_grad():
        pair_losses(dataclasses.replace(run, loss=listening), run.shard([run.pairs[victim]]), run.engine.forward,
                    Meter(run.world, run.device))  # fmt: skip
    before = {name: weight.clone() for name, weight in run.engine.weights()}
    run = dataclasses.replace(run, loss=Poison(run.loss, seen[0], in_gradient))
    with pytest.raises(UserError) as error:
        train_step(run, run.sampler.batch(1))
    same = all(torch.equal(weight, before[name]) for name, weight in run.engine.weights())
    return str(error.value), same and run.pairs[victim].origin in str(error.value)


@pytest.mark.parametrize("engine", ["zero1", "torch"])
@pytest.mark.parametrize("in_gradient", [False, True], ids=["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_step(engine: str, in_gradient: bool) -> None:
    cfg = compose_config([*BASE, "parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2", f"engine={engine}",
                          "train.precision=fp32"])  # fmt: skip
    results = on_ranks(4, poisoned_rank, cfg, in_gradient)
    what = "gradient" if in_gradient else "loss"
    for message, held in results:
        assert message == results[0][0]
        assert message.startswith(f"step 1: the {what} is not finite. Samples: ")
        assert held
    if not in_gradient:
        assert results[0][0].count("synthetic train pair") == 1
