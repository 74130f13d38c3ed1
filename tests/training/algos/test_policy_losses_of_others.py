"""The losses of reinforcement learning against TRL's trainers."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlexp.config.schema.losses import PolicyLossConfig
from tests.helpers.policy_losses import (
    FIXED,
    Case,
    answers_of,
    built,
    close,
    configured,
    divergences,
    padded,
    tensor,
    tokens_of,
)


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL with its trainers, which take seconds to import."""
    from trl import GRPOTrainer, RLOOTrainer
    from trl.trainer import utils

    return SimpleNamespace(GRPOTrainer=GRPOTrainer, RLOOTrainer=RLOOTrainer, nanstd=utils.nanstd)


def trl_loss(trl: Any, case: Case, name: str, cfg: PolicyLossConfig, advantages: Tensor) -> tuple[float, Tensor]:
    """Return the loss of TRL's GRPOTrainer and its gradient; its method is called without a trainer."""
    logps = padded(case, case.logps).requires_grad_()
    mask = padded(case, [[1.0] * length for length in case.lengths])
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, padded(case, case.entropy), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        importance_sampling_level="sequence" if name == "gspo" else "token", beta=cfg.beta,
        loss_type="dr_grpo" if name == "dr_grpo" else "grpo", epsilon_low=cfg.clip_low, epsilon_high=cfg.clip_high,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None), max_completion_length=FIXED,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda each: each, reduce=lambda each, reduction: each),  # noqa: ARG005
    )  # fmt: skip
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": padded(case, case.old),
        "ref_per_token_logps": padded(case, case.reference),
    }  # fmt: skip
    loss = trl.GRPOTrainer._compute_loss(stub, None, inputs)
    loss.backward()
    assert logps.grad is not None
    return float(loss.detach()), logps.grad[mask > 0]


@pytest.mark.parametrize("changes", [{}, {"beta": 0.2, "clip_low": 0.1, "clip_high": 0.3}], ids=["defaults", "changed"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo"])
def test_the_group_losses_are_trls(trl: Any, name: str, changes: dict[str, Any]) -> None:
    cfg, case = configured(name, **changes), Case(counts=(True,) * 6, seed=7)
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, cfg.beta)
    terms = loss(tokens, cfg.beta)
    terms.loss.backward()
    scores = tensor(case.scores).view(2, 3)
    advantages = scores - scores.mean(1, keepdim=True)
    if name != "dr_grpo":
        advantages = advantages / (trl.nanstd(scores, dim=1, keepdim=True) + 1e-4)
    wanted, gradient = trl_loss(trl, case, name, cfg, advantages.flatten())
    close(float(terms.loss.detach()), wanted)
    close(answers_of(tokens, tokens.logps_n.grad), gradient.tolist())


def test_rloo_is_trls_at_the_old_policy(trl: Any) -> None:
    """TRL clips the ratio of the whole answer. At the old policy the gradients agree, except that ours is divided by
    the fixed length."""
    cfg, case = configured("rloo", beta=0.2), Case(counts=(True,) * 6)
    case.logps = [list(each) for each in case.old]
    loss = built(cfg)
    tokens = tokens_of(case, cfg, loss, 0.2)
    loss(tokens, 0.2).loss.backward()
    logps, mask = padded(case, case.logps).requires_grad_(), padded(case, [[1.0] * n for n in case.lengths])
    divergence = tensor([sum(each) for each in divergences(case, cfg)])
    rewards = (tensor(case.scores) - 0.2 * divergence).view(2, 3)
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, mask, None),
        aux_loss_enabled=False, epsilon_low=0.2, epsilon_high=0.2, model=SimpleNamespace(training=True),
        _metrics={"train": collections.defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda each: each, reduce=lambda each, reduction: each),  # noqa: ARG005
    )  # fmt: skip
    inputs = {
        "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
        "advantages": (rewards - (rewards.sum(1, keepdim=True) - rewards) / 2).flatten(),
        "old_logps": (logps * mask).sum(1).detach(),
    }  # fmt: skip
    trl.RLOOTrainer._compute_loss(stub, None, inputs).backward()
    assert logps.grad is not None
    close(answers_of(tokens, tokens.logps_n.grad), (logps.grad[mask > 0] / FIXED).tolist())
