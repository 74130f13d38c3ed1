"""Rules for a reference model that is another than the one that training starts from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from rlexp.base.errors import ConfigError
from rlexp.config.checks.backend import check_backend
from rlexp.config.checks.files import check_model_path
from rlexp.config.checks.kernel import check_kernel
from rlexp.config.checks.layout import Choice, Heads, check_layout, heads_of, with_layout
from rlexp.config.checks.model import check_revision
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import Config, HFModelConfig, LoraConfig
from rlexp.config.schema.loss_terms import compares
from rlexp.config.schema.losses import UnpairedConfig
from rlexp.config.schema.models import ReferenceName

APART = (ReferenceName.adapter, ReferenceName.none)  # kinds without a model of their own


@dataclass
class ReferenceModelConfig(HFModelConfig):
    """The model in reference.path."""

    group: ClassVar[str] = "reference"


def _precomputed(cfg: Config) -> bool:
    return cfg.reference.name is ReferenceName.precompute


RULES = (
    Check("reference",
          lambda cfg: cfg.reference.name is ReferenceName.adapter and not isinstance(cfg.adapter, LoraConfig),
          "is the trained model without its adapter, and adapter=none. Use adapter=lora, or reference=model."),
    Check("reference", lambda cfg: cfg.reference.name is ReferenceName.none and compares(cfg.loss),
          "loss={loss.name} compares the policy with a reference. Leave reference out, or use a loss without one, such "
          "as {free}."),
    Check("reference.path",
          lambda cfg: cfg.reference.path is not None and cfg.reference.name in APART,
          "is a model of its own, and reference={reference.name.value} has none. Leave reference.path out, or use "
          "reference=model or reference=precompute."),
    Check("reference.offload", lambda cfg: cfg.reference.offload and cfg.reference.name is not ReferenceName.model,
          "moves the weights of reference=model, and reference={reference.name.value} holds none. Leave "
          "reference.offload out."),
    Check("reference.offload", lambda cfg: cfg.reference.offload and not compares(cfg.loss),
          "loss={loss.name} compares the policy with no reference model{idle}. Leave reference.offload out."),
    Check("reference", lambda cfg: _precomputed(cfg) and cfg.loss.draws,
          "loss={loss.name} generates its own samples, which are not known before training. {instead}."),
    Check("reference", lambda cfg: _precomputed(cfg) and not compares(cfg.loss),
          "loss={loss.name} compares the policy with no reference. Leave reference out."),
    Check("reference", lambda cfg: _precomputed(cfg) and isinstance(cfg.loss, UnpairedConfig) and cfg.loss.mismatches,
          "loss={loss.name} also asks for answers to other prompts of the same train batch, which are not known before "
          "training. Use reference=model, or loss=bco or loss=apo_zero_unpaired."),
    Check("reference.revision", lambda cfg: cfg.reference.path is None and cfg.reference.revision is not None,
          "is of the model in reference.path, which is not given. Give it, or leave reference.revision out."),
    Check("reference.path", lambda cfg: cfg.reference.path is not None and not compares(cfg.loss),
          "loss={loss.name} compares the policy with no reference model{idle}. Leave reference.path out."),
    Check("reference.path", lambda cfg: cfg.reference.path is not None and not isinstance(cfg.model, HFModelConfig),
          "is a model of transformers, and model={model.name} has a vocabulary of its own. Use model=hf "
          "model.path=FOLDER, or leave reference.path out."),
)  # fmt: skip


def check_reference(cfg: Config, *, here: bool = True) -> None:
    """Refuse a reference model that is not there, that nothing is compared with, or that cannot run as the policy."""
    instead = (
        "Leave reference out: with adapter=lora it needs no second model"
        if isinstance(cfg.adapter, LoraConfig)
        else "Use reference=model; or adapter=lora, which needs no second model"
    )
    idle, free = (" while loss.beta=0", "loss.beta=0") if cfg.loss.draws else ("", "loss=simpo")
    refuse_broken(RULES, cfg, idle=idle, free=free, instead=instead)
    if cfg.reference.path is not None:
        check_model_path("reference.path", cfg.reference.path)
        check_revision("reference", cfg.reference.path, cfg.reference.revision)
        check_heads(cfg, heads_of(model_of_reference(cfg)), here=here)


def check_heads(cfg: Config, heads: Heads | None, *, here: bool = True) -> None:
    """Refuse heads that the run's layout, kernel or backend cannot take. The message says whose they are."""
    try:
        check_backend(cfg, heads, here=here)
        check_layout(cfg, heads)
        check_kernel(cfg, heads, here=here)
    except ConfigError as error:
        raise ConfigError(f"reference.path={cfg.reference.path}: runs as the policy does. {error}") from None


def fits_reference(cfg: Config, choice: Choice) -> bool:
    """Say whether the model in reference.path, if there is one, can run over a layout that `auto` may take."""
    if cfg.reference.path is None:
        return True
    try:
        check_heads(with_layout(cfg, choice), heads_of(model_of_reference(cfg)))
    except ConfigError:
        return False
    return True


def model_of_reference(cfg: Config) -> ReferenceModelConfig:
    """Return the configuration by which the model in reference.path is loaded: the policy's, at another place.

    A GGUF file lies in model.path, and nothing of a reference is trained.
    """
    assert isinstance(cfg.model, HFModelConfig)
    assert cfg.reference.path is not None
    keys = {each.name: getattr(cfg.model, each.name) for each in fields(HFModelConfig)}
    keys |= {"path": cfg.reference.path, "revision": cfg.reference.revision, "gguf": None, "freeze": []}
    return ReferenceModelConfig(**keys)
