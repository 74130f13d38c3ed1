"""The entries of an open mapping, such as `reward.terms`: each by a schema of its own."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlexp.base.errors import ConfigError
from rlexp.config.schema.bounds import as_typed, example
from rlexp.config.schema.keys import suggestion
from rlexp.config.schema.value_kinds import in_words


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
    node, hints = OmegaConf.structured(schema), typing.get_type_hints(schema)
    for leaf, value in own.items():
        try:
            node[leaf] = value
        except (OmegaConfBaseException, OverflowError):  # the latter by a whole number that no float is near
            rule, default = in_words(hints[leaf]), {each.name: each.default for each in fields(schema)}[leaf]
            problem = f"{key}.{leaf}={as_typed(value)}: must be {rule}."
            raise ConfigError(f"{problem} {example(f'{key}.{leaf}', default)}") from None
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ConfigError(f"{key}.{missing[0]}: has no value, and {what} needs one. Give {key}.{missing[0]}=VALUE.")
    return OmegaConf.to_object(node)
