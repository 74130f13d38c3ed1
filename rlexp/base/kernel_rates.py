"""How fast the attention kernels for GPUs are: as measured, or else as their authors say. Without torch.

`kernel_rates.csv` has a row for each kernel, generation of GPUs, head size and length: TFLOP/s of both passes of a
causal call with 32 query and 8 key/value heads in bf16, the data sheet's peak, the card and the date. `python -m
bench.gpu --only rates --keep-rates` measures the rows of a GPU and writes them.

`parallel.kernel=auto` takes the kernel that needs least time for both passes, and the estimate of a step's time takes
the measured rates. Other GPUs of a generation are assumed to reach the same share of their peak.
"""

from __future__ import annotations

import csv
import functools
import math
import typing
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from operator import attrgetter
from pathlib import Path

from rlexp.base.files import write_text
from rlexp.base.kernel_needs import NEEDS, able, installed

FORWARD, BACKWARD = 4, 10  # floating-point operations for each query, key and channel: two products, and five
TABLE = Path(__file__).with_suffix(".csv")


@dataclass(frozen=True)
class KernelRate:
    """What was measured of a kernel."""

    kernel: str
    generation: int
    head_size: int
    tokens: int
    forward: float  # TFLOP/s
    backward: float
    peak: float
    card: str
    date: str


@dataclass(frozen=True)
class Speed:
    """The shares of a GPU's peak that the passes of a kernel reach, and where the numbers are from."""

    forward: float
    backward: float
    source: str
    absolute: bool = True  # by measurements of ours on this generation; otherwise for comparisons alone

    @property
    def time(self) -> float:
        """The time of both passes, relative to a kernel that reaches the peak."""
        return (FORWARD / self.forward + BACKWARD / self.backward) / (FORWARD + BACKWARD)


@dataclass(frozen=True)
class Said:
    """What is known of a kernel without a measurement of ours: how many times as fast as another it is."""

    than: str
    forward: float
    backward: float
    source: str


A_COPY = Said("torch_flash", 1.0, 1.0, "torch's kernel is a copy of it")
# Its authors do not compare it with flash-attn 2 on Blackwell. Triton's kernel stands in for that.
BY_4 = Said("flash_attn", 2.7, 2.7, "its authors: up to 2.7 times Triton's kernel on a B200, arXiv 2603.05451")
SAID = {
    **{("flash_attn", generation): A_COPY for generation in NEEDS["flash_attn"].heads},
    ("flash_attn_3", 9): Said("flash_attn", 1.75, 1.6, "its authors: 1.5 to 2.0 and 1.5 to 1.75, arXiv 2407.08608"),
    ("flash_attn_4", 10): BY_4,
    ("flash_attn_4", 11): BY_4,
}
UNMEASURED = Speed(0.5, 0.5, "not measured", absolute=False)  # torch's kernel, which others are compared with
NEAR = 1.5  # the most by which a head size may differ from one that was measured


def ranked(names: Iterable[str], generation: int | None, head_size: int | None, tokens: int) -> list[str]:
    """Return kernels for GPUs, the fastest first; those of which nothing is known come last."""
    tokens = _compared_at(generation, tokens)

    def order(name: str) -> tuple[float, int]:
        known = speed(name, generation, head_size, tokens)
        return math.inf if known is None else known.time, [*NEEDS].index(name) if name != "torch_flash" else len(NEEDS)

    return sorted(names, key=order)


def _compared_at(generation: int | None, tokens: int) -> int:
    """Return the nearest length at which all kernels were measured that were measured on such a GPU."""
    lengths: dict[str, list[int]] = {}
    for row in rows():
        if row.generation == generation:
            lengths.setdefault(row.kernel, []).append(row.tokens)
    least, most = (max(map(min, lengths.values())), min(map(max, lengths.values()))) if lengths else (tokens, tokens)
    return min(max(tokens, least), most)


def speed(name: str, generation: int | None, head_size: int | None, tokens: int) -> Speed | None:
    """Return how fast a kernel is on a GPU, by measurements or by what is said of it; None: not known."""
    rate = measured(name, generation, head_size, tokens)
    if rate is not None or name == "torch_flash":
        return rate or UNMEASURED
    claim = SAID.get((name, generation)) if generation is not None else None
    if claim is None or (than := speed(claim.than, generation, head_size, tokens)) is None:
        return None
    absolute = than.absolute and claim is A_COPY
    return Speed(than.forward * claim.forward, than.backward * claim.backward, claim.source, absolute)


@functools.lru_cache(maxsize=4096)
def measured(name: str, generation: int | None, head_size: int | None, tokens: int) -> Speed | None:
    """Return what was measured: of the nearest head size, between the nearest two lengths; None: nothing was."""
    of_kernel = [row for row in rows() if (row.kernel, row.generation) == (name, generation)]

    def away(size: int) -> float:
        return abs(math.log(size / (head_size or 128)))

    size = min(sorted({row.head_size for row in of_kernel}), key=away, default=None)
    if size is None or away(size) > math.log(NEAR):
        return None
    of_size = sorted((row for row in of_kernel if row.head_size == size), key=attrgetter("tokens"))
    below = [row for row in of_size if row.tokens <= tokens][-1:] or of_size[:1]
    above = [row for row in of_size if row.tokens >= tokens][:1] or of_size[-1:]
    (one,), (other,) = below, above
    far = math.log(tokens / one.tokens) / math.log(other.tokens / one.tokens) if other.tokens > one.tokens else 0.0

    def between(rate: Callable[[KernelRate], float]) -> float:
        return (rate(one) + far * (rate(other) - rate(one))) / one.peak

    return Speed(between(attrgetter("forward")), between(attrgetter("backward")), f"measured on {one.card}, {one.date}")


def faster(name: str, generation: int, head_size: int | None, tokens: int, *, deterministic: bool) -> str | None:
    """Name the fastest kernel that `pip install` alone would add for this GPU, if it is faster than the run's."""
    tokens = _compared_at(generation, tokens)
    current = speed(name, generation, head_size, tokens)
    for other in ranked(able(generation, head_size, deterministic=deterministic), generation, head_size, tokens):
        known = speed(other, generation, head_size, tokens)
        if known is None or current is None or known.time >= current.time:
            return None
        if NEEDS[other].pip and not installed(other):
            return (
                f"{other} would compute attention {current.time / known.time:.1f} times as fast ({known.source}); "
                f"pip install '{NEEDS[other].pip}'"
            )
    return None


@functools.cache
def rows() -> tuple[KernelRate, ...]:
    kinds = typing.get_type_hints(KernelRate)
    with TABLE.open(encoding="utf-8", newline="") as file:
        read = [{name: kind(each[name]) for name, kind in kinds.items()} for each in csv.DictReader(file)]
    return tuple(KernelRate(**each) for each in read)


def write(new: Iterable[KernelRate], table: Path = TABLE) -> None:
    """Put rows into the table, in the place of older ones of the same kernels and GPUs."""
    new = [*new]
    again = {(row.kernel, row.generation) for row in new}
    kept = [row for row in rows() if (row.kernel, row.generation) not in again]
    lines = [",".join(each.name for each in fields(KernelRate))]
    for row in sorted((*kept, *new), key=lambda row: astuple(row)[:4]):
        lines.append(",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in astuple(row)))
    write_text(table, "\n".join([*lines, ""]))
    rows.cache_clear()
    measured.cache_clear()
