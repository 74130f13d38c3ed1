"""Differences between two gradients, or two sets of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlexp.verify.recording import Array, TensorFiles


@dataclass(frozen=True)
class TensorSize:
    """Norms of a parameter's gradient in the run and in the reference, of their difference, and the factor between."""

    name: str
    got: float
    wanted: float
    apart: float
    factor: float
    residue: float  # relative difference that remains without the factor


def size_of(got: Array, wanted: Array, name: str) -> TensorSize:
    ours, theirs = np.asarray(got, np.float64).reshape(-1), np.asarray(wanted, np.float64).reshape(-1)
    size, norm = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    factor = float(ours @ theirs) / (norm * norm) if norm else math.nan
    residue = float(np.linalg.norm(ours - factor * theirs)) / (size or 1.0)
    return TensorSize(name, size, norm, float(np.linalg.norm(ours - theirs)), factor, residue)


def gradients_apart(got: TensorFiles, wanted: TensorFiles, step: int) -> list[TensorSize]:
    """Compare the gradients of a step that both have."""
    names = set(got.names("gradient", step))
    return [size_of(got.read("gradient", step, name), wanted.read("gradient", step, name), name)
            for name in wanted.names("gradient", step) if name in names]  # fmt: skip


def shares(sizes: Sequence[TensorSize]) -> list[float]:
    """‖a − b‖ / ‖b‖ of each parameter. A thousandth of the whole gradient is added to ‖b‖, since some gradients are
    nothing but rounding: a softmax does not depend on a bias of the keys."""
    whole = math.sqrt(sum(size.wanted**2 for size in sizes))
    return [size.apart / (size.wanted + 1e-3 * whole or 1.0) for size in sizes]


def common_factor(sizes: Sequence[TensorSize]) -> str:
    """Say so if all gradients are wrong by the same factor."""
    factors = [size.factor for size in sizes if size.wanted]
    if not factors or any(not size.residue < 1e-2 for size in sizes if size.wanted):
        return ""
    low, high = min(factors), max(factors)
    factor = float(np.median(factors))
    if not low > 0 or high / low > 1.01 or abs(factor - 1) < 1e-3:
        return ""
    return f"; all are {factor:.3f} times too large" if factor > 1 else f"; all are {factor:.4g} of what they should be"


def relative(got: Array, wanted: Array) -> float:
    """The largest difference, relative to the largest element."""
    return float(np.abs(got - wanted).max()) / (float(np.abs(wanted).max()) or 1.0)


def weights_apart(got: TensorFiles, wanted: TensorFiles, step: int) -> float:
    """The largest difference of two runs' weights after a step. Those that neither has changed are the start's."""
    both = set(got.names("weights", step)) & set(wanted.names("weights", step))
    names = both & (got.moved(step) | wanted.moved(step))
    return max((relative(*(files.read("weights", step, name) for files in (got, wanted))) for name in names),
               default=0.0)  # fmt: skip


def in_bfloat16(values: Array) -> Array:
    """Round to the nearest number of bfloat16, the upper half of a float32; halves to the even one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).reshape(np.shape(values))
