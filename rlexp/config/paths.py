"""The folders of configuration: beside the package in a checkout, inside the package in a wheel."""

from __future__ import annotations

from pathlib import Path


def config_root() -> Path:
    """Return the folder that holds `conf/`, `launchers/` and `sweeps/`."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    return config_root() / "conf"
