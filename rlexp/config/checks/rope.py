"""Rules for `model.rope`, and for a data.max_length beyond a model's positions: by its config.json, before a process
starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.config.checks.adapter import MERGED
from rlexp.config.checks.layout import described
from rlexp.config.checks.reference import model_of_reference
from rlexp.config.rope import TINY, Positions, beyond, parsed, positions_in, settled
from rlexp.config.schema import Config, HFModelConfig, LoraConfig, ModelConfig, TinyModelConfig, with_values


def with_rope_settled(cfg: Config) -> Config:
    """Return a copy in which `model.rope` has its factor, as the run's config.yaml has it. Refuse a value that is none,
    and models that YaRN cannot extend."""
    yarn = parsed(cfg.model.rope)
    if yarn is None:
        return cfg
    for model in _models(cfg):
        yarn = settled(yarn, _known(model), cfg.data.max_length, named(model))
    return with_values(cfg, "model", rope=str(yarn))


def _models(cfg: Config) -> list[ModelConfig]:
    return [cfg.model, *([model_of_reference(cfg)] if cfg.reference.path is not None else [])]


def notes_on_rope(cfg: Config) -> Iterator[str]:
    """Yield what is to be told of a checked configuration. Of models of the hub and GGUF files, ranks tell it."""
    yarn = parsed(cfg.model.rope)
    for model in _models(cfg):
        if told_before_start(model) and (known := _known(model)) is not None:
            note = beyond(yarn, known, cfg.data.max_length, named(model))
            if note is not None:
                yield note
    if yarn is not None and isinstance(cfg.adapter, LoraConfig) and cfg.checkpoint.export is True:
        yield (
            f"model.rope={yarn}: the adapter in <run>/model says nothing of it, so its model must be loaded with the "
            f"same rope_parameters. checkpoint.export={MERGED} writes a whole model, whose config.json has them."
        )


def note_on_loaded(cfg: Config, loaded: Mapping[str, Any]) -> str | None:
    """Return what was not known before the model's configuration was loaded, as a mapping."""
    if told_before_start(cfg.model):
        return None
    return beyond(parsed(cfg.model.rope), positions_in(loaded), cfg.data.max_length, named(cfg.model))


def told_before_start(model: ModelConfig) -> bool:
    """Say whether a model's positions are told before ranks start: those of a folder are."""
    return not isinstance(model, HFModelConfig) or described(model) is not None


def named(model: ModelConfig) -> str:
    """Return a model's key with its value."""
    return f"{model.group}.path={model.path}" if isinstance(model, HFModelConfig) else f"model={model.name}"


def _known(model: ModelConfig) -> Positions | None:
    """Return a model's positions: of a folder, or of a hub model whose config.json this machine's cache holds."""
    if isinstance(model, TinyModelConfig):
        return None if model.rope is None else Positions("default", TINY, TINY, {})
    if not isinstance(model, HFModelConfig):
        return None
    config = described(model)
    config = _cached(model) if config is None and model.gguf is None else config
    return None if config is None else positions_in(config)


def _cached(model: HFModelConfig) -> dict[str, object] | None:
    if Path(model.path).expanduser().is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except (OSError, ValueError):  # a cache that cannot be read, or a name that the hub cannot have
        return None
    return plain_json.mapping_in(Path(file)) if isinstance(file, str) else None
