"""rlexp: preference training and reinforcement learning over ring attention.

The promise: the ring size is a free parameter. See docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlexp.base.version import __version__

if TYPE_CHECKING:
    from rlexp.run.from_python import Run

__all__ = ["__version__", "train"]


def train(overrides: Sequence[str] = ()) -> Run:
    """Train as `python -m rlexp OVERRIDES` does, in processes of its own, and return the run when it has ended.

    `run.rows` is the curve, `run.folder` the run's folder, and `run.model()` the trained model.
    """
    from rlexp.run.from_python import train as started

    return started(overrides)
