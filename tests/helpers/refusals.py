"""What the command would print of a configuration that it refuses, without starting it."""

from __future__ import annotations

from collections.abc import Sequence

from rlexp.config.explain import explain
from rlexp.config.load import compose_config


def refusal_of(overrides: Sequence[str]) -> str:
    """Return the message, which is the whole of what the command prints after `rlexp: `."""
    try:
        compose_config(overrides)
    except Exception as error:  # ours, or Hydra's
        message = explain(error)
        assert message is not None, "this error would be shown as a bug, with its traceback"
        return message
    raise AssertionError(f"not refused: {' '.join(overrides)}")
