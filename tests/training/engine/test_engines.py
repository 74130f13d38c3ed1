"""Two engines, one gradient: DeepSpeed in float32 against the plain engine, which the textbook holds in float64."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import engines
from rlexp.base.errors import UserError
from rlexp.config.load import compose_config
from rlexp.launch.joining import RankSpec
from rlexp.run_files.curve_distance import compared
from rlexp.training.checkpoint.restore import load
from rlexp.training.engine.zero import place_of_piece
from rlexp.training.train.build import build
from rlexp.training.train.rows_task import Prepared, Use
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from rlexp.training.types import Wanted
from rlexp.training.world.groups import ALONE, World, build_world
from tests.helpers.ranks import begin_saving, largest_gap, on_ranks, train_steps

BASE = ("launch.device=cpu", "logger=none", "train.batch_size=8", "data.size=16", "data.eval_size=4", "optim.lr=1e-3")
ENGINES = ("zero0", "zero1", "zero2", "zero3", "fsdp2", "torch")
# float32 against float64, relative to the largest element of each tensor. Measured 6.1e-7; a missing factor of a
# ring or of the accumulation steps would be 0.5 and more.
FLOAT32 = 5e-6


def steps_of(*overrides: str, steps: int = 1):
    return all_steps_of([overrides], steps)[0]


def all_steps_of(several: Sequence[Sequence[str]], steps: int):
    """Train configurations of one world size in one start of ranks. Return what every rank returned for each."""
    cfgs = [compose_config([*BASE, *overrides]) for overrides in several]
    by_rank = on_ranks(cfgs[0].parallel.world_size, train_all, cfgs, steps)
    return [list(results) for results in zip(*by_rank, strict=True)]


def train_all(spec: RankSpec, cfgs, steps: int):
    return [train_steps(spec, cfg, steps) for cfg in cfgs]


@pytest.fixture(scope="module")
def exact():
    return steps_of("parallel=ring1", "train.precision=fp64", steps=2)[0]


@pytest.fixture(scope="module")
def start() -> dict[str, Tensor]:
    """The weights that every run here begins with."""
    return steps_of("parallel=ring1", "engine=torch", "optim.lr=0")[0].weights


def test_gradient_of_an_engine_of_each_kind_is_exact(exact) -> None:
    hold_gradients(exact, ("ring2", 4, 2), ("torch", "zero1", "fsdp2"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("ring1", 1, 8), ("ring2", 4, 2), ("ring1", 4, 1), ("ring4", 4, 4)], ids=str)
def test_gradient_over_ring_and_replicas_is_exact(exact, layout: tuple[str, int, int]) -> None:
    hold_gradients(exact, layout, ENGINES)


def hold_gradients(exact, layout: tuple[str, int, int], of: Sequence[str]) -> None:
    ring, nproc, micro = layout
    place = (f"parallel={ring}", f"launch.nproc={nproc}", f"train.micro_batch_size={micro}", "train.precision=fp32")
    for results in all_steps_of([(*place, f"engine={engine}") for engine in of], steps=2):
        for result in results:
            assert largest_gap(exact.gradients[0], result.gradients[0]) < FLOAT32
            assert largest_gap(exact.gradients[1], result.gradients[1]) < 1e-4  # after an Adam step; 2.3e-5 measured
            for row, expected in zip(result.rows, exact.rows, strict=True):
                assert row["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=FLOAT32)
                assert row["train/loss"] == pytest.approx(expected["train/loss"], rel=FLOAT32)


@pytest.mark.slow
def test_accumulation_and_uneven_micro_batches_in_every_engine() -> None:
    """Part of the table of docs/measured/invariance.md: SGD without clipping, so that nothing hides a wrong scale."""
    cases = [engines.Case(*kind, 2, 2, acc) for kind in engines.KINDS for acc in (1, 5)]
    for case, gap in engines.gradient_differences(cases).items():
        assert gap <= engines.TOLERANCE, case


@pytest.mark.parametrize("layout", [pytest.param(("ring1", 1, 2), marks=pytest.mark.slow), ("ring2", 4, 2)], ids=str)
def test_bf16_adds_up_its_micro_batches_once(exact, layout: tuple[str, int, int]) -> None:
    """bfloat16 against float64: rounding measured 0.03; a micro-batch that counts twice is 0.5 and more."""
    ring, nproc, micro = layout
    place = (f"parallel={ring}", f"launch.nproc={nproc}", f"train.micro_batch_size={micro}", "train.precision=bf16")
    for results in all_steps_of([(*place, f"engine={engine}") for engine in ENGINES], steps=2):
        for step in (0, 1):
            assert largest_gap(exact.gradients[step], results[0].gradients[step]) < 0.06
            norm = exact.rows[step]["train/grad_norm"]
            assert results[0].rows[step]["train/grad_norm"] == pytest.approx(norm, rel=0.01)


@pytest.mark.slow
def test_clipping_sees_the_whole_gradient(start: dict[str, Tensor]) -> None:
    """With a tiny limit and a huge eps, Adam's first step is −lr · clipped gradient / eps: its norm shows the clip."""
    place = ("parallel=ring2", "launch.nproc=4", "optim.eps=1e6", "optim.lr=1e6")
    cases = [(*place, f"engine={engine}", f"optim.max_grad_norm={limit}") for engine in ENGINES for limit in (0.5, 0)]
    for case, results in zip(cases, all_steps_of(cases, steps=1), strict=True):
        moved = math.sqrt(sum(float((results[0].weights[n] - start[n]).square().sum()) for n in start))
        expected = 0.5 if case[-1].endswith("0.5") else results[0].rows[0]["train/grad_norm"]
        assert moved == pytest.approx(expected, rel=1e-2), case


