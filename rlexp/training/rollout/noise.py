"""The randomness of sampling: one number in [0, 1) for each token to draw.

The number follows from (seed, rollout, prompt, sample, position) alone. So a token does not depend on the rank that
draws it, on the samples drawn beside it, or on stops of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BITS = 53  # precision of float64


def stream(seed: int, rollout: int, prompts: Sequence[int], numbers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return a key for each sample, for all positions of its answer."""
    key = np.zeros(len(prompts), dtype=np.uint64)
    for part in (np.full(len(prompts), seed), np.full(len(prompts), rollout), np.asarray(prompts), np.asarray(numbers)):
        key = _mixed(key ^ _mixed(part.astype(np.uint64)))
    return key


def uniform(stream_B: npt.NDArray[np.uint64], position: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the number for each sample's token at `position` of its answer: one for all, or one each."""
    bits = _mixed(stream_B ^ _mixed((np.zeros(len(stream_B), dtype=np.int64) + position + 1).astype(np.uint64)))
    return (bits >> np.uint64(64 - _BITS)) * np.float64(2.0**-_BITS)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits, as the last step of SplitMix64 does (Steele, Lea and Flood 2014): each depends on all others."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
