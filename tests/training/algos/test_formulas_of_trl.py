"""Preference losses and their gradients against TRL's, on log-probabilities of tokens."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.config.schema.losses import MPOConfig, PreferenceConfig, Shift
from rlexp.training.algos.base import Values
from rlexp.training.algos.build import build_loss
from tests.helpers.preference_values import LOSSES

pytestmark = pytest.mark.slow  # importing TRL takes more than three seconds

PAIRS, LONGEST = 20, 9
# TRL's name of a loss, ours, and our keys; its label smoothing is given to both where ours has the key.
TYPES: list[tuple[str, str, dict[str, Any]]] = [
    ("sigmoid", "dpo", {}),
    ("sigmoid_norm", "dpo_norm", {}),
    ("ipo", "ipo", {}),
    ("hinge", "hinge", {}),
    ("robust", "robust", {"label_smoothing": 0.2}),
    ("bco_pair", "bco_pair", {"shift": Shift.none}),
    ("exo_pair", "exo_pair", {"label_smoothing": 1e-3}),
    ("nca_pair", "nca_pair", {}),
    ("sppo_hard", "sppo_hard", {}),
    ("aot", "aot", {"label_smoothing": 0.2}),
    ("aot_unpaired", "aot_unpaired", {"label_smoothing": 0.2}),
    ("apo_zero", "apo_zero", {}),
    ("apo_down", "apo_down", {}),
    ("discopop", "discopop", {"tau": 0.05}),
]


@dataclass(frozen=True)
class Tokens:
    """Log-probabilities of tokens: a row for each chosen answer, then one for each rejected one; 0 behind the end."""

    policy: Tensor
    reference: Tensor
    mask: Tensor
    likelihoods: Tensor  # log Σ p²

    def weighted(self, tail: float) -> Tensor:
        """Weights of tokens that are `tail` beyond the length of the pair's shorter answer."""
        lengths = self.mask.sum(1)
        shorter = torch.minimum(*lengths.chunk(2)).repeat(2)
        behind = torch.arange(LONGEST) >= shorter[:, None]
        return self.mask * (1 - (1 - tail) * behind.double())


def tokens_at_random(seed: int = 1) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (2 * PAIRS, 1), generator=generator)
    mask = (torch.arange(LONGEST) < lengths).double()
    policy, reference, likelihoods = (-3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) * mask
                                      for _ in range(3))  # fmt: skip
    return Tokens(policy.requires_grad_(), reference, mask, likelihoods)


def by_side(values: Tensor) -> dict[str, Tensor]:
    return dict(zip(("chosen", "rejected"), values.chunk(2), strict=True))


def values_of(tokens: Tokens, tail: float = 1.0) -> Values:
    weights, counts = tokens.weighted(tail), by_side(tokens.mask.sum(1))
    return Values(
        logps=by_side((tokens.policy * weights).sum(1)),
        reference=by_side((tokens.reference * weights).sum(1)),
        tokens=counts,
        of_tokens={"likelihoods": by_side((tokens.likelihoods * tokens.mask).sum(1))},
        mean_tokens=float(counts["chosen"].mean()),
    )


