"""Load what a run has exported, by the class that transformers or peft has for it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlexp.base.errors import ConfigError


def loader_of(place: Path) -> Any:
    """Return the class whose `from_pretrained` reads a model that a run has written."""
    if (place / "adapter_config.json").is_file():
        try:
            from peft import AutoPeftModelForCausalLM
        except ImportError:
            raise ConfigError(f"{place}: is an adapter, which peft loads: pip install peft.") from None
        return AutoPeftModelForCausalLM
    classes: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        classes = json.loads((place / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    scores = any(name.endswith("ForSequenceClassification") for name in classes)
    return AutoModelForSequenceClassification if scores else AutoModelForCausalLM
