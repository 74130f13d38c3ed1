"""The keys of `loss`: one class for each loss.

A new loss needs one class here, one yaml file, and a function or class in `training/algos/` with its row in a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from omegaconf import MISSING

from rlexp.config.schema.bounds import number
from rlexp.config.schema.row_kinds import Kind


class KLPlace(Enum):
    """The place where the divergence from the reference enters."""

    # the divergence is subtracted from the score, per token with `ppo` and `reinforce_pp`, else per answer
    reward = "reward"
    loss = "loss"  # a term of the loss


class KLEstimator(Enum):
    """Estimators of a token's divergence from d = log policy − log reference (joschu.net/blog/kl-approx.html)."""

    k1 = "k1"  # d
    k2 = "k2"  # d²/2
    k3 = "k3"  # exp(−d) − 1 + d


class Normalize(Enum):
    """Loss normalizers. Every count is taken over the whole train batch."""

    token = "token"  # sum over the trained tokens / their number
    sequence = "sequence"  # the mean over each answer's tokens, then the mean over answers
    fixed = "fixed"  # sum over the trained tokens / (number of answers × rollout.max_new_tokens)


class IPONormalize(Enum):
    token = "token"  # per token, as the paper's authors have trained, and as in TRL
    sequence = "sequence"  # of whole answers, as the paper writes it


class Shift(Enum):
    """The reward shift of BCO."""

    none = "none"  # no shift, as in TRL's loss on pairs
    mean = "mean"  # the mean reward of all answers trained on so far, as in the paper


class CriticName(Enum):
    own = "own"  # a second model, with the policy's weights at the start
    shared = "shared"  # the policy's own layers


@dataclass
class LossConfig:
    """A loss, with what everyone may ask of it before there is a model. The ClassVars are facts, not keys."""

    rows: ClassVar[Kind] = Kind.pairs  # the rows that it is trained on
    draws: ClassVar[bool] = False  # the policy generates the answers: the keys of `rollout` and `reward` count

    name: str = MISSING  # the loss, chosen by loss=NAME

    @property
    def compares(self) -> bool:
        """Whether the policy is compared with a reference model."""
        return False


@dataclass
class PreferenceConfig(LossConfig):
    """Keys that all losses over pairs share. Which of them fit a loss is said in `fits`."""

    fits: ClassVar[frozenset[str]] = frozenset({"wpo", "ld_alpha"})  # the modifiers that have a meaning for it
    has_reference: ClassVar[bool] = True  # the policy is compared with a reference model

    # scale of the rewards: a larger value keeps the policy nearer to the reference
    beta: float = number(0.1, above=0)
    # weight of the chosen answers' negative log-likelihood per token, as in supervised training
    sft_weight: float = number(0.0, least=0)
    # weigh each pair by how probable its answers are for the policy (WPO, arXiv 2406.11827)
    wpo: bool = False
    # weight of an answer's log-probabilities beyond the shorter answer's length (LD-DPO, arXiv 2409.06411); 1: all
    # count alike
    ld_alpha: float = number(1.0, least=0, most=1)
    # multiplies the rows' `margin`, by which the chosen answer's reward must exceed the other's (ODPO, arXiv
    # 2402.10571)
    margin_weight: float = number(0.0, least=0)

    @property
    def compares(self) -> bool:
        return self.has_reference

    @classmethod
    def own_beta(cls) -> bool:
        """Return whether its beta means something else than that of `dpo`: a term of `mpo` then keeps its own."""
        return "beta" in cls.__annotations__


ALL_MODIFIERS = frozenset({"wpo", "ld_alpha", "margin_weight"})
OF_MARGINS = frozenset({"wpo", "margin_weight"})


@dataclass
class SmoothedConfig(PreferenceConfig):
    # assumed share of pairs whose two answers are swapped (conservative DPO, cDPO)
    label_smoothing: float = number(0.0, least=0, below=0.5)


@dataclass
class DPOConfig(SmoothedConfig):
    name: str = "dpo"
    fits: ClassVar[frozenset[str]] = ALL_MODIFIERS


@dataclass
class DPONormConfig(SmoothedConfig):
    name: str = "dpo_norm"
    fits: ClassVar[frozenset[str]] = OF_MARGINS
    beta: float = number(5.0, above=0)


