"""Preference losses against arithmetic by hand, and against the textbook. What is planted into a formula is found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlexp.config.schema.losses import DPOConfig, IPONormalize, MPOConfig, Shift
from rlexp.training.algos.base import Values
from rlexp.training.algos.build import build_loss
from rlexp.training.algos.log_ratios import accuracies
from rlexp.training.algos.pairs import log_odds
from rlexp.verify.recording import Array
from tests.helpers import textbook_losses as textbook
from tests.helpers.faults.algos import FORMULA_FAULTS
from tests.helpers.faults.base import Fault
from tests.helpers.preference_values import LOSSES, random_values, sides, slopes, sums_of, trained, values_of
from tests.oracles.examples import SIDES

# Log-ratios of 1 and −1; four and six tokens, so log-probabilities of −2.5 and −2 per token.
PAIR = values_of(sides([-10.0], [-12.0]), sides([-11.0], [-11.0]), sides([4.0], [6.0]))


def loss_of(name: str, values: Values, **keys: Any) -> list[float]:
    losses: list[float] = build_loss(LOSSES[name](**{"sft_weight": 0.0, **keys}))(values).losses_E.tolist()
    return losses


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


HAND: list[tuple[str, dict[str, Any], float]] = [
    ("dpo", {"beta": 0.5}, softplus(-1.0)),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1}, 0.9 * softplus(-1.0) + 0.1 * softplus(1.0)),
    ("dpo_norm", {"beta": 0.5}, softplus(-0.5 * (1 / 4 + 1 / 6))),
    ("ipo", {"beta": 0.5}, (1 / 4 + 1 / 6 - 1) ** 2),
    ("ipo", {"beta": 0.25, "normalize": IPONormalize.sequence}, 0.0),
    ("ipo", {"beta": 0.1, "normalize": IPONormalize.sequence}, 9.0),
    ("apo_zero", {"beta": 0.5}, 2 * sigma(-0.5)),
    ("apo_down", {"beta": 0.5}, sigma(0.5) + 1 - sigma(1.0)),
    ("simpo", {"beta": 0.5, "gamma": 0.3}, softplus(0.25 + 0.3)),
    ("orpo", {"beta": 0.5}, -0.5 * math.log(sigma(math.log(odds(-2.5) / odds(-2.0))))),
    ("cpo", {"beta": 0.25}, softplus(-0.5)),
    ("bco_pair", {"beta": 0.5, "shift": Shift.none}, 2 * softplus(-0.5)),
    ("hinge", {"beta": 0.25}, 0.5),
    ("hinge", {"beta": 0.75}, 0.0),
    ("robust", {"beta": 0.5, "label_smoothing": 0.1}, (0.9 * softplus(-1.0) - 0.1 * softplus(1.0)) / 0.8),
    ("aot", {"beta": 0.5}, softplus(-1.0)),
    ("aot_unpaired", {"beta": 0.5}, softplus(-1.0)),
    ("exo_pair", {"beta": 0.5, "label_smoothing": 0.1},
     sigma(1.0) * math.log(sigma(1.0) / 0.9) + sigma(-1.0) * math.log(sigma(-1.0) / 0.1)),
    ("nca_pair", {"beta": 0.5}, softplus(-0.5) + softplus(0.5) / 2 + softplus(-0.5) / 2),
    ("sppo_hard", {"beta": 0.25}, 2.0),
    ("discopop", {"beta": 0.5, "tau": 0.5}, (1 - sigma(2.0)) * softplus(-1.0) + sigma(2.0) * math.exp(-1.0)),
]  # fmt: skip


def test_each_loss_by_hand() -> None:
    for name, keys, expected in HAND:
        assert loss_of(name, PAIR, **keys) == pytest.approx([expected], rel=1e-13), (name, keys)


def test_rewards_of_whole_answers_and_of_tokens() -> None:
    expected = dict.fromkeys(LOSSES, (0.5, -0.5)) | {"cpo": (-5.0, -6.0), "simpo": (-1.25, -1.0), "orpo": (-1.25, -1.0)}
    for name, both in expected.items():
        logged = build_loss(LOSSES[name](beta=0.5))(PAIR).metrics_E
        assert (float(logged["rewards/chosen"]), float(logged["rewards/rejected"])) == both, name


def test_odds_that_are_logged() -> None:
    logged = build_loss(LOSSES["orpo"]())(PAIR).metrics_E
    ratio = math.log(odds(-2.5) / odds(-2.0))
    assert float(logged["log_odds_chosen"]) == pytest.approx(ratio, rel=1e-14)
    assert float(logged["log_odds_ratio"]) == pytest.approx(math.log(sigma(ratio)), rel=1e-14)


def test_odds_keep_their_digits() -> None:
    """Where p is near 1 or near 0, and where p is 1 in float64."""
    logp = torch.tensor([-1e-15, -1e-9, -800.0, 0.0], dtype=torch.float64, requires_grad=True)
    log_odds(logp).sum().backward()
    expected = [15 * math.log(10) - 1e-15, 9 * math.log(10) - 5e-10, -800.0, 52 * math.log(2)]
    assert log_odds(logp).tolist() == pytest.approx(expected, rel=1e-14)
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([1e15, 1e9, 1.0, 0.0], rel=1e-6)


def test_of_equal_values_the_earlier_pair_comes_first() -> None:
    policy = trained(sides([1.0] * 40, [1.0] * 40))
    reference = sides([float(place) for place in range(40)], [0.0] * 40)
    losses_P = build_loss(LOSSES["aot"](beta=1.0))(values_of(policy, reference)).losses_E
    assert losses_P.tolist() == pytest.approx([softplus(place) for place in range(40)])
    assert slopes(losses_P, policy)["chosen"].tolist() == pytest.approx([-sigma(place) for place in range(40)])


def test_the_shift_is_the_mean_of_all_rewards_so_far() -> None:
    """Rewards of 0.5 and −0.5 would have no shift; so the first batch has 3 and 1, and the second 2 and 0."""
    loss = build_loss(LOSSES["bco_pair"](beta=0.5))
    first, second = (values_of(sides([c], [r]), sides([0.0], [0.0])) for c, r in ((6.0, 2.0), (4.0, 0.0)))
    after = loss(first)
    assert after.carried == {"bco_pair/rewards": 2.0, "bco_pair/answers": 2.0}
    assert after.losses_E.tolist() == pytest.approx([2 * softplus(-1.0)])
    assert after.metrics_E["bco_pair/shift"].tolist() == [2.0]
    later = loss(replace(second, carried=after.carried))
    assert later.carried == {"bco_pair/rewards": 1.5, "bco_pair/answers": 4.0}
    assert later.losses_E.tolist() == pytest.approx([softplus(-0.5) + softplus(-1.5)])
    held_out = loss(replace(second, carried=after.carried, held_out=True))
    assert held_out.carried == after.carried
    assert held_out.losses_E.tolist() == pytest.approx([softplus(0.0) + softplus(-2.0)])
    at_first = loss(replace(second, held_out=True))
    assert at_first.carried == {}
    assert at_first.losses_E.tolist() == pytest.approx([softplus(-2.0) + softplus(0.0)])


def test_a_sum_of_losses() -> None:
    """MPO: 0.8 of DPO and 0.2 of BCO, and the likelihood of the chosen answer per token."""
    terms = [{"loss": "dpo", "weight": 0.8}, {"loss": "bco_pair", "weight": 0.2, "shift": "none"}]
    loss = build_loss(MPOConfig(beta=0.5, sft_weight=1.5, terms=terms))
    result = loss(replace(PAIR, mean_tokens=5.0))
    parts = {"loss/dpo": 0.8 * softplus(-1.0), "loss/bco_pair": 0.4 * softplus(-0.5)}
    assert float(result.losses_E) == pytest.approx(sum(parts.values()) + 1.5 * 10 / 5, rel=1e-14)
    assert {name: float(result.metrics_E[name]) for name in parts} == pytest.approx(parts, rel=1e-14)
    assert float(result.metrics_E["nll_loss"]) == 2.0


def test_a_term_without_reference_is_shown_none() -> None:
    both = build_loss(MPOConfig(beta=0.5, terms=[{"loss": "cpo", "beta": 0.5}, {"loss": "dpo"}]))(PAIR)
    assert float(both.losses_E) == pytest.approx(2 * softplus(-1.0), rel=1e-14)
    assert float(both.metrics_E["rewards/chosen"]) == -5.0  # CPO's


def test_the_on_policy_weight() -> None:
    """The chosen answer's tokens are e^−0.5 times as probable as drawn ones, and the rejected one's e^0.25 times."""
    policy = trained(PAIR.logps)
    values = replace(PAIR, logps=policy, of_tokens={"likelihoods": sides([-8.0], [-13.5])}, mean_tokens=5.0)
    result = build_loss(DPOConfig(beta=0.5, wpo=True, sft_weight=1.0))(values)
    assert float(result.metrics_E["wpo_weight"]) == pytest.approx(math.exp(-0.25), rel=1e-14)
    assert result.losses_E.tolist() == pytest.approx([math.exp(-0.25) * softplus(-1.0) + 2], rel=1e-14)
    assert float(slopes(result.losses_E, policy)["rejected"]) == pytest.approx(math.exp(-0.25) * 0.5 * sigma(-1.0))


def test_what_a_loss_asks_for() -> None:
    for name, kind in LOSSES.items():
        asks = build_loss(kind(beta=0.5, sft_weight=0.0)).wanted
        assert asks.reference == kind.has_reference, name
        assert asks.whole_batch == (name in ("aot", "aot_unpaired", "bco_pair")), name
    assert not build_loss(LOSSES["bco_pair"](shift=Shift.none)).wanted.whole_batch


def test_empty_micro_batch_has_no_losses() -> None:
    empty = values_of(sides([], []), sides([], []), sides([], []))
    for name, kind in LOSSES.items():
        assert build_loss(kind())(empty).losses_E.shape == (0,), name


def test_a_margin_within_rounding_is_half_a_win() -> None:
    magnitude = torch.full((4,), 100.0)
    margins = torch.tensor([1e-6, -1e-6, 1e-4, -1e-4])
    assert accuracies(margins, magnitude).tolist() == [0.5, 0.5, 1.0, 0.0]


def test_a_tie_is_measured_in_what_is_compared() -> None:
    """A difference of 1e-5 per token is far beyond rounding, even of an answer of a thousand tokens."""
    long = values_of(sides([-1000.0], [-1000.01]), None, sides([1000.0], [1000.0]))
    assert float(build_loss(LOSSES["simpo"]())(long).metrics_E["rewards/accuracies"]) == 1.0


# ---- the second writing ----

OTHER = {  # values of keys that are not the default, to find a key that is not handed on
    "label_smoothing": 0.2, "gamma": 0.7, "tau": 0.3, "normalize": IPONormalize.sequence, "shift": Shift.none,
}  # fmt: skip


def test_every_loss_equals_the_second_writing() -> None:
    """Compare every loss of the schema, with its own defaults and with other values. None is without one."""
    for name, kind in LOSSES.items():
        own = {field.name for field in dataclasses.fields(kind)} & set(OTHER)
        for keys in ({}, {key: OTHER[key] for key in own}):
            equals_the_second_writing(name, {"beta": 0.3, **keys})


def equals_the_second_writing(name: str, keys: dict[str, Any]) -> None:
    values = random_values(7)
    margin_weight = 0.4 if "margin_weight" in LOSSES[name].fits else 0.0
    policy = trained(values.logps)
    cfg = LOSSES[name](**keys, margin_weight=margin_weight, sft_weight=0.0)
    carried = {"bco_pair/rewards": 0.5, "bco_pair/answers": 4.0}
    losses_P = build_loss(cfg)(replace(values, logps=policy, carried=carried)).losses_E
    assert values.margin_E is not None
    tokens = {side: each.numpy() for side, each in values.tokens.items()}
    used = {key: getattr(each, "value", each) for key, each in vars(cfg).items() if key in ("beta", *OTHER)}
    used["margin"] = margin_weight * values.margin_E.numpy()
    sums = sums_of(values)
    if "shift" in used:
        rewards = np.concatenate([[0.2, 0.8, 0.1, 0.9], *(cfg.beta * ratio for ratio in textbook.log_ratios(sums))])
        used["shift"] = rewards.mean() if used["shift"] == "mean" else 0.0

    def written(sums: dict[str, Array]) -> Array:
        return textbook.losses_of(name, sums, tokens, **used)

    assert losses_P.tolist() == pytest.approx(written(sums), rel=1e-12), (name, keys)
    found, step = slopes(losses_P, policy), 1e-5
    for side in SIDES:
        for pair in range(7):
            up, down = ({**sums, f"policy/{side}": moved(sums[f"policy/{side}"], pair, by)} for by in (step, -step))
            slope = (written(up).sum() - written(down).sum()) / (2 * step)
            assert float(found[side][pair]) == pytest.approx(slope, rel=1e-6, abs=1e-8), (name, side)


def moved(values: Array, place: int, by: float) -> Array:
    values = values.copy()
    values[place] += by
    return values


def test_rewards_of_dpo_equal_the_second_writing() -> None:
    values = random_values(50)
    result = build_loss(DPOConfig(beta=0.3, label_smoothing=0.2))(values)
    for name, each in textbook.rewards(sums_of(values), 0.3).items():
        assert result.metrics_E[name].tolist() == pytest.approx(each, rel=1e-14), name


# ---- what is planted is found ----

CHECKS = (
    test_each_loss_by_hand, test_rewards_of_whole_answers_and_of_tokens, test_odds_that_are_logged,
    test_odds_keep_their_digits, test_of_equal_values_the_earlier_pair_comes_first,
    test_the_shift_is_the_mean_of_all_rewards_so_far, test_a_sum_of_losses, test_a_term_without_reference_is_shown_none,
    test_the_on_policy_weight, test_what_a_loss_asks_for, test_a_margin_within_rounding_is_half_a_win,
    test_a_tie_is_measured_in_what_is_compared, test_every_loss_equals_the_second_writing,
    test_rewards_of_dpo_equal_the_second_writing,
)  # fmt: skip


@pytest.mark.parametrize("fault", FORMULA_FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_formula_is_found(fault: Fault) -> None:
    reached: list[bool] = []
    undo = fault.plant(lambda: reached.append(True))
    try:
        found = any(not passes(check) for check in CHECKS)
    finally:
        undo()
    assert reached
    assert found


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True
