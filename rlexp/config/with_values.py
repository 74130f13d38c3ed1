"""The same configuration with other values in one of its groups."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlexp.config.schema import Config


def with_values(cfg: Config, group: str, **values: Any) -> Config:
    changed: dict[str, Any] = {group: dataclasses.replace(getattr(cfg, group), **values)}
    return dataclasses.replace(cfg, **changed)
