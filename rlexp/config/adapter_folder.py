"""What an adapter's folder in peft's format says of it, read without peft."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.base import plain_json
from rlexp.base.errors import ConfigError
from rlexp.config.checks.files import expanded
from rlexp.config.schema import Config, LoraConfig

DESCRIPTION, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "rlexp_beside"  # in the metadata of the weights: the contents of those that they were trained beside
ALL_LINEAR = "all-linear"  # peft's word
# What peft can do besides plain LoRA, and its value where it is not used.
PLAIN: Mapping[str, Any] = {
    **dict.fromkeys(("use_qalora", "use_dora", "lora_bias"), False),
    **dict.fromkeys(("velora_config", "monteclora_config", "kasa_config", "arrow_config", "layer_replication")),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "use_bdlora", "alora_invocation_tokens")),
    "bias": "none",
}
SAYS = ("rank", "alpha", "rslora", "targets", "also")  # keys of `adapter` that a folder decides
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # ways to begin that leave the model's weights alone


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter that training goes on from."""

    path: Path
    description: Mapping[str, Any]  # adapter_config.json

    @property
    def base(self) -> str | None:
        """The model that it was trained on: a folder or a hub name."""
        named = self.description.get("base_model_name_or_path")
        return str(named) if named else None

    @property
    def contents(self) -> str | None:
        """What stood in that model's folder, where rlexp wrote the adapter."""
        try:
            with (self.path / WEIGHTS).open("rb") as file:
                header = plain_json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            return str(header["__metadata__"][BASE])
        except (OSError, ValueError, KeyError, TypeError, struct.error, MemoryError, OverflowError):
            return None  # what is wrong with the file is said when its weights are read

    @property
    def targets(self) -> list[str] | str:
        named = self.description.get("target_modules") or []
        return named if isinstance(named, str) else sorted(named)

    @property
    def also(self) -> list[str]:
        return sorted(self.description.get("modules_to_save") or [])

    def settings(self, cfg: LoraConfig) -> LoraConfig:
        """Return the configuration with what makes the adapter as in the folder."""
        targets = [] if self.targets == ALL_LINEAR else self.targets
        return dataclasses.replace(
            cfg,
            targets=list(targets) if isinstance(targets, list) else [targets],
            rank=operator.index(self.description["r"]),
            alpha=float(self.description["lora_alpha"]),
            rslora=bool(self.description.get("use_rslora")),
            also=self.also,
        )


def with_folder_described(cfg: Config) -> Config:
    """Return a copy whose keys of `adapter` say what the adapter in `adapter.path` has."""
    lora = cfg.adapter
    if not isinstance(lora, LoraConfig) or lora.path is None:
        return cfg
    return dataclasses.replace(cfg, adapter=read_adapter(lora.path).settings(lora))


def read_adapter(path: str) -> AdapterFolder:
    """Read a folder's description; refuse what is no plain LoRA."""
    key, folder = f"adapter.path={path}", expanded("adapter.path", path)
    if not os.path.isdir(folder) or not os.path.isfile(folder / DESCRIPTION):
        why = f"has no {DESCRIPTION}" if os.path.isdir(folder) else "no such folder"
        raise ConfigError(
            f"{key}: {why}. Give the folder of an adapter in peft's format, such as model/ of a run with adapter=lora; "
            f"relative paths start at {Path.cwd()}."
        )
    try:
        description = plain_json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        adapter = AdapterFolder(folder, description)
        kind = description.get("peft_type")
        if kind == "LORA":
            settings = adapter.settings(LoraConfig())
            if settings.rank < 1 or not math.isfinite(settings.alpha):
                raise ValueError(f"r is {description['r']}, and lora_alpha {description['lora_alpha']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key}: its {DESCRIPTION} cannot be read ({type(error).__name__}: {error}). Give a folder that peft wrote."
        ) from None
    if kind != "LORA":
        raise ConfigError(f"{key}: is an adapter of the kind {kind}. Give one of the kind LORA.")
    other = [name for name, plain in PLAIN.items() if description.get(name, plain) not in (plain, None, [], {})]
    if description.get("init_lora_weights", True) not in STARTS:
        other.append("init_lora_weights")  # it has changed the model's own weights, or is a method of its own
    if other:
        raise ConfigError(
            f"{key}: uses {other[0]}={description[other[0]]}, which rlexp does not have. Give an adapter of plain "
            f"LoRA, or merge it into its model with peft's merge_and_unload, and train that: model.path=FOLDER."
        )
    if not os.path.isfile(folder / WEIGHTS):
        raise ConfigError(f"{key}: has no {WEIGHTS}. Give a folder to which peft's save_pretrained wrote an adapter.")
    return adapter