def resumed_rank(spec: RankSpec, pairs: Sequence[tuple], folder: str) -> list[tuple]:
    """For each pair of configurations: the first takes two steps and saves; an engine of the second loads that and
    takes the third step, as the first does."""
    taken = []
    for number, (cfg, then) in enumerate(pairs):
        task, path = build(cfg, around=UNPROBED), Path(folder) / str(number)
        run = task.run
        for step in (1, 2):
            train_step(task, step)
        saving = begin_saving(run, path, 2)
        straight = train_step(task, 3)  # while the files are written: a copy, not a view
        reader = saving()
        expected = {name: weight.double().cpu().clone() for name, weight in run.engine.weights()}
        fresh = build(then, around=UNPROBED)
        fresh.evaluate(0)  # what is gathered for it is not what is read next
        load(fresh.run.engine, reader, 2)
        row = train_step(fresh, 3)
        got = {name: weight.double().cpu().clone() for name, weight in fresh.run.engine.weights()}
        taken.append((straight, row, expected, got))
    return taken


KINDS = [("engine=zero2", "engine.offload=optimizer"), ("engine=zero3", "engine.offload=all")]
KINDS += [(f"engine={engine}",) for engine in ENGINES]
PAIRS = [(kind, kind) for kind in KINDS] + [(KINDS[n], KINDS[n - 1]) for n in range(len(KINDS))]


@pytest.mark.slow
def test_what_one_engine_saves_another_loads(tmp_path: Path) -> None:
    """Also with two groups of parameters: DeepSpeed itself would not find the moments of the second."""
    layout = ("parallel=ring2", "train.max_steps=3", "train.batch_size=4", "optim.weight_decay=0.01")
    cfgs = [[compose_config([*BASE, *layout, *kind]) for kind in pair] for pair in PAIRS]
    for results in on_ranks(2, resumed_rank, cfgs, str(tmp_path)):
        for (one, other), (straight, row, expected, got) in zip(PAIRS, results, strict=True):
            assert row["train/loss"] == pytest.approx(straight["train/loss"], rel=1e-6), (one, other)
            # Same engine: to the bit. Across engines, Adam's third step rounds otherwise.
            assert largest_gap(expected, got) <= (0.0 if one == other else 1e-6), (one, other)


