"""Whether sequences share the beginnings that they have in common, and what stands against it."""

from __future__ import annotations

from rlexp.base.errors import ConfigError
from rlexp.config.schema import BackendName, Config

NAMED = "data.share_prefix=true"


def shares(cfg: Config) -> bool:
    """Say whether a run's sequences share what they can."""
    return cfg.data.share_prefix is not False and _against(cfg) is None


def check_sharing(cfg: Config) -> None:
    """Refuse sharing that is asked for where it cannot be."""
    if cfg.data.share_prefix and (why := _against(cfg)) is not None:
        raise ConfigError(f"{NAMED}: {why}, or data.share_prefix=false.")


def _against(cfg: Config) -> str | None:
    """Say what a run must change to share; None if it can."""
    if not cfg.data.packing:
        return (
            "data.packing=false pads every sequence to the longest, as a batch whose sequences are all apart. Use "
            "data.packing=true"
        )
    if cfg.parallel.backend is not BackendName.native:
        return (
            f"parallel.backend={cfg.parallel.backend.value} attends inside a library that knows single sequences only. "
            f"Use parallel.backend=native"
        )
    return None
