"""Rules for adapters: what they need, and what does not go with them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from rlexp.base import plain_json
from rlexp.base.errors import ConfigError
from rlexp.config.adapter_folder import ALL_LINEAR, SAYS, AdapterFolder, read_adapter
from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.content_ids import of_weights
from rlexp.config.schema import Config, HFModelConfig, LoraConfig

MERGED = "merged"  # a value of checkpoint.export


OF_EXPORT = (
    Check("checkpoint.export", lambda cfg: isinstance(cfg.checkpoint.export, str) and cfg.checkpoint.export != MERGED,
          f"must be true, false or {MERGED}. Give one of these."),
    Check("checkpoint.export", lambda cfg: cfg.checkpoint.export == MERGED and not isinstance(cfg.adapter, LoraConfig),
          "merges an adapter into its model, and adapter=none. Use adapter=lora, or leave checkpoint.export out: the "
          "whole model is written."),
)  # fmt: skip
OF_LORA = (
    Check("adapter.dropout", lambda cfg: cfg.adapter.dropout,
          "must be 0. Which inputs are dropped would depend on the layout, and so would the curve. Leave "
          "adapter.dropout out; a smaller adapter.rank, or fewer steps, also hold an adapter back."),
    Check("model.freeze", lambda cfg: cfg.model.freeze,
          "with adapter=lora all weights of the model are frozen already. Leave model.freeze out; adapter.targets says "
          "which layers get an adapter."),
)  # fmt: skip


def check_adapter(cfg: Config, *, here: bool = True) -> None:
    refuse_broken(OF_EXPORT, cfg)
    lora = cfg.adapter
    if not isinstance(lora, LoraConfig):
        return
    if here and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "adapter=lora: the package peft, which makes adapters, is not installed. Install it with "
            "`pip install -e '.[lora]'` in a checkout, or use adapter=none."
        )
    refuse_broken(OF_LORA, cfg)
    for key, names in (("targets", lora.targets), ("also", lora.also)):
        if any(not name.strip() for name in names):
            raise ConfigError(f"adapter.{key}={names}: holds a name that is empty. Leave it out.")
        if ALL_LINEAR in names:
            raise ConfigError(f"adapter.{key}={names}: {ALL_LINEAR} names no layer. For all, leave adapter.{key} out.")
    adapter = None if lora.path is None else read_adapter(lora.path)
    also = lora.also or (adapter.also if adapter is not None else [])
    if isinstance(cfg.model, HFModelConfig) and cfg.model.add_tokens and not also:
        raise ConfigError(
            f"model.add_tokens={cfg.model.add_tokens}: with adapter=lora the rows of new tokens would stay as they "
            f"begin. Train them too, if the model's two tables are not tied: adapter.also=[embed_tokens,lm_head]; or "
            f"the whole model: adapter=none."
        )
    if adapter is not None:
        _check_path(cfg, lora, adapter)


def _check_path(cfg: Config, lora: LoraConfig, adapter: AdapterFolder) -> None:
    """Refuse keys that the folder contradicts, and an adapter of another model, where that can be told here."""
    settings, default = adapter.settings(lora), LoraConfig()
    for name in SAYS:
        value, saved = getattr(lora, name), getattr(settings, name)
        same = sorted(value) == sorted(saved) if isinstance(value, list) else value == saved
        if not same and value != getattr(default, name):
            raise ConfigError(
                f"adapter.{name}={value}: the adapter in adapter.path={lora.path} has {saved}. Leave adapter.{name} "
                f"out, or start a new adapter: leave adapter.path out."
            )
    if isinstance(cfg.model, HFModelConfig) and _is_other(adapter, cfg.model.path):
        raise ConfigError(
            f"adapter.path={lora.path}: is an adapter of {adapter.base}, and model.path={cfg.model.path} is another "
            f"model. Give that model, or an adapter of this one."
        )


def _is_other(adapter: AdapterFolder, path: str) -> bool:
    """Say whether a model is known to be another than an adapter's: by its contents, or by two names of the hub."""
    folder = Path(path).expanduser()
    try:
        if adapter.contents is not None and os.path.isdir(folder):
            return adapter.contents != of_weights(folder)
        if adapter.base is None:
            return False
        theirs = Path(adapter.base).expanduser()
        if os.path.isdir(theirs) and os.path.isdir(folder):
            return of_weights(theirs) != of_weights(folder)
    except OSError:  # one of them may not be read here: the shapes of the weights will decide
        return False
    local = [os.path.isdir(each) or str(each).startswith((".", "/", "~")) for each in (theirs, folder)]
    return adapter.base != path and not any(local)


def check_quantized(key: str, path: str) -> None:
    """Refuse a folder whose weights are quantized. One of the hub is refused when its configuration is loaded."""
    config = plain_json.mapping_in(Path(path).expanduser() / "config.json") or {}
    if config.get("quantization_config"):
        refuse_quantized(key, path, config["quantization_config"])


def refuse_quantized(key: str, path: str, scheme: object) -> None:
    method = scheme.get("quant_method", "") if isinstance(scheme, dict) else getattr(scheme, "quant_method", "")
    raise ConfigError(
        f"{key}={path}: its weights are quantized ({getattr(method, 'value', method) or 'quantization_config'}), and "
        f"rlexp trains on no quantized weights (no QLoRA): they would have to be gathered and multiplied by kernels "
        f"of their own. Give the model's own weights; adapter=lora keeps them in the dtype that computes."
    )
