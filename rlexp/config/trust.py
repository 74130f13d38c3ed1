"""What a stored configuration may not decide by itself: that code of whoever wrote it runs here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlexp.base.errors import ConfigError

TRUST = "trust_remote_code"


def without_code(plain: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return a stored configuration that trusts no code but what the command line names again (the keys `given`). A
    reward that is a function is refused, since there is nothing in its place."""
    trusted = {**plain}
    for group in ("model", "reward"):
        if isinstance(plain.get(group), Mapping):
            trusted[group] = dict(_distrusted(plain[group], group, given))
    return trusted


def refuse_code(cfg: DictConfig, given: Collection[str]) -> None:
    """Refuse a configuration that trusts code though the command line does not say so: a second look, at what came of a
    stored one."""
    for group in ("model", "reward"):
        content = OmegaConf.to_container(cfg[group], resolve=False)
        keys = {str(key): value for key, value in content.items()} if isinstance(content, Mapping) else {}
        if dict(_distrusted(keys, group, given)) != keys:
            raise ConfigError(f"{group}.{TRUST}: the stored run alone says so. If you trust its code, give it again.")


def _distrusted(keys: Mapping[str, Any], name: str, given: Collection[str]) -> Iterator[tuple[str, Any]]:
    for leaf, value in keys.items():
        key = f"{name}.{leaf}"
        if leaf == "function" and value not in (None, "???") and not _said(key, given):
            raise ConfigError(
                f"{key}={value}: names Python code, and so far only the stored run says that it may run. If you trust "
                f"it, give it again: {key}={value}."
            )
        if leaf == TRUST and not _said(key, given):
            yield leaf, False
        elif isinstance(value, Mapping):
            yield leaf, dict(_distrusted(value, key, given))
        else:
            yield leaf, value


def _said(key: str, given: Collection[str]) -> bool:
    """Return whether the command line gives a key, or a mapping that it is in."""
    parts = key.split(".")
    return any(".".join(parts[:end]) in given for end in range(1, len(parts) + 1))
