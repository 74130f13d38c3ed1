"""The learning rates that nobody stated: by the loss and by what is trained."""

from __future__ import annotations

from rlexp.config.schema import Config
from rlexp.config.schema.losses import CriticName, PPOConfig

# What DPO's trainers take for it and for its kin: Zephyr (arXiv 2310.16944) and Tülu 3 8B (arXiv 2411.15124).
LIKE_DPO = (
    "dpo", "dpo_norm", "ipo", "hinge", "robust", "bco_pair", "sppo_hard", "nca_pair", "exo_pair", "apo_zero",
    "apo_down", "aot", "aot_unpaired", "discopop",
)  # fmt: skip
# The rate with which all weights of a pretrained model are trained, by loss.
ALL_WEIGHTS = {
    **dict.fromkeys(LIKE_DPO, 5e-7),
    "mpo": 5e-6,  # InternVL's scripts
    "cpo": 1e-6,  # TRL's CPOConfig
    "simpo": 1e-6,  # SimPO's recipe for Llama 3 (arXiv 2405.14734)
    "orpo": 8e-6,  # arXiv 2403.07691
    "kto": 1e-6,  # TRL's KTOConfig
    "apo_zero_unpaired": 1e-6,  # the same: it is a loss of TRL's KTOTrainer
    "bco": 1e-6,  # as KTO, whose kind of rows it has
    "sft": 2e-5,  # TRL's SFTConfig; Zephyr's
    "reward": 9e-6,  # InstructGPT (arXiv 2203.02155); OpenRLHF
    "ppo": 1e-6,  # OpenRLHF's actor_learning_rate
    "reinforce_pp": 1e-6,  # the same
    "grpo": 1e-6,  # TRL's GRPOConfig; DeepSeekMath (arXiv 2402.03300)
    "dr_grpo": 1e-6,  # arXiv 2503.20783
    "gspo": 1e-6,  # TRL's GRPOConfig
    "rloo": 1e-6,  # TRL's RLOOConfig
}
# An adapter takes ten times as much: measured in LoRA Without Regret (Thinking Machines, 2025), and what Zephyr's
# recipes for DPO (5e-6) and QLoRA for supervised training (2e-4, arXiv 2305.14314) have.
ADAPTER = 10
CRITIC = 9e-6  # InstructGPT; OpenRLHF's critic_learning_rate
FROM_RANDOM = 5e-4  # weights that are random, as of model=tiny, whatever is trained


def default_rate(loss: str, adapter: str, model: str) -> float:
    """Return the default of optim.lr. A loss that is refused later has one too."""
    if model == "tiny":
        return FROM_RANDOM
    return _of_adapter(ALL_WEIGHTS.get(loss, 0.0), adapter)


def default_critic_rate(critic: str, loss: str, adapter: str, model: str, policy_rate: float) -> float | None:
    """Return the default of loss.value_lr. None is the policy's rate: where the critic is a part of it, where all
    weights are random, and where the policy's rate is not the default, so that one number moves both."""
    if critic != CriticName.own.value or model == "tiny" or policy_rate != default_rate(loss, adapter, model):
        return None
    return _of_adapter(CRITIC, adapter)


def _of_adapter(rate: float, adapter: str) -> float:
    return float(f"{rate * ADAPTER:.6g}") if adapter == "lora" else rate


def rates_in_words(cfg: Config) -> str:
    """`5e-06 (default for dpo with an adapter)`"""
    names = cfg.loss.name, cfg.adapter.name, cfg.model.name
    trained = "random weights" if names[2] == "tiny" else names[0] + " with an adapter" * (names[1] == "lora")
    rate = f"{cfg.optim.lr:g}" + (f" (default for {trained})" if cfg.optim.lr == default_rate(*names) else "")
    if not isinstance(cfg.loss, PPOConfig) or cfg.loss.value_lr is None:
        return rate
    usual = default_critic_rate(cfg.loss.critic.value, *names, cfg.optim.lr)
    return f"{rate}, the critic's {cfg.loss.value_lr:g}" + " (default)" * (cfg.loss.value_lr == usual)
