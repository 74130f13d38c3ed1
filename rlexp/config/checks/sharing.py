"""Whether sequences share the beginnings that they have in common, and what stands against it."""

from __future__ import annotations

from rlexp.config.checks.rules import Check, refuse_broken
from rlexp.config.schema import BackendName, Config

RULES = (
    Check("data.share_prefix", lambda cfg: not cfg.data.packing,
          "data.packing=false pads every sequence to the longest, as a batch whose sequences are all apart. Use "
          "data.packing=true, or data.share_prefix=false."),
    Check("data.share_prefix", lambda cfg: cfg.parallel.backend is not BackendName.native,
          "parallel.backend={parallel.backend.value} attends inside a library that knows single sequences only. Use "
          "parallel.backend=native, or data.share_prefix=false."),
)  # fmt: skip


def shares(cfg: Config) -> bool:
    """Say whether a run's sequences share what they can."""
    return cfg.data.share_prefix is not False and not any(rule.broken(cfg) for rule in RULES)


def check_sharing(cfg: Config) -> None:
    """Refuse sharing that is asked for where it cannot be."""
    if cfg.data.share_prefix:
        refuse_broken(RULES, cfg)
