"""Read JSON that anybody may have written: what cannot be read is a ValueError, and values are of the kinds that are
expected. Write it so that each of its characters prints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Kinds = Mapping[str, type | tuple[type, ...]]
NOTHING = type(None)


def loads(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and mappings are too deep in each other") from None


def mapping_in(file: Path) -> dict[str, Any] | None:
    """Return the mapping that a file holds; None if it cannot be read, or holds something else."""
    try:
        content = loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def dumps(value: Any, **how: Any) -> str:
    """Return JSON in which letters of every language stand as they are, and what does not print is escaped."""
    text = json.dumps(value, ensure_ascii=False, **how)
    return re.sub(r"[^\n -~]", lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], text)


def of_kinds(facts: Any, kinds: Kinds) -> dict[str, Any]:
    """Return what a mapping says, without the values of another kind than is expected; nothing of what is no mapping.
    True is no number."""
    if not isinstance(facts, dict):
        return {}
    return {str(key): value for key, value in facts.items() if is_of(value, kinds.get(key, object))}


def is_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    allowed = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed or object in allowed)
