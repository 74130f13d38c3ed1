"""Preference losses against arithmetic by hand, and against TRL. What is planted into a formula is found here."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlexp.training.algos.implicit_rewards import accuracies

from rlexp.config.schema.losses import DPOConfig
from rlexp.training.algos.base import PairLogps
from rlexp.training.algos.build import build_loss
from rlexp.training.algos.dpo import DPO
from rlexp.verify.records import SIDES
from tests.helpers import textbook
from tests.helpers.faults.algos import FORMULA_FAULTS
from tests.helpers.faults.base import Fault


def logps(chosen: list[float], rejected: list[float]) -> PairLogps:
    return PairLogps(torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64))


def test_dpo_by_hand() -> None:
    policy, reference = logps([-10.0, -20.0], [-12.0, -15.0]), logps([-11.0, -19.0], [-11.0, -16.0])
    result = DPO(beta=0.5)(policy, reference)
    # margins of the log-ratios: (1 − (−1)) = 2 and (−1 − 1) = −2
    expected = [math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(1.0))]
    assert result.losses_P.tolist() == pytest.approx(expected, rel=1e-15)
    assert result.metrics_P["rewards/chosen"].tolist() == [0.5, -0.5]
    assert result.metrics_P["rewards/rejected"].tolist() == [-0.5, 0.5]
    assert result.metrics_P["rewards/margins"].tolist() == [1.0, -1.0]
    assert result.metrics_P["rewards/accuracies"].tolist() == [1.0, 0.0]


def test_label_smoothing_by_hand() -> None:
    policy, reference = logps([-10.0], [-12.0]), logps([-11.0], [-11.0])
    expected = 0.9 * math.log(1 + math.exp(-0.2)) + 0.1 * math.log(1 + math.exp(0.2))
    assert float(DPO(0.1, label_smoothing=0.1)(policy, reference).losses_P) == pytest.approx(expected, rel=1e-14)


def test_a_policy_that_is_its_reference_has_ln_2() -> None:
    same = logps([-123.4, -5.6], [-78.9, -0.1])
    result = DPO()(same, same)
    assert result.losses_P.tolist() == pytest.approx([math.log(2)] * 2, rel=1e-15)
    assert result.metrics_P["rewards/accuracies"].tolist() == [0.5, 0.5]


def test_its_gradient_by_hand() -> None:
    policy = logps([-10.0], [-12.0])
    policy.chosen_P.requires_grad_()
    policy.rejected_P.requires_grad_()
    DPO(beta=0.5)(policy, logps([-11.0], [-11.0])).losses_P.sum().backward()
    slope = -0.5 / (1 + math.exp(1.0))
    assert float(policy.chosen_P.grad) == pytest.approx(slope, rel=1e-14)
    assert float(policy.rejected_P.grad) == pytest.approx(-slope, rel=1e-14)


def test_empty_micro_batch_has_no_losses() -> None:
    empty = logps([], [])
    assert DPO()(empty, empty).losses_P.shape == (0,)


def test_a_margin_within_rounding_is_half_a_win() -> None:
    magnitude = torch.full((4,), 100.0)
    margins = torch.tensor([1e-6, -1e-6, 1e-4, -1e-4])
    assert accuracies(margins, magnitude).tolist() == [0.5, 0.5, 1.0, 0.0]


def test_the_loss_has_the_values_of_its_configuration() -> None:
    assert build_loss(DPOConfig(beta=0.3, label_smoothing=0.2)) == DPO(beta=0.3, label_smoothing=0.2)


def test_loss_and_derivative_equal_the_second_writing() -> None:
    """The paper's formula in numpy, at random log-probabilities that lie far apart."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        PairLogps(*(9 * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))) for _ in range(2)
    )
    policy.chosen_P.requires_grad_()
    policy.rejected_P.requires_grad_()
    result = DPO(beta=0.3, label_smoothing=0.2)(policy, reference)
    sums = {f"{who}/{side}": getattr(logps, f"{side}_P").detach().numpy()
            for who, logps in (("policy", policy), ("reference", reference)) for side in SIDES}  # fmt: skip
    losses, slopes = textbook.preference_losses(sums, 0.3, 0.2), textbook.preference_slopes(sums, 0.3, 0.2)
    assert result.losses_P.tolist() == pytest.approx(losses, rel=1e-14)
    result.losses_P.sum().backward()
    for side, logps_P in (("chosen", policy.chosen_P), ("rejected", policy.rejected_P)):
        assert logps_P.grad is not None
        assert logps_P.grad.tolist() == pytest.approx(slopes[side], rel=1e-13)
    for name, values in textbook.rewards(sums, 0.3).items():
        assert result.metrics_P[name].tolist() == pytest.approx(values, rel=1e-14), name


