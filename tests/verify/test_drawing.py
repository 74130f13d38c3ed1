"""The reference's own random numbers, cuts and parts by length: they are the product's, and rounding is in doubt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlexp.base.wilson import wilson
from rlexp.config.schema.rollouts import RolloutConfig
from rlexp.training.algos.base import Losses
from rlexp.training.rollout.choose import choose, kept, stream, uniform
from rlexp.verify.by_length import by_length, interval
from rlexp.verify.drawing import HELD_OUT, cut, number_of, strayed
from rlexp.verify.formula import JudgedBatch
from rlexp.verify.norms import in_bfloat16
from rlexp.verify.recording import TokenExample

ROUNDING = 1e-11
CUTS = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.6, "min_p": 0.1}, {"top_p": 1e-9}]


def logits(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 2


@pytest.mark.parametrize("rollout", [0, 7, HELD_OUT])
def test_a_number_is_the_one_that_the_run_draws_by(rollout: int) -> None:
    prompts, numbers = [3, 0, 11], [0, 2, 1]
    ours = [[number_of(42, rollout, prompt, number, at) for prompt, number in zip(prompts, numbers, strict=True)]
            for at in range(4)]  # fmt: skip
    theirs = [uniform(stream(42, rollout, prompts, numbers), at).tolist() for at in range(4)]
    assert ours == theirs


@pytest.mark.parametrize("keys", CUTS)
def test_the_tokens_that_may_be_drawn_are_the_runs(keys: dict[str, float]) -> None:
    cfg = replace(RolloutConfig(), **keys)
    logps_nV = logits(50, 20).log_softmax(-1)
    may_nV, must_nV = cut(logps_nV, cfg, ROUNDING)
    assert torch.equal(may_nV, must_nV)
    assert torch.equal(may_nV, kept(logps_nV, cfg) > 0)


@pytest.mark.parametrize("keys", CUTS)
def test_a_drawn_token_is_the_one_that_its_number_chooses(keys: dict[str, float]) -> None:
    cfg = replace(RolloutConfig(), temperature=0.7, **keys)
    head = torch.nn.Linear(8, 20, bias=False, dtype=torch.float64)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    hidden_nE, numbers_n = (
        logits(60, 8),
        torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )
    tokens_n, _ = choose(head(hidden_nE).detach() / cfg.temperature, numbers_n, cfg)
    found = strayed(head, hidden_nE, tokens_n, numbers_n, cfg, ROUNDING)
    assert (found.apart_n.max(), found.doubtful) == (0.0, 0)
    others = strayed(head, hidden_nE, (tokens_n + 1) % 20, numbers_n, cfg, ROUNDING)
    assert others.apart_n.min() > 1e-6


def test_a_token_on_a_border_is_in_doubt() -> None:
    """Two tokens are equally likely up to rounding, and one of them may be drawn: either is right."""
    head = torch.nn.Identity()
    head.weight = torch.zeros(3, 3)  # its rows are the vocabulary
    rows_nV = torch.tensor([[1.0, 0.0, 1e-13]], dtype=torch.float64).repeat(2, 1)
    cfg = replace(RolloutConfig(), top_k=2)
    numbers_n = torch.tensor([0.99, 0.99], dtype=torch.float64)
    found = strayed(head, rows_nV, torch.tensor([1, 2]), numbers_n, cfg, ROUNDING)
    assert (found.apart_n.tolist(), found.doubtful) == ([0.0, 0.0], 2)
    exact = strayed(head, rows_nV, torch.tensor([1, 2]), numbers_n, cfg, 1e-15)
    assert (exact.apart_n.tolist(), exact.doubtful) == ([1.0, 0.0], 0)


def answer(tokens: int) -> TokenExample:
    ids = np.zeros(tokens - 2, dtype=np.int64)
    return TokenExample(np.zeros(2, dtype=np.int64), {"answer": ids}, {"answer": ids == 0}, "a row")


def test_parts_by_length_are_those_of_hand_arithmetic() -> None:
    """Rows of 4, 5, 6 and 9 tokens: a bound belongs to the part before it. The last part has no row."""
    weights = dict.fromkeys(("loss", "mean_token_accuracy"), torch.tensor([1.0, 3.0, 2.0, 4.0]))
    hits = {"mean_token_accuracy": torch.tensor([1.0, 0.0, 0.5, 0.25])}
    losses = JudgedBatch(Losses(torch.tensor([1.0, 2.0, 3.0, 6.0]), hits, weights), {})
    row = by_length([5, 9], [answer(tokens) for tokens in (4, 5, 6, 9)], losses)
    assert {name: value for name, value in row.items() if "accuracy_" not in name} == {
        "0-5/examples": 2, "0-5/share": 0.4, "0-5/loss": 3 / 4, "0-5/accuracy": 1 / 4,
        "5-9/examples": 2, "5-9/share": 0.6, "5-9/loss": 9 / 6, "5-9/accuracy": 2 / 6,
        "9+/examples": 0, "9+/share": 0.0,
    }  # fmt: skip
    assert (row["0-5/accuracy_low"], row["0-5/accuracy_high"]) == pytest.approx(wilson(0.25, 4.0), rel=1e-12)
    assert by_length([], [answer(4)] * 4, losses) == {}


@pytest.mark.parametrize(("share", "count"), [(0.0, 3.0), (1.0, 7.0), (0.5, 12.0), (0.99, 1e6)])
def test_an_interval_is_wilsons(share: float, count: float) -> None:
    assert interval(share, count) == pytest.approx(wilson(share, count), rel=1e-9, abs=1e-15)


def test_bfloat16_is_torchs() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    values[:3] = torch.tensor([1.00390625, 1.01171875, 0.0])  # halves go to the even number
    assert np.array_equal(in_bfloat16(values.double().numpy()), values.bfloat16().float().numpy())