@dataclass
class IPOConfig(PreferenceConfig):
    name: str = "ipo"
    fits: ClassVar[frozenset[str]] = frozenset({"wpo"})
    # the difference of the log-ratios is moved to 1 / (2·beta); the paper's τ
    beta: float = number(0.1, above=0)
    normalize: IPONormalize = IPONormalize.token  # whether log-ratios are per token or of whole answers


@dataclass
class APOZeroConfig(PreferenceConfig):
    name: str = "apo_zero"


@dataclass
class APODownConfig(PreferenceConfig):
    name: str = "apo_down"


@dataclass
class SimPOConfig(PreferenceConfig):
    name: str = "simpo"
    fits: ClassVar[frozenset[str]] = frozenset({"margin_weight"})
    has_reference: ClassVar[bool] = False
    beta: float = number(2.0, above=0)  # scale of the rewards, which are mean log-probabilities per token
    # the margin by which the chosen answer's reward should exceed the other's; the paper's γ
    gamma: float = number(1.0, least=0)


@dataclass
class ORPOConfig(PreferenceConfig):
    name: str = "orpo"
    fits: ClassVar[frozenset[str]] = frozenset()
    has_reference: ClassVar[bool] = False
    beta: float = number(0.1, above=0)  # weight of the term of odds; the paper's λ
    sft_weight: float = number(1.0, least=0)


@dataclass
class CPOConfig(SmoothedConfig):
    name: str = "cpo"
    fits: ClassVar[frozenset[str]] = frozenset({"margin_weight"})
    has_reference: ClassVar[bool] = False
    beta: float = number(0.1, above=0)  # scale of the rewards, which are log-probabilities of whole answers
    sft_weight: float = number(1.0, least=0)


@dataclass
class BCOPairConfig(PreferenceConfig):
    name: str = "bco_pair"
    shift: Shift = Shift.mean  # what is subtracted from the rewards


@dataclass
class MPOConfig(PreferenceConfig):
    name: str = "mpo"
    fits: ClassVar[frozenset[str]] = frozenset()
    # the losses that are added, each {loss: NAME, weight: W} with other keys of that loss. A term's beta is loss.beta,
    # but dpo_norm, ipo, simpo, orpo and cpo have their own default
    terms: list[Any] = field(default_factory=list)


@dataclass
class HingeConfig(PreferenceConfig):
    name: str = "hinge"
    fits: ClassVar[frozenset[str]] = ALL_MODIFIERS


@dataclass
class RobustConfig(PreferenceConfig):
    name: str = "robust"
    fits: ClassVar[frozenset[str]] = ALL_MODIFIERS
    # share of pairs whose two answers are swapped; the loss is unbiased if it is right
    label_smoothing: float = number(0.1, least=0, below=0.5)


@dataclass
class AOTConfig(SmoothedConfig):
    name: str = "aot"
    fits: ClassVar[frozenset[str]] = frozenset()


@dataclass
class AOTUnpairedConfig(AOTConfig):
    name: str = "aot_unpaired"


@dataclass
class EXOPairConfig(PreferenceConfig):
    name: str = "exo_pair"
    # probability that the target gives the rejected answer
    label_smoothing: float = number(1e-3, above=0, below=0.5)


@dataclass
class NCAPairConfig(PreferenceConfig):
    name: str = "nca_pair"


@dataclass
class SPPOHardConfig(PreferenceConfig):
    name: str = "sppo_hard"


@dataclass
class DiscoPOPConfig(PreferenceConfig):
    name: str = "discopop"
    # temperature with which the logistic and the exponential part are mixed
    tau: float = number(0.05, above=0)


@dataclass
class UnpairedConfig(LossConfig):
    """Keys that all losses over single answers share, each of which is labelled good or bad."""

    rows: ClassVar[Kind] = Kind.unpaired
    mismatches: ClassVar[bool] = False  # it asks for answers to other prompts of the train batch

    # scale of the rewards: a larger value keeps the policy nearer to the reference
    beta: float = number(0.1, above=0)
    desirable_weight: float = number(1.0, above=0)  # weight of the good answers' losses
    undesirable_weight: float = number(1.0, above=0)  # weight of the bad answers' losses

    @property
    def compares(self) -> bool:
        return True


@dataclass
class KTOConfig(UnpairedConfig):
    mismatches: ClassVar[bool] = True

    name: str = "kto"


