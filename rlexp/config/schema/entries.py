"""The entries of an open mapping, such as `reward.terms`: each by a schema of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.base.errors import ConfigError
from rlexp.config.schema.keys import suggestion


def typed_entry(
    key: str, schema: type, own: Mapping[str, Any], what: str, beside: Sequence[str] = (), hidden: Sequence[str] = ()
) -> Any:
    """Convert an entry by its schema. Refuse unknown keys and values of a wrong type.

    `beside` names its other keys, and `hidden` those of the schema that it does not have.
    """
    known = [leaf.name for leaf in fields(schema) if leaf.name not in ("name", *hidden)]
    for leaf in own:
        if leaf not in known:
            raise ConfigError(
                f"{key}.{leaf}: no such key of {what}.{suggestion(leaf, [*known, *beside])} "
                f"Keys: {', '.join([*beside, *known])}."
            )
    node = OmegaConf.structured(schema)
    for leaf, value in own.items():
        try:
            node[leaf] = value
        except OmegaConfBaseException as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{key}.{leaf}={value}: {reason}. Give it another value.") from None
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ConfigError(f"{key}.{missing[0]}: has no value, and {what} needs one. Give {key}.{missing[0]}=VALUE.")
    return OmegaConf.to_object(node)
