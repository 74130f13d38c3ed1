"""A new kind of training costs one file: supervised training on the chosen answers, as a user would add it.

Nothing in the package knows of it. It trains like any other, over a ring, with accumulation, a short last batch and
evaluation; `rlexp.data` shows its rows, `rlexp.preflight` rehearses it, and `rlexp.verify` finds it right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.losses import LossConfig
from rlexp.config.schema.row_kinds import Kind
from rlexp.data.answer import preview
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import run_ranks
from rlexp.preflight.children import at_once
from rlexp.preflight.predict import rehearsals
from rlexp.preflight.rehearsal.log import passes
from rlexp.preflight.rehearsal.rehearse import RehearsalPlan
from rlexp.training.algos.base import Losses, Values
from rlexp.training.algos.build import LOSSES
from rlexp.training.model.float64 import precise
from rlexp.training.model.loading import load_config, load_model, load_tokenizer
from rlexp.training.sinks.base import Sink, Sinks
from rlexp.training.train.build import build
from rlexp.training.train.examples import read_examples, sampler_of
from rlexp.training.train.loop import train_loop
from rlexp.training.types import Example, Wanted
from rlexp.training.world.groups import ALONE, World
from rlexp.verify.report import scope
from rlexp.verify.verdict import Verification
from rlexp.verify.verification import verify
from tests.helpers.ranks import on_ranks

# ---- the file ----


@dataclass
class SupervisedConfig(LossConfig):
    rows: ClassVar[Kind] = Kind.supervised
    name: str = "supervised"


@dataclass(frozen=True)
class Supervised:
    """−log π of the answers, per token of the train batch."""

    wanted: ClassVar[Wanted] = Wanted(mean_tokens=True)

    def __call__(self, values: Values) -> Losses:
        nll_E = -values.logps["answer"] / values.mean_tokens
        return Losses(nll_E, {"perplexity": nll_E.detach().exp()})


LOSSES[SupervisedConfig] = lambda _cfg: Supervised()


@dataclass
class WrongConfig(SupervisedConfig):
    name: str = "wrong"


class Wrong(Supervised):
    """The same, with a count of the examples that it is shown together."""

    def __call__(self, values: Values) -> Losses:
        mean = float(values.tokens["answer"].mean()) if len(values.tokens["answer"]) else 1.0
        return super().__call__(dataclasses.replace(values, mean_tokens=mean))


LOSSES[WrongConfig] = lambda _cfg: Wrong()

# ---- what is tried ----

BASE = ("launch.device=cpu", "logger=none", "train.precision=fp64", "train.batch_size=4", "data.size=6",
        "data.drop_last=false", "data.eval_size=3", "train.eval_every=2", "train.epochs=2",
        "optim.lr=1e-3")  # fmt: skip
RING = ("parallel=ring2", "launch.nproc=4", "train.micro_batch_size=2")


def composed(*overrides: str) -> Config:
    return dataclasses.replace(compose_config([*BASE, *overrides]), loss=SupervisedConfig())


def supervised_rank(spec: RankSpec, cfg: Config) -> tuple[list[dict], dict[str, Tensor], str]:
    rows: list[dict] = []

    class Keeping(Sink):
        def log(self, row: dict) -> None:
            rows.append(row)

    task = build(cfg)
    train_loop(task, Sinks([Keeping()]))
    assert task.position() is None
    return rows, {name: weight.clone() for name, weight in task.run.engine.weights()}, task.describe()


def first_losses(cfg: Config) -> tuple[float, float]:
    """Return the mean loss per token of the first train batch and of the held-out rows, by transformers alone."""
    examples = read_examples(cfg, load_tokenizer(cfg.model), World(0, 1, ALONE))
    model = load_model(cfg.model, load_config(cfg.model, cfg.data.max_length), cfg.data.max_length, float64=True)
    model.set_attn_implementation("sdpa")

    def mean(rows: Sequence[Example]) -> float:
        total = 0.0
        for row in rows:
            tokens = torch.tensor([[*row.prompt.tolist(), *row.answers[0].tolist()]])
            with torch.no_grad(), precise(torch.float64):
                logps = model.double()(input_ids=tokens).logits[0, :-1].log_softmax(-1)
            targets = tokens[0, len(row.prompt) :]
            total -= float(logps[len(row.prompt) - 1 :].gather(1, targets[:, None]).sum())
        return total / sum(len(row.answers[0]) for row in rows)

    batch = sampler_of(cfg, Kind.supervised, len(examples.train)).batch(1)
    return mean([examples.train[index] for index in batch.indices]), mean(examples.held_out)


Ranks = list[tuple[list[dict], dict[str, Tensor], str]]


def several_rank(spec: RankSpec, cfgs: Sequence[Config]) -> Ranks:
    return [supervised_rank(spec, cfg) for cfg in cfgs]


@pytest.fixture(scope="module")
def on_four() -> tuple[Ranks, Ranks]:
    """What four ranks return of a run, and of one with a learning rate of 0."""
    by_rank = on_ranks(4, several_rank, [composed(*RING, *more) for more in ((), ("optim.lr=0",))])
    return [runs[0] for runs in by_rank], [runs[1] for runs in by_rank]


def test_a_task_of_ones_own_trains_over_the_ring_like_any_other(on_four: tuple[Ranks, Ranks]) -> None:
    alone = composed("parallel=ring1")
    rows, weights, words = on_ranks(1, supervised_rank, alone)[0]
    assert words == "6 answers"
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["train/epoch"] == 1.0
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert rows[0]["train/loss"] == pytest.approx(first_losses(alone)[0], rel=1e-12)
    for others, there, _ in on_four[0]:
        for row, other in zip(rows, others, strict=True):
            for name in (
                "train/loss",
                "train/perplexity",
                "train/logps/answer",
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
    expected = first_losses(composed(*RING))[1]
    for rows, _, _ in on_four[1]:
        assert rows[1]["eval/loss"] == pytest.approx(expected, rel=1e-12)


def test_the_preview_shows_its_rows() -> None:
    shown = preview(composed(), samples=1)
    assert shown.needs == shown.kind == "supervised"
    assert not shown.problems
    assert [each.part for each in shown.lengths] == ["prompt", "answer", "whole sequence"]
    assert shown.steps is not None
    assert shown.steps.run == 4


def rehearsed_rank(_spec: RankSpec, cfgs: Sequence[Config]) -> list[float]:
    """Return the operations of a rank's forward passes, from a process that has computed nothing yet."""
    [logs] = at_once([rehearsals([RehearsalPlan(cfg, load_config(cfg.model, cfg.data.max_length)) for cfg in cfgs])], 1)
    return [sum(each.counts.flops for each in passes(log) if each.phase == "forward") for log in logs]


