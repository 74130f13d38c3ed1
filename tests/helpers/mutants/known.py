"""Changes that are active and that nothing finds, and why that is right: by file, and by the text before and after."""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[tuple[str, str, str], str] = {}