@dataclass
class BCOConfig(UnpairedConfig):
    name: str = "bco"
    shift: Shift = Shift.mean  # what is subtracted from the rewards


@dataclass
class APOZeroUnpairedConfig(UnpairedConfig):
    name: str = "apo_zero_unpaired"


@dataclass
class SFTConfig(LossConfig):
    rows: ClassVar[Kind] = Kind.supervised
    name: str = "sft"


@dataclass
class RewardModelConfig(LossConfig):
    name: str = "reward"
    # multiplies the rows' `margin`, by which the chosen answer's score must exceed the other's, where rows have one; 0:
    # margins are not used
    margin_weight: float = number(1.0, least=0)
    # weight of (chosen score + rejected score)², which keeps the scores around 0 (arXiv 2312.09244)
    center: float = number(0.0, least=0)


@dataclass
class PolicyLossConfig(LossConfig):
    """Keys that all algorithms of reinforcement learning share."""

    rows: ClassVar[Kind] = Kind.prompts
    draws: ClassVar[bool] = True

    # weight of the divergence from the reference; 0: none, and no reference model is held
    beta: float = number(0.05, least=0)
    kl_in: KLPlace = KLPlace.reward  # where the divergence from the reference enters
    # estimate of a token's divergence, from d = log policy − log reference; not k1 with loss.kl_in=loss
    kl: KLEstimator = KLEstimator.k1
    # divergence per answer to which loss.beta is adapted; null: loss.beta is constant
    kl_target: float | None = number(None, above=0)
    kl_horizon: int = number(10000, least=1)  # samples over which loss.beta adapts, with loss.kl_target
    clip_low: float = number(0.2, above=0)  # the ratio of new to old probability is clipped at 1 − clip_low
    clip_high: float = number(0.2, above=0)  # the ratio of new to old probability is clipped at 1 + clip_high
    # where the advantage is negative, clip the ratio at this value too (dual-clip PPO, arXiv 1912.09729); null: do not
    dual_clip: float | None = number(None, above=1, why=" (3 is usual)")
    entropy: float = number(0.0, least=0)  # weight of the entropy bonus, which rewards varied answers
    whiten: bool = False  # shift and scale the advantages of a train batch to mean 0 and variance 1
    normalize: Normalize = Normalize.token  # how the terms of the tokens are averaged over the train batch
    filter: bool = False  # leave out a prompt if all its answers have the same score

    @property
    def compares(self) -> bool:
        return self.beta > 0


@dataclass
class PPOConfig(PolicyLossConfig):
    name: str = "ppo"
    whiten: bool = True
    gamma: float = number(1.0, least=0, most=1)  # discount of later rewards, for each token
    # λ of generalized advantage estimation: 0 trusts the critic alone, 1 the rewards alone
    lam: float = number(0.95, least=0, most=1)
    critic: CriticName = CriticName.own  # the model that predicts, at each token, the rewards still to come
    # the critic's learning rate, with loss.critic=own; null: optim.lr
    value_lr: float | None = number(None, least=0)
    value_coef: float = number(0.5, least=0)  # weight of the critic's loss
    # how far a predicted value may move from its old one before its loss is clipped; null: no clipping
    value_clip: float | None = number(0.2, above=0)


@dataclass
class GRPOConfig(PolicyLossConfig):
    name: str = "grpo"
    kl_in: KLPlace = KLPlace.loss
    kl: KLEstimator = KLEstimator.k3
    normalize: Normalize = Normalize.sequence


@dataclass
class DrGRPOConfig(PolicyLossConfig):
    name: str = "dr_grpo"
    beta: float = number(0.0, least=0)
    kl_in: KLPlace = KLPlace.loss
    kl: KLEstimator = KLEstimator.k3
    normalize: Normalize = Normalize.fixed


@dataclass
class RLOOConfig(PolicyLossConfig):
    name: str = "rloo"
    normalize: Normalize = Normalize.fixed


@dataclass
class ReinforcePPConfig(PolicyLossConfig):
    name: str = "reinforce_pp"
    whiten: bool = True


@dataclass
class GSPOConfig(PolicyLossConfig):
    name: str = "gspo"
    kl_in: KLPlace = KLPlace.loss
    kl: KLEstimator = KLEstimator.k3
    clip_low: float = number(3e-4, above=0)
    clip_high: float = number(4e-4, above=0)
    normalize: Normalize = Normalize.sequence
