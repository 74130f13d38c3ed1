"""The version of rlexp. pyproject.toml has the same one."""

from __future__ import annotations

__version__ = "0.1.0"