def trl_loss(
    tokens: Tokens, kinds: Sequence[str], weights: Sequence[float], beta: float, *, label_smoothing: float = 0.0,
    tau: float = 0.05, ld_alpha: float | None = None, weighting: bool = False,
) -> tuple[Tensor, Mapping[str, list[float]]]:  # fmt: skip
    """Return the loss of TRL's DPOTrainer, and what it logs; its method is called without a trainer.

    The prompt is one token.
    """
    from trl import DPOTrainer

    mask = torch.cat([torch.zeros(2 * PAIRS, 1), tokens.mask], dim=1).long()
    nothing = torch.zeros_like(tokens.reference)

    def model(**_: Any) -> Any:
        return SimpleNamespace(log_probs=tokens.policy, log_sum_sq_probs=tokens.likelihoods, entropy=nothing,
                               mean_logits=nothing, is_top1=nothing > 0)  # fmt: skip

    chosen, rejected = (tokens.reference * tokens.weighted(1.0 if ld_alpha is None else ld_alpha)).sum(1).chunk(2)
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True), aux_loss_enabled=False, ld_alpha=ld_alpha, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=kinds, loss_weights=weights, beta=beta,
        label_smoothing=label_smoothing, args=SimpleNamespace(discopop_tau=tau), use_weighting=weighting,
        _total_train_tokens=0, _tp_size=1, _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(device="cpu", gather=lambda each: each, gather_for_metrics=lambda each: each),
    )  # fmt: skip
    inputs = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask,
              "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # it makes a tensor of its label smoothing
    try:
        return DPOTrainer._compute_loss(stub, model, inputs, False), stub._metrics["train"]
    finally:
        torch.set_default_dtype(before)


def same(tokens: Tokens, ours: Tensor, its: Tensor, rtol: float = 1e-10) -> None:
    """Compare two losses and their gradients."""
    assert float(ours.detach()) == pytest.approx(float(its.detach()), rel=rtol)
    (gradient,), (wanted,) = (torch.autograd.grad(loss, tokens.policy) for loss in (ours, its))
    assert wanted.abs().max() > 0
    torch.testing.assert_close(gradient * tokens.mask, wanted * tokens.mask, rtol=rtol, atol=1e-14)


@pytest.mark.parametrize("beta", [0.1, 2.5])
@pytest.mark.parametrize(("kind", "name", "keys"), TYPES, ids=[kind for kind, _, _ in TYPES])
def test_loss_gradient_and_rewards_are_trls(kind: str, name: str, keys: dict[str, Any], beta: float) -> None:
    tokens = tokens_at_random()
    given = {key: keys[key] for key in ("label_smoothing", "tau") if key in keys}
    its, logged = trl_loss(tokens, [kind], [1.0], beta, **given)
    ours = build_loss(LOSSES[name](beta=beta, **keys))(values_of(tokens))
    same(tokens, ours.losses_E.mean(), its)
    for metric in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert float(ours.metrics_E[metric].mean()) == pytest.approx(logged[metric][0], rel=1e-10), metric
    # it takes the mean of the wins in float32
    assert float(ours.metrics_E["rewards/accuracies"].mean()) == pytest.approx(
        logged["rewards/accuracies"][0], rel=1e-6
    )


def test_every_loss_is_compared_with_trl() -> None:
    elsewhere = {"simpo", "cpo", "orpo"}  # of other trainers
    assert {name for _, name, _ in TYPES} | elsewhere == set(LOSSES)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_supervised_term_is_trls(weight: float) -> None:
    tokens = tokens_at_random()
    ours = build_loss(LOSSES["dpo"](beta=0.1, sft_weight=weight))(values_of(tokens))
    same(tokens, ours.losses_E.mean(), trl_loss(tokens, ["sigmoid", "sft"], [1.0, weight], 0.1)[0])


def test_the_sum_of_losses_is_trls() -> None:
    tokens = tokens_at_random()
    terms = [{"loss": "dpo", "weight": 0.8}, {"loss": "bco_pair", "weight": 0.2, "shift": "none"}]
    ours = build_loss(MPOConfig(beta=0.1, sft_weight=1.0, terms=terms))(values_of(tokens))
    same(tokens, ours.losses_E.mean(), trl_loss(tokens, ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0], 0.1)[0])


# TRL weighs in place, which torch cannot differentiate behind a hinge.
FITTING = [(kind, name, keys) for kind, name, keys in TYPES if "wpo" in LOSSES[name].fits and kind != "hinge"]


