"""Runs that draw their own samples have the same curves on every layout: part of docs/measured/invariance.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from bench.curves import Curve, draw, excesses
from bench.layouts import ROLLOUT_BASELINE, ROLLOUT_PAIR, VARIANTS, RolloutCase, rollout_cases
from bench.rollout_tables import STEPS, config_of
from rlexp.config.load import compose_config
from rlexp.training.model.loading import byte_tokenizer
from tests.helpers.paths import FILES

COPIED = "data.share_prefix=false"
LATER = (
    *("ppo, divergence in the reward, adaptive", "ppo, entropy, dual clip, narrow", "ppo, overlong penalised"),
    *("ppo, temperature and top-k", "ppo, activations recomputed", "grpo, filtered", "ppo, generated sums"),
)
GRID = [RolloutCase(2, 2, 2, 3, 6), RolloutCase(4, 1, 4, 16, 16, packing=False, tokens=200)]


@pytest.fixture(scope="module")
def baseline() -> Curve:
    """The run in one process, in which each sample has a prompt of its own."""
    [curve] = draw([config_of(ROLLOUT_BASELINE, COPIED)])
    return curve


def test_the_baseline_has_what_a_layout_could_move(baseline: Curve) -> None:
    assert len(baseline.rows) == STEPS
    assert [len(rollout) for rollout in baseline.drawn] == [16, 16]  # the second begins after step 4
    lengths = {len(sample.tokens) for rollout in baseline.drawn for sample in rollout}
    assert max(lengths) == 12  # some answers reached the limit, others stopped
    assert len(lengths) > 2
    assert baseline.drawn[0][0].tokens != baseline.drawn[0][1].tokens  # two samples of a prompt
    assert len({sample.score for sample in baseline.drawn[0]}) > 2


@pytest.mark.parametrize(
    "grid",
    [GRID, pytest.param([RolloutCase(1, 4, 2, 1, 1)], marks=pytest.mark.slow)],
    ids=["rings of 2 and 4", "replicas"],
)
def test_rollouts_do_not_move_with_the_layout(baseline: Curve, grid: list[RolloutCase]) -> None:
    for case, curve in zip(grid, draw([config_of(case) for case in grid]), strict=True):
        assert curve.samples == baseline.samples
        assert excesses(baseline, curve) == [], case.label
        assert case.packing is any(row["train/shared_tokens"] > 0 for row in curve.rows), case.label


def test_epochs_take_every_sample_once_in_another_order(baseline: Curve) -> None:
    first, second = (baseline.samples[n] + baseline.samples[n + 1] for n in (0, 2))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants",
    [[name for name in VARIANTS if name not in LATER], pytest.param(list(LATER), marks=pytest.mark.prove)],
    ids=["every algorithm", "more switches"],
)
def test_no_algorithm_and_no_switch_moves_with_the_layout(variants: list[str]) -> None:
    alone, other = ROLLOUT_PAIR
    configs = [(config_of(alone, *VARIANTS[name], COPIED), config_of(other, *VARIANTS[name])) for name in variants]
    curves = draw([each for pair in configs for each in pair])
    for number, name in enumerate(variants):
        assert excesses(curves[2 * number], curves[2 * number + 1]) == [], name


@pytest.mark.slow
@pytest.mark.prove
def test_the_whole_grid() -> None:
    cases = rollout_cases()
    baseline, *curves = draw([config_of(case) for case in cases])
    for case, curve in zip(cases[1:], curves, strict=True):
        assert excesses(baseline, curve) == [], case.label


@pytest.mark.slow
def test_widths_move_nothing_that_is_drawn_scored_or_trained(tmp_path: Path) -> None:
    """Prompts of one token, of prime lengths, and of very many; a reward model has widths of its own."""
    torch.manual_seed(0)
    described = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
                            vocab_size=512, num_labels=1, pad_token_id=0)  # fmt: skip
    LlamaForSequenceClassification(described).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    words = ("launch.device=cpu", "logger=none", "train.precision=fp64", "loss=grpo", "data=jsonl", "parallel.cut=auto",
             f"data.path={FILES}/rows/uneven.jsonl", "data.max_length=900", "train.max_steps=2",
             "rollout.batch_size=4", "rollout.n_samples=2", "rollout.max_new_tokens=12", "reward=model",
             "train.batch_size=8", f"reward.path={tmp_path}", "reward.precision=fp64")  # fmt: skip
    ways = [("parallel=ring1",), ("parallel=elastic", "launch.nproc=4"), ("parallel=ring2", "launch.nproc=4")]
    alone, *others = draw([compose_config([*words, *way]) for way in ways])
    for way, curve in zip(ways[1:], others, strict=True):
        assert excesses(alone, curve) == [], way
    for widths in (("1",), ("2", "4")):
        assert any(row[f"train/ring_width_{width}"] for row in others[0].rows for width in widths), widths


def test_the_comparison_sees_another_token_score_and_advantage(baseline: Curve) -> None:
    curve = dataclasses.replace(baseline, drawn=baseline.drawn[:1])
    sample = curve.drawn[0][3]
    moved = sample.advantages + np.eye(len(sample.advantages))[0] * 1e-9
    for other, said in (
        (dataclasses.replace(sample, tokens=(*sample.tokens[:-1], sample.tokens[-1] + 1)), "sample 3 is ("),
        (dataclasses.replace(sample, score=sample.score + 1e-9), "sample 3 scored "),
        (dataclasses.replace(sample, advantages=moved), "sample 3 has advantages "),
    ):
        changed = Curve(curve.rows, curve.weights, curve.samples, [[*curve.drawn[0][:3], other, *curve.drawn[0][4:]]])
        assert [line.startswith(f"rollout 0: {said}") for line in excesses(curve, changed)] == [True]
