"""A new kind of training costs one file: supervised training on the chosen answers, as a user would add it.

Nothing in the package knows of it: it goes through `build`, `train_step` and `train_loop` like any other task, over a
ring, with accumulation, a short last batch and evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.training.dataset.sampler import Batch
from rlexp.training.metrics.meter import SHARDED, Meter
from rlexp.training.ring.groups import World
from rlexp.training.train.examples import pair_sampler, read_pairs
from rlexp.training.train.task import Held, Needs, Step, Task
from rlexp.training.types import Pair
from tests.helpers.ranks import on_ranks

BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", "train.batch_size=4", "data.size=6",
        "data.drop_last=false", "data.eval_size=3", "train.eval_every=2", "train.epochs=2",
        "optim.lr=1e-3")  # fmt: skip


class Supervised(Task):
    kind = "row"

    def __init__(self, cfg: Config, tokenizer: Any, world: World, _bridge: Any) -> None:
        self.needs = Needs()
        self.examples = read_pairs(cfg, tokenizer, world)
        self.sampler = pair_sampler(cfg, len(self.examples.train))

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def batch(self, step: int) -> Batch:
        return self.sampler.batch(step)

    def begin(self, step: int) -> SupervisedStep:
        return SupervisedStep(self, self.batch(step), self.examples.train)

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, float]:
        held_out, meter = self.examples.held_out, Meter(self.run.world, self.run.device)
        whole = SupervisedStep(self, Batch(step, 0, tuple(range(len(held_out)))), held_out)
        for indices in whole.micro_batches:
            whole.loss(whole.load(indices), meter)
        return {f"eval/{name}": value for name, value in meter.reduce().items()}


class SupervisedStep(Step):
    """A loss per token: its sum over the train batch divided by the train batch's count of answer tokens."""

    def __init__(self, task: Supervised, batch: Batch, rows: Sequence[Pair]) -> None:
        world = task.run.world
        self.task, self.batch, self.rows = task, batch, rows
        self.count = sum(len(rows[index].chosen) for index in batch.indices)
        self.micro_batches = batch.micro_batches(world.replica, world.dp_size, task.run.cfg.train.micro_batch_size)

    def load(self, indices: Sequence[int]) -> Held:
        run = self.task.run
        return Held(run.to_device(run.pack([(self.rows[index].prompt, self.rows[index].chosen) for index in indices])))

    def loss(self, held: Held, meter: Meter) -> Tensor:
        run = self.task.run
        loss = -run.engine.forward(held.shard).logps_t.sum() / self.count
        meter.add_total("loss", loss, SHARDED)
        return loss * run.world.size

    def samples(self) -> list[str]:
        return [self.rows[index].origin for index in self.batch.indices]


def supervised_rank(spec: RankSpec, cfg: Config) -> tuple[list[dict], dict[str, Tensor], str]:
    from rlexp.training.sinks.base import Sink, Sinks
    from rlexp.training.train.build import build
    from rlexp.training.train.loop import train_loop

    rows: list[dict] = []

    class Keeping(Sink):
        def log(self, row: dict) -> None:
            rows.append(row)

    task = build(cfg, task_of=Supervised)
    train_loop(task, Sinks([Keeping()]))
    assert task.position() is None
    return rows, {name: weight.clone() for name, weight in task.run.engine.weights()}, task.describe()


def first_losses(cfg: Config) -> tuple[float, float]:
    """Return the mean loss per token of the first train batch and of the held-out rows, by transformers alone."""
    from rlexp.training.model.float64 import precise
    from rlexp.training.model.loading import load_config, load_model, load_tokenizer
    from rlexp.training.ring.groups import ALONE

    examples = read_pairs(cfg, load_tokenizer(cfg.model), World(0, 1, ALONE))
    model = load_model(cfg.model, load_config(cfg.model, cfg.data.max_length), cfg.data.max_length, float64=True)
    model.set_attn_implementation("sdpa")

    def mean(pairs: Sequence[Pair]) -> float:
        total = 0.0
        for pair in pairs:
            tokens = torch.tensor([[*pair.prompt.tolist(), *pair.chosen.tolist()]])
            with torch.no_grad(), precise(torch.float64):
                logps = model.double()(input_ids=tokens).logits[0, :-1].log_softmax(-1)
            targets = tokens[0, len(pair.prompt) :]
            total -= float(logps[len(pair.prompt) - 1 :].gather(1, targets[:, None]).sum())
        return total / sum(len(pair.chosen) for pair in pairs)

    batch = pair_sampler(cfg, len(examples.train)).batch(1)
    return mean([examples.train[index] for index in batch.indices]), mean(examples.held_out)


RING = ("parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2")
Ranks = list[tuple[list[dict], dict[str, Tensor], str]]


def several_rank(spec: RankSpec, cfgs: Sequence[Config]) -> Ranks:
    return [supervised_rank(spec, cfg) for cfg in cfgs]


@pytest.fixture(scope="module")
def on_four() -> tuple[Ranks, Ranks]:
    """What four ranks return of a run, and of one with a learning rate of 0."""
    by_rank = on_ranks(4, several_rank, [compose_config([*BASE, *RING, *more]) for more in ((), ("optim.lr=0",))])
    return [runs[0] for runs in by_rank], [runs[1] for runs in by_rank]


def test_a_task_of_ones_own_trains_over_the_ring_like_any_other(on_four: tuple[Ranks, Ranks]) -> None:
    alone = compose_config([*BASE, "parallel=ring1"])
    rows, weights, words = on_ranks(1, supervised_rank, alone)[0]
    assert words == "6 rows"
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["train/epoch"] == 1.0
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert rows[0]["train/loss"] == pytest.approx(first_losses(alone)[0], rel=1e-12)
    for others, there, _ in on_four[0]:
        for row, other in zip(rows, others, strict=True):
            for name in (
                "train/loss",
                "train/grad_norm",
                "train/tokens",
                *(["eval/loss"] if "eval/loss" in row else []),
            ):
                assert other[name] == pytest.approx(row[name], rel=1e-12), name
        for name, weight in weights.items():
            assert (weight - there[name]).abs().max() <= 1e-12 * weight.abs().max(), name
    assert [("eval/loss" in row) for row in rows] == [False, True, False, True]


def test_an_evaluation_counts_every_held_out_row_once(on_four: tuple[Ranks, Ranks]) -> None:
    """Three rows, of which one replica has one more than the other."""
    expected = first_losses(compose_config([*BASE, *RING]))[1]
    for rows, _, _ in on_four[1]:
        assert rows[1]["eval/loss"] == pytest.approx(expected, rel=1e-12)