EMBEDDING = "model.embed_tokens.weight"
FROZEN = "model.freeze=['model.embed_tokens.*', '*.norm.*']"


@pytest.mark.slow
def test_frozen_parameters_stay_and_the_others_do_not_notice_the_engine(start: dict[str, Tensor]) -> None:
    exact = steps_of("parallel=ring1", "train.precision=fp64", FROZEN, steps=2)[0]
    place = ("parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2", FROZEN)
    for results in all_steps_of([(*place, f"engine={engine}") for engine in ENGINES], steps=2):
        for result in results:
            assert set(result.gradients[0]) == set(exact.gradients[0]) == set(start) - {EMBEDDING, "model.norm.weight"}
            assert largest_gap(exact.gradients[0], result.gradients[0]) < FLOAT32
            assert torch.equal(result.weights[EMBEDDING], start[EMBEDDING])


def poor_rank(spec: RankSpec, cfgs) -> list[list[float]]:
    """Two steps on pairs whose answers are one token: with a ring of 4, there are ranks without a trained token."""
    tasks = [build(cfg, around=UNPROBED) for cfg in cfgs]
    return [[train_step(task, step)["train/grad_norm"] for step in (1, 2)] for task in tasks]


def test_a_rank_without_a_trained_token_does_not_hang_the_others(tmp_path: Path) -> None:
    rows = [{"prompt": "a long prompt " * 3, "chosen": "y", "rejected": "n"} for _ in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = ("data=jsonl", f"data.path={path}", "train.batch_size=2", "launch.device=cpu", "logger=none")
    exact = on_ranks(1, poor_rank, [compose_config([*data, "train.precision=fp64"])])[0][0]
    cfgs = [compose_config([*data, "parallel=ring4", f"engine={engine}"]) for engine in ENGINES]
    for norms_by_engine in on_ranks(4, poor_rank, cfgs):
        for engine, norms in zip(ENGINES, norms_by_engine, strict=True):
            assert norms == pytest.approx(exact, rel=1e-5), engine


def pieces_rank(spec: RankSpec, cfg) -> tuple[int, int, int]:
    """Elements of the model, those that this rank holds of it, and those of the reference, before any pass."""
    from rlexp.training.model.loading import load_config
    from rlexp.training.train import build

    world = build_world(1)
    config = load_config(cfg.model, cfg.data.max_length)
    policies = [build.build_policy(cfg, config, torch.device("cpu"), Wanted(), None) for _ in range(2)]
    build.build_frozen(cfg.engine, policies[1], world, torch.float32)
    held = [sum(p.numel() + p.ds_tensor.numel() for p in policy.parameters()) for policy in policies]
    return sum(p.ds_numel for p in policies[0].parameters()), *held


def test_under_zero3_a_pretrained_model_is_loaded_in_pieces(shared: Path) -> None:
    path = shared / "models" / "stories260K"
    cfg = compose_config(["launch.device=cpu", "logger=none", "launch.nproc=2", "engine=zero3", "model=hf",
                          f"model.path={path}"])  # fmt: skip
    for whole, policy, reference in on_ranks(2, pieces_rank, cfg):
        assert whole == 260032
        assert policy <= reference <= whole // 2 + 100  # rounded up, parameter by parameter


def drawing_rank(spec: RankSpec, cfgs, steps: int) -> list[tuple]:
    """Return for each engine the answers of each rollout and of the held-out prompts, the rows, and the weights."""
    taken = []
    for cfg in cfgs:
        task = build(cfg, around=UNPROBED)
        answers, rows = [], []
        for step in range(1, steps + 1):
            rows.append(train_step(task, step))
            answers += [(step, s.place, s.answer.tolist()) for s in task.rollouts.own_samples]
        rows.append(task.rollouts.evaluate())
        task.close()
        weights = {name: weight.double().clone() for name, weight in task.run.engine.weights()}
        taken.append((answers, rows, weights))
    return taken


def draw_alike(engines_: Sequence[str], ranks: int, *overrides: str) -> None:
    """Float32: until a token flips, which of these seeds does none, all engines draw, score and learn the same."""
    base = ("+experiment=ppo_tiny", "launch.device=cpu", "train.precision=fp32", "rollout.batch_size=8",
            "rollout.n_samples=3", "rollout.epochs=1", "train.batch_size=8", "train.micro_batch_size=2",
            "data.eval_size=3", "rollout.micro_batch_size=5",
            "rollout.stop=[a,e,i,o,u,n,r,s,t,l]", "optim.eps=1e-5", *overrides)  # fmt: skip
    cfgs = [compose_config([*base, f"launch.nproc={ranks}", f"engine={engine}"]) for engine in engines_]
    for first, *others in on_ranks(ranks, drawing_rank, cfgs, 4):
        assert len({len(answer) for _, _, answer in first[0]}) > 1  # rows leave in turn
        for engine, (answers, rows, weights) in zip(engines_[1:], others, strict=True):
            assert answers == first[0], engine
            for row, expected in zip(rows, first[1], strict=True):
                assert row.keys() == expected.keys()
                for name in filter(compared, row):
                    # Measured 2e-5, of objective/kl; a learning rate that is not the critic's would be 0.5.
                    assert row[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-6), (engine, name)
            # 9e-6 measured; with eps=1e-8 Adam made rounding of gradients that are nearly zero 1e-3 large.
            assert largest_gap(first[2], weights) < 1e-4, engine


@pytest.mark.slow
def test_parameters_in_pieces_draw_what_whole_ones_draw() -> None:
    """Two ranks that end at different times, and have as many held-out prompts as cannot be dealt out evenly."""
    draw_alike(("torch", "zero3", "fsdp2"), 2, "parallel=ring2", "loss.critic=shared")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("loss.value_lr=5e-4",), ("loss=grpo",)], ids=["ppo", "grpo"])