# ---- another implementation ----


def trl_loss(tokens: Mapping[str, torch.Tensor], kind: str, beta: float, smoothing: float) -> torch.Tensor:
    """Return the loss of TRL's DPOTrainer; its method is called without a trainer.

    `tokens` holds log-probabilities of tokens, of the policy and of the reference: a row for each chosen answer, then
    one for each rejected answer. The prompt is one token.
    """
    from trl import DPOTrainer

    rows = tokens["policy"].shape[0]
    mask = torch.ones(rows, tokens["policy"].shape[1] + 1, dtype=torch.int64)
    mask[:, 0] = 0
    nothing = torch.zeros_like(tokens["policy"]).detach()

    def model(**_: Any) -> Any:
        return SimpleNamespace(log_probs=tokens["policy"], entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)

    chosen, rejected = tokens["reference"].sum(1).chunk(2)
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True), aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0], beta=beta, label_smoothing=smoothing,
        use_weighting=False, _total_train_tokens=0, _tp_size=1, _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(device="cpu", gather=lambda each: each, gather_for_metrics=lambda each: each),
    )  # fmt: skip
    inputs = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask,
              "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}  # fmt: skip
    return DPOTrainer._compute_loss(stub, model, inputs, False)


@pytest.mark.slow  # importing TRL takes more than three seconds
@pytest.mark.parametrize("beta", [0.1, 2.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_and_gradient_are_trls(beta: float, smoothing: float) -> None:
    """TRL's `sigmoid` ignores `label_smoothing`, so it is DPO without it only. Its `aot` orders pairs by their margins;
    of one pair it is DPO with label smoothing. They differ by 2.5e-15 at most, by rounding where log-ratios cancel."""
    generator = torch.Generator().manual_seed(1)
    pairs, length = 20, 7
    tokens = {who: -3 * torch.rand(2 * pairs, length, generator=generator, dtype=torch.float64)
              for who in ("policy", "reference")}  # fmt: skip
    tokens["policy"].requires_grad_()
    policy, reference = (PairLogps(*tokens[who].sum(1).chunk(2)) for who in ("policy", "reference"))
    losses_P = DPO(beta, smoothing)(policy, reference).losses_P
    (gradient,) = torch.autograd.grad(losses_P.sum(), tokens["policy"])
    ours_P = losses_P.detach()
    if smoothing == 0.0:
        for ignored in (0.0, 0.4):
            wanted = trl_loss(tokens, "sigmoid", beta, ignored)
            assert float(ours_P.mean()) == pytest.approx(float(wanted.detach()), rel=1e-13)
            (its,) = torch.autograd.grad(wanted, tokens["policy"])
            torch.testing.assert_close(gradient / pairs, its, rtol=1e-13, atol=0)
    for pair in range(pairs):
        one = {who: each[[pair, pairs + pair]] for who, each in tokens.items()}
        wanted = trl_loss(one, "aot", beta, smoothing)
        assert float(ours_P[pair]) == pytest.approx(float(wanted.detach()), rel=1e-13)
        (its,) = torch.autograd.grad(wanted, tokens["policy"])
        torch.testing.assert_close(gradient[[pair, pairs + pair]], its[[pair, pairs + pair]], rtol=1e-13, atol=0)


# ---- what is planted is found ----

CHECKS = (
    test_dpo_by_hand,
    test_label_smoothing_by_hand,
    test_a_policy_that_is_its_reference_has_ln_2,
    test_its_gradient_by_hand,
    test_the_loss_has_the_values_of_its_configuration,
    test_loss_and_derivative_equal_the_second_writing,
)


@pytest.mark.parametrize("fault", FORMULA_FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_formula_is_found(fault: Fault) -> None:
    reached: list[bool] = []
    undo = fault.plant(lambda: reached.append(True))
    try:
        found = [check.__name__ for check in CHECKS if not passes(check)]
    finally:
        undo()
    assert reached
    assert found
    assert all(map(passes, CHECKS))


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True
