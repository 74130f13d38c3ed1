"""Values that are what they say: `${…}` in them is text, which OmegaConf is not to resolve."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any


def literal(text: str) -> str:
    """Escape a text so that OmegaConf reads it as it stands. A backslash counts for OmegaConf only before `${`."""
    return re.sub(r"(?<!\\)(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", text)


def literals(value: Any) -> Any:
    """Return the same value, or dataclass, with every text in it escaped."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return literal(value)
    if isinstance(value, Mapping):
        return {key: literals(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [literals(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: literals(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