def test_preflight_rehearses_it() -> None:
    """An answer a sample is half of what a pair is: so are the tokens of the forward pass."""
    pairs = compose_elsewhere(["hardware=h100", "parallel=ring2", "launch.nproc=2", "train.batch_size=1"])
    answers = dataclasses.replace(pairs, loss=SupervisedConfig())
    [(of_pairs, of_answers)] = run_ranks(rehearsed_rank, 1, ([pairs, answers],), timeout=240)
    assert of_answers == pytest.approx(of_pairs / 2, rel=1e-6)


def verified(loss: LossConfig) -> Verification:
    return verify(verified_config(loss), 2, lambda _line: None)


def verified_config(loss: LossConfig) -> Config:
    return dataclasses.replace(composed(*RING, "data.size=12"), loss=loss)


def test_verify_finds_it_right() -> None:
    result = verified(SupervisedConfig())
    assert result.passed, result.failure
    assert result.float64 is not None
    assert result.float64.gauge.largest["loss"] < 1e-12
    assert "held-out values: of the first 3 answers," in scope(verified_config(SupervisedConfig()), result)


@pytest.mark.slow
def test_verify_finds_a_count_of_the_micro_batch() -> None:
    result = verified(WrongConfig())
    assert result.failure is not None
    assert (result.failure.stage, result.failure.module) == ("loss", "rlexp/training/algos/")
