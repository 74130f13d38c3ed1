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
from rlexp.config.schema import Config, HFModelConfig, LoraConfig
from rlexp.config.schema.loss_terms import compares
from rlexp.config.schema.losses import UnpairedConfig
from rlexp.config.schema.models import ReferenceName


@dataclass
class ReferenceModelConfig(HFModelConfig):
    """The model in reference.path."""

    group: ClassVar[str] = "reference"


def check_reference(cfg: Config, *, here: bool = True) -> None:
    """Refuse a reference model that is not there, that nothing is compared with, or that cannot run as the policy."""
    path, revision = cfg.reference.path, cfg.reference.revision
    _check_kind(cfg)
    if path is None:
        if revision is not None:
            raise ConfigError(
                f"reference.revision={revision}: is of the model in reference.path, which is not given. Give it, or "
                f"leave reference.revision out."
            )
        return
    if not compares(cfg.loss):
        raise ConfigError(
            f"reference.path={path}: loss={cfg.loss.name} compares the policy with no reference model"
            f"{' while loss.beta=0' if cfg.loss.draws else ''}. Leave reference.path out."
        )
    if not isinstance(cfg.model, HFModelConfig):
        raise ConfigError(
            f"reference.path={path}: is a model of transformers, and model={cfg.model.name} has a vocabulary of its "
            f"own. Use model=hf model.path=FOLDER, or leave reference.path out."
        )
    check_model_path("reference.path", path)
    check_revision("reference", path, revision)
    check_heads(cfg, heads_of(model_of_reference(cfg)), here=here)


def _check_kind(cfg: Config) -> None:
    """Refuse a kind of reference that this run cannot have, and keys of another kind."""
    name, loss, path = cfg.reference.name, cfg.loss, cfg.reference.path
    if name is ReferenceName.adapter and not isinstance(cfg.adapter, LoraConfig):
        raise ConfigError(
            "reference=adapter: is the trained model without its adapter, and adapter=none. Use adapter=lora, or "
            "reference=model."
        )
    if name is ReferenceName.none and compares(loss):
        raise ConfigError(
            f"reference=none: loss={loss.name} compares the policy with a reference. Leave reference out, or use a "
            f"loss without one, such as {'loss.beta=0' if loss.draws else 'loss=simpo'}."
        )
    if path is not None and name in (ReferenceName.adapter, ReferenceName.none):
        raise ConfigError(
            f"reference.path={path}: is a model of its own, and reference={name.value} has none. Leave reference.path "
            f"out, or use reference=model or reference=precompute."
        )
    if cfg.reference.offload and name is not ReferenceName.model:
        raise ConfigError(
            f"reference.offload=true: moves the weights of reference=model, and reference={name.value} holds none. "
            f"Leave reference.offload out."
        )
    if cfg.reference.offload and not compares(loss):
        raise ConfigError(
            f"reference.offload=true: loss={loss.name} compares the policy with no reference model"
            f"{' while loss.beta=0' if loss.draws else ''}. Leave reference.offload out."
        )
    if name is ReferenceName.precompute:
        _check_precompute(cfg)


def _check_precompute(cfg: Config) -> None:
    loss = cfg.loss
    if loss.draws:
        instead = (
            "Leave reference out: with adapter=lora it needs no second model"
            if isinstance(cfg.adapter, LoraConfig)
            else "Use reference=model; or adapter=lora, which needs no second model"
        )
        raise ConfigError(
            f"reference=precompute: loss={loss.name} generates its own samples, which are not known before training. "
            f"{instead}."
        )
    if not compares(loss):
        raise ConfigError(
            f"reference=precompute: loss={loss.name} compares the policy with no reference. Leave reference out."
        )
    if isinstance(loss, UnpairedConfig) and loss.mismatches:
        raise ConfigError(
            f"reference=precompute: loss={loss.name} also asks for answers to other prompts of the same train batch, "
            f"which are not known before training. Use reference=model, or loss=bco or loss=apo_zero_unpaired."
        )


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