def test_every_engine_draws_and_learns_alike(overrides: tuple[str, ...]) -> None:
    draw_alike(("torch", "zero0", "zero1", "zero2", "zero3", "fsdp2"), 4, "parallel=ring2", *overrides)


def evaluated_rank(spec: RankSpec, cfgs) -> list[bool]:
    """Whether an evaluation, after which some engines have their weights gathered, changes what `weights` says."""
    same = []
    for cfg in cfgs:
        task = build(cfg, around=UNPROBED)
        run = task.run
        train_step(task, 1)
        before = {name: weight.clone() for name, weight in run.engine.weights()}
        one, other = task.evaluate(1), task.evaluate(1)
        after = dict(run.engine.weights())
        same.append(one == other and all(torch.equal(before[name], after[name]) for name in before))
    return same


def test_a_piece_of_padding_alone_holds_nothing() -> None:
    parameter, piece = torch.nn.Parameter(torch.zeros(5)), torch.zeros(2)
    places = [place_of_piece(parameter, piece, World(rank, 4, ALONE)) for rank in range(4)]
    assert places == [(0, 2), (2, 2), (4, 1), (6, 0)]


def test_weights_can_be_read_after_an_evaluation() -> None:
    cfgs = [compose_config([*BASE, "parallel=ring2", "train.batch_size=2", "data.eval_size=2", *kind])
            for kind in KINDS]  # fmt: skip
    for same in on_ranks(2, evaluated_rank, cfgs):
        assert same == [True] * len(KINDS)


