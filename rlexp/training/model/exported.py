"""Load what a run has exported, by the class that transformers or peft has for it: without anything that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlexp.base import plain_json
from rlexp.base.errors import ConfigError


def load_exported(place: Path, **options: Any) -> Any:
    """Load a model that a run has written, with options of `from_pretrained`."""
    adapter = plain_json.mapping_in(place / "adapter_config.json")
    if adapter:
        try:
            from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
        except ImportError:
            raise ConfigError(f"{place}: is an adapter, which peft loads: pip install peft.") from None
        if adapter.get("task_type") == "SEQ_CLS":
            return AutoPeftModelForSequenceClassification.from_pretrained(place, num_labels=1, **options)
        return AutoPeftModelForCausalLM.from_pretrained(place, **options)
    classes = (plain_json.mapping_in(place / "config.json") or {}).get("architectures")
    named = [str(each) for each in classes] if isinstance(classes, list) else []
    scores = any(name.endswith("ForSequenceClassification") for name in named)
    return (AutoModelForSequenceClassification if scores else AutoModelForCausalLM).from_pretrained(place, **options)
