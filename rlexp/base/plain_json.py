"""Read JSON that anybody may have written: what cannot be read is a ValueError, and values are of the kinds that are
expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Kinds = Mapping[str, type | tuple[type, ...]]
NOTHING = type(None)


def loads(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and mappings are too deep in each other") from None


def of_kinds(facts: Any, kinds: Kinds) -> dict[str, Any]:
    """Return what a mapping says, without the values of another kind than is expected; nothing of what is no mapping.
    True is no number."""
    if not isinstance(facts, dict):
        return {}
    return {str(key): value for key, value in facts.items() if is_of(value, kinds.get(key, object))}


def is_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    allowed = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed or object in allowed)
