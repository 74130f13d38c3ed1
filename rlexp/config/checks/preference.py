"""Rules across the fields of losses over pairs."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config.schema import KINDS
from rlexp.config.schema.bounds import as_typed
from rlexp.config.schema.loss_terms import loss_terms
from rlexp.config.schema.losses import PreferenceConfig


def check_preference(loss: PreferenceConfig) -> None:
    """Refuse modifiers that have no meaning for the loss, or none together, and terms that cannot be added up."""
    _check_modifiers(loss)
    _check_lengths(loss)
    loss_terms(loss)


def _check_modifiers(loss: PreferenceConfig) -> None:
    given = {"wpo": loss.wpo, "ld_alpha": loss.ld_alpha < 1, "margin_weight": loss.margin_weight > 0}
    for leaf, asked in given.items():
        if asked and leaf not in loss.fits:
            value = as_typed(getattr(loss, leaf))
            fit = [f"loss={name}" for name, kind in KINDS["loss"].items()
                   if issubclass(kind, PreferenceConfig) and leaf in kind.fits]  # fmt: skip
            raise ConfigError(
                f"loss.{leaf}={value}: has no meaning for loss={loss.name}. Leave it out, or use one of the losses "
                f"that it fits: {', '.join(fit)}."
            )


def _check_lengths(loss: PreferenceConfig) -> None:
    """Refuse what needs the log-probabilities of whole answers, where some tokens of the longer answer count less."""
    if loss.ld_alpha == 1:
        return
    if loss.sft_weight:
        raise ConfigError(
            f"loss.ld_alpha={loss.ld_alpha}: the supervised term of loss.sft_weight={loss.sft_weight} learns chosen "
            f"answers as a whole. Use loss.sft_weight=0, or loss.ld_alpha=1."
        )
    if loss.wpo:
        raise ConfigError(
            f"loss.ld_alpha={loss.ld_alpha}: the weights of loss.wpo=true are those of whole answers. Use "
            f"loss.wpo=false, or loss.ld_alpha=1."
        )