@pytest.mark.slow
def test_bf16_begins_with_every_bit_and_reduces_in_float32(start: dict[str, Tensor]) -> None:
    """Masters in bfloat16 would lose bits at the start; gradients reduced in bfloat16 are 3e-3 apart."""
    place = ("parallel=ring2", "launch.nproc=4", "train.precision=bf16", "optim.lr=0", "train.micro_batch_size=2")
    plain, *others = all_steps_of([(*place, "engine=torch"), *((*place, *kind) for kind in KINDS)], steps=1)
    for kind, results in zip(KINDS, others, strict=True):
        assert all(torch.equal(results[0].weights[name], start[name]) for name in start), kind
        assert largest_gap(plain[0].gradients[0], results[0].gradients[0]) < 1e-4, kind  # 1e-6 measured


def test_bf16_keeps_float32_masters(start: dict[str, Tensor]) -> None:
    """A step far below bfloat16's resolution moves the masters; both engines move them alike."""
    layout = ("parallel=ring2", "train.precision=bf16", "optim.lr=1e-5", "train.max_steps=3")
    zero, plain = (ranks[0] for ranks in all_steps_of([(*layout, f"engine={e}") for e in ("zero1", "torch")], steps=3))
    moved = max(float((zero.weights[name] - start[name]).abs().max()) for name in start)
    assert 1e-6 < moved < 3e-5  # no more than the learning rates add up to: the masters started from float32
    assert zero.rows[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert [row["train/loss"] for row in zero.rows] == pytest.approx([r["train/loss"] for r in plain.rows], rel=1e-2)


class Poison:
    """A loss that is not finite for one pair of the data set."""

    def __init__(self, loss, value: float, in_gradient: bool) -> None:
        self.loss, self.value, self.in_gradient, self.wanted = loss, value, in_gradient, loss.wanted

    def __call__(self, values):
        result, chosen_P = self.loss(values), values.logps["chosen"]
        hit = (chosen_P - self.value).abs() < 1e-3  # in another pack it is rounded otherwise: 1e-5
        bad = torch.where(hit, torch.nan, 0.0)
        if self.in_gradient:  # the value stays finite, its gradient does not
            spoiled = result.losses_E + torch.where(hit, (chosen_P - chosen_P.detach()).abs().sqrt(), 0.0)
            return dataclasses.replace(result, losses_E=spoiled)
        return dataclasses.replace(result, losses_E=result.losses_E + bad)


def poisoned_rank(spec: RankSpec, cfgs) -> list[tuple[str, bool]]:
    """For each configuration, poison the loss and then the gradient: the message, and whether the weights held."""
    return [poisoned(cfg, in_gradient) for cfg in cfgs for in_gradient in (False, True)]


def poisoned(cfg, in_gradient: bool) -> tuple[str, bool]:
    task = build(cfg, around=UNPROBED)
    run, loss = task.run, task.loss
    step = task.begin(1)
    with torch.no_grad():
        seen = float(step.values(step.packed((5,), Use.collecting), Prepared())[0].logps["chosen"])
    before = {name: weight.clone() for name, weight in run.engine.weights()}
    task.loss = Poison(loss, seen, in_gradient)
    with pytest.raises(UserError) as error:
        train_step(task, 1)
    same = all(torch.equal(weight, before[name]) for name, weight in run.engine.weights())
    return str(error.value), same and step.examples[5].origin in str(error.value)


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_step() -> None:
    place = ("parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2", "train.precision=fp32")
    cfgs = [compose_config([*BASE, *place, f"engine={engine}"]) for engine in ("zero1", "torch")]
    cases = [(cfg.engine.name.value, what) for cfg in cfgs for what in ("loss", "gradient")]
    for case, results in zip(cases, zip(*on_ranks(4, poisoned_rank, cfgs), strict=True), strict=True):
        for message, held in results:
            assert message == results[0][0], case
            assert message.startswith(f"step 1: the {case[1]} is not finite. Samples: "), case
            assert held, case
        if case[1] == "loss":
            assert results[0][0].count("synthetic train pair") == 1, case
