"""Rules across the fields of a loss: each family has its own."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import KINDS, Config, losses
from rlexp.config.schema.bounds import as_typed
from rlexp.config.schema.loss_terms import loss_terms
from rlexp.config.schema.losses import PolicyLossConfig, PPOConfig, PreferenceConfig, UnpairedConfig
from rlexp.config.schema.row_kinds import ROWS_OF, Kind

GROUPED = (losses.GRPOConfig, losses.DrGRPOConfig, losses.RLOOConfig, losses.GSPOConfig)
ALONE = "estimates the divergence by giving each prompt another's answer, and one answer has no other"

OF_POLICY = (
    Check("loss.kl_target", lambda cfg: cfg.loss.kl_target is not None and cfg.loss.beta == 0,
          "adapts loss.beta, which starts at 0 and would stay there. Give loss.beta=0.05, or leave loss.kl_target "
          "out."),
    Check("loss.kl",
          lambda cfg: cfg.loss.beta and (cfg.loss.kl_in, cfg.loss.kl) == (losses.KLPlace.loss, losses.KLEstimator.k1),
          "with loss.kl_in=loss its gradient does not depend on the reference, so nothing would hold the policy near "
          "it. Use loss.kl=k3 or loss.kl=k2, or loss.kl_in=reward."),
    Check("rollout.n_samples", lambda cfg: isinstance(cfg.loss, GROUPED) and cfg.rollout.n_samples < 2,
          "loss={loss.name} compares an answer with others to the same prompt, and one alone learns nothing. Use "
          "rollout.n_samples=2 or more, or loss=ppo or loss=reinforce_pp."),
    Check("rollout.n_samples", lambda cfg: cfg.loss.filter and cfg.rollout.n_samples < 2,
          "with loss.filter=true every answer would be left out, since a prompt with one answer has one score. Use "
          "rollout.n_samples=2 or more, or loss.filter=false."),
)  # fmt: skip
OF_CRITIC = (
    Check("loss.value_lr", lambda cfg: cfg.loss.value_lr and not cfg.optim.lr,
          "is applied as a multiple of optim.lr, and optim.lr is 0. Give it another value, or leave loss.value_lr out; "
          "to train only the critic, use model.freeze=['*']."),
    Check("loss.value_lr", lambda cfg: cfg.loss.value_lr is not None and cfg.loss.critic is losses.CriticName.shared,
          "loss.critic=shared uses the policy's layers, and they have one learning rate, optim.lr. Leave loss.value_lr "
          "out, or use loss.critic=own."),
)  # fmt: skip
# What needs the log-probabilities of whole answers, where some tokens of the longer answer count less.
OF_PAIRS = (
    Check("loss.ld_alpha", lambda cfg: cfg.loss.ld_alpha < 1 and cfg.loss.sft_weight,
          "the supervised term of loss.sft_weight={loss.sft_weight} learns chosen answers as a whole. Use "
          "loss.sft_weight=0, or loss.ld_alpha=1."),
    Check("loss.ld_alpha", lambda cfg: cfg.loss.ld_alpha < 1 and cfg.loss.wpo,
          "the weights of loss.wpo=true are those of whole answers. Use loss.wpo=false, or loss.ld_alpha=1."),
)  # fmt: skip
OF_UNPAIRED = (
    Check("train.batch_size", lambda cfg: cfg.loss.mismatches and cfg.train.batch_size == 1,
          f"loss={{loss.name}} {ALONE}. Use train.batch_size=2 or more."),
)  # fmt: skip


def check_loss(cfg: Config) -> None:
    """Refuse values that do not fit together, and terms that cannot be added up."""
    match cfg.loss:
        case PolicyLossConfig():
            refuse_broken((*OF_POLICY, *(OF_CRITIC if isinstance(cfg.loss, PPOConfig) else ())), cfg)
        case PreferenceConfig() as loss:
            given = {"wpo": loss.wpo, "ld_alpha": loss.ld_alpha < 1, "margin_weight": loss.margin_weight > 0}
            for leaf in [leaf for leaf, asked in given.items() if asked and leaf not in loss.fits]:
                able = [f"loss={name}" for name, kind in KINDS["loss"].items()
                        if issubclass(kind, PreferenceConfig) and leaf in kind.fits]  # fmt: skip
                raise ConfigError(
                    f"loss.{leaf}={as_typed(getattr(loss, leaf))}: has no meaning for loss={loss.name}. Leave it out, "
                    f"or use one of the losses that it fits: {', '.join(able)}."
                )
            refuse_broken(OF_PAIRS, cfg)
            loss_terms(loss)
        case UnpairedConfig():
            refuse_broken(OF_UNPAIRED, cfg)
    if cfg.data.unpair and cfg.loss.rows is not Kind.unpaired:
        fit = ", ".join(f"loss={name}" for name, kind in KINDS["loss"].items() if issubclass(kind, UnpairedConfig))
        raise ConfigError(
            f"data.unpair=true: makes two single answers of each pair, and loss={cfg.loss.name} is trained on "
            f"{ROWS_OF[cfg.loss.rows]}. Leave it out, or use a loss on single answers: {fit}."
        )