@pytest.mark.parametrize(("kind", "name", "keys"), FITTING, ids=[kind for kind, _, _ in FITTING])
def test_the_on_policy_weight_is_trls(kind: str, name: str, keys: dict[str, Any]) -> None:
    """Without a supervised term: TRL weighs that too."""
    tokens = tokens_at_random()
    given = {key: keys[key] for key in ("label_smoothing", "tau") if key in keys}
    ours = build_loss(LOSSES[name](beta=0.1, wpo=True, **keys))(values_of(tokens))
    same(tokens, ours.losses_E.mean(), trl_loss(tokens, [kind], [1.0], 0.1, weighting=True, **given)[0])


TAILED = [(kind, name, keys) for kind, name, keys in TYPES if "ld_alpha" in LOSSES[name].fits]


@pytest.mark.parametrize(("kind", "name", "keys"), TAILED, ids=[kind for kind, _, _ in TAILED])
def test_tails_that_weigh_less_are_trls(kind: str, name: str, keys: dict[str, Any]) -> None:
    tokens = tokens_at_random()
    given = {key: keys[key] for key in ("label_smoothing", "tau") if key in keys}
    loss = build_loss(LOSSES[name](beta=0.1, ld_alpha=0.6, **keys))
    assert loss.wanted.tail_weight == 0.6
    same(tokens, loss(values_of(tokens, 0.6)).losses_E.mean(),
         trl_loss(tokens, [kind], [1.0], 0.1, ld_alpha=0.6, **given)[0])  # fmt: skip


# ---- losses of other trainers; their supervised terms are of other tokens, or are the mean of another count ----


def only_the_formula(cfg: PreferenceConfig, tokens: Tokens) -> Any:
    return build_loss(replace(cfg, sft_weight=0.0))(values_of(tokens))


@pytest.mark.parametrize(("name", "keys"), [("cpo", {}), ("cpo", {"label_smoothing": 0.2}), ("simpo", {"gamma": 0.8})])
def test_losses_of_trls_cpo_trainer(name: str, keys: dict[str, Any]) -> None:
    from trl.experimental.cpo import CPOTrainer

    tokens = tokens_at_random()
    sums = tokens.policy.sum(1)
    logps = sums / tokens.mask.sum(1) if name == "simpo" else sums
    stub = SimpleNamespace(
        alpha=0.0, beta=0.7, simpo_gamma=keys.get("gamma"), label_smoothing=keys.get("label_smoothing", 0.0),
        loss_type="simpo" if name == "simpo" else "sigmoid", accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    losses, chosen, rejected = CPOTrainer.cpo_loss(stub, *logps.chunk(2))
    ours = only_the_formula(LOSSES[name](beta=0.7, **keys), tokens)
    torch.testing.assert_close(ours.losses_E, losses, rtol=1e-10, atol=0)
    same(tokens, ours.losses_E.mean(), losses.mean())
    torch.testing.assert_close(ours.metrics_E["rewards/chosen"], chosen, rtol=1e-10, atol=0)
    torch.testing.assert_close(ours.metrics_E["rewards/rejected"], rejected, rtol=1e-10, atol=0)


def test_losses_of_trls_orpo_trainer() -> None:
    """It computes in float32."""
    from trl.experimental.orpo import ORPOTrainer

    tokens = tokens_at_random()
    logps = tokens.policy.sum(1) / tokens.mask.sum(1)
    stub = SimpleNamespace(beta=0.7, accelerator=SimpleNamespace(device="cpu"))
    losses, chosen, _, ratio, odds = ORPOTrainer.odds_ratio_loss(stub, *logps.chunk(2))
    ours = only_the_formula(LOSSES["orpo"](beta=0.7), tokens)
    same(tokens, ours.losses_E.mean(), -losses.double().mean(), rtol=1e-5)
    torch.testing.assert_close(ours.losses_E, -losses.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.metrics_E["rewards/chosen"], chosen.double(), rtol=1e-6, atol=0)
    for name, wanted in (("log_odds_ratio", ratio), ("log_odds_chosen", odds)):
        assert float(ours.metrics_E[name].mean()) == pytest.approx(float(wanted.detach()), rel=1e-5), name
