"""Measure each layout's work relative to one flash call, how evenly N ranks share it, and its error in bfloat16.

    python -m bench.attention                       print the tables; over 45 minutes on a quiet core
    python -m bench.attention --write docs/measured/attention.md
    python -m bench.attention --only work           or packed, or errors

There is no communication: bench.simulate runs each rank alone, one after the other on one core. Times are CPU seconds
of the thread, the shortest of several rounds for each piece of work. A round contains all layouts, all ranks and one
call of `scaled_dot_product_attention`, so that a slow phase of the machine slows all of them. The maximum over ranks in
every step collects the remaining noise: fewer rounds give lower efficiencies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.measured import print_tables, processor
from bench.simulate import Alone, Clock, Sizes, Trace, in_ring, packed
from bench.together import whole_ring
from rlexp.config.load import compose_config
from rlexp.training.dealer.of_run import costs_of
from rlexp.training.ring.kernels.cpu_flash import CpuFlash
from rlexp.training.ring.layouts import Layout, get_layout
from rlexp.training.ring.widths import Costs

HEADS, SIZE = 8, 64
LONG = (8192,)
# Tokens of pairs by the tokenizer of SmolLM2-135M, prompt and answer, chosen and rejected: the first pair of SQuALITY's
# human evaluation (github.com/nyu-mll/SQuALITY, v1.3; the story is its prompt), and the first 16 of the test split of
# HH-RLHF helpful-base (github.com/anthropics/hh-rlhf).
SQUALITY = (7960, 7821)
HH = (57, 191, 142, 137, 203, 114, 179, 165, 497, 480, 98, 109, 37, 24, 228, 211,
      203, 184, 71, 65, 202, 77, 18, 24, 205, 176, 123, 282, 612, 637, 244, 240)  # fmt: skip
MIX = (*SQUALITY, *HH)

RINGS = (2, 4, 8)
INNER = 2  # of hybrid
SHORT = 1024  # tokens, of which all heads are one piece of work
ROUNDS = 10
ERRORS = ((2048,), (257, 1, 600, 37, 1024))  # lengths of which float64 has the whole score matrix
CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    print_tables("bench.attention", __doc__, TABLES)


@dataclass(frozen=True)
class Case:
    layout: str
    ring_size: int
    widths: bool = False  # sequences that are worth it are held whole

    @property
    def inner(self) -> int:
        return INNER if self.layout == "hybrid" else self.ring_size

    @property
    def name(self) -> str:
        if self.widths:
            return f"{self.layout}, with widths"
        return f"hybrid, ulysses {INNER} × zigzag" if self.layout == "hybrid" else self.layout

    def get(self) -> Layout:
        return get_layout(self.layout, self.inner, costs=costs() if self.widths else None)


@functools.cache
def costs() -> Costs:
    """Return what decides the widths: rates of a core, as a run on CPUs has them, for layers with these heads. A rank
    has room for any number of tokens."""
    cfg = compose_config(["launch.device=cpu", "logger=none", f"parallel=ring{RINGS[-1]}", "parallel.cut=auto"])
    known = costs_of(cfg, {"num_attention_heads": HEADS, "head_dim": SIZE})
    assert known is not None
    return replace(known, most=None)


def cases(rings: Sequence[int]) -> list[Case]:
    """All layouts on all rings. A hybrid whose inner ring is the whole ring is Ulysses."""
    names = ("zigzag", "contiguous", "allgather", "ulysses", "hybrid")
    return [Case(name, ring) for name in names for ring in rings if name != "hybrid" or ring > INNER]


# ---- work, and how well it is shared ----


@dataclass
class Measured:
    case: Case
    ranks: list[Trace]

    def work(self, alone: float) -> float:
        return sum(rank.seconds() for rank in self.ranks) / alone

    def efficiency(self, alone: float) -> float:
        """The time of each rank if one call's work were shared evenly, divided by the ring's time."""
        return alone / self.case.ring_size / in_ring([rank.steps for rank in self.ranks])


def measure(
    lengths: Sequence[int], dtype: torch.dtype, rings: Sequence[int], *more: Case
) -> tuple[OneCall, list[Measured]]:
    sizes, once, played = Sizes(HEADS, HEADS, SIZE, dtype, CPU), OneCall(lengths, dtype), []
    for case in (*cases(rings), *more):
        layout = case.get()
        segments = packed(lengths, layout.multiple(case.ring_size), layout.spare(case.ring_size))
        ranks = range(case.ring_size)
        played.append((case, [Alone(layout, segments, case.ring_size, rank, CpuFlash(), sizes) for rank in ranks]))
    for _ in range(ROUNDS + 1):
        once.play()
        for _, alone in played:
            for rank in alone:
                rank.play()
    return once, [Measured(case, [rank.trace() for rank in alone]) for case, alone in played]


class OneCall:
    """torch's flash attention, forward and backward, one sequence after the other.

    A long one is also played head by head, as the kernel goes through them on one thread, and pass by pass: so that the
    least of several rounds is that of pieces, as it is of a rank's work. That sum is what all is held to; the best of
    the whole calls is printed beside it."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.inputs = [drawn(length, HEADS, dtype, seed=number) for number, length in enumerate(lengths)]
        self.pieces = [
            # The kernel makes this gradient contiguous, which of all heads costs nothing.
            [*(x[:, part] for x in each[:3]), each[3][:, part].contiguous()]
            for each, length in zip(self.inputs, lengths, strict=True)
            for part in ([slice(head, head + 1) for head in range(HEADS)] if length > SHORT else [slice(None)])
        ]
        self.rounds: list[list[float]] = []
        self.wholes: list[float] = []

    def play(self) -> None:
        clock = Clock(CPU)
        self.wholes.append(sum(sum(flash_timed(each, clock)) for each in self.inputs))
        self.rounds.append([seconds for piece in self.pieces for seconds in flash_timed(piece, clock)])

    def seconds(self) -> float:
        """The shortest seconds, without the first round."""
        return sum(map(min, zip(*self.rounds[1:], strict=True)))

    def whole(self) -> float:
        return min(self.wholes[1:])


def flash_timed(inputs: Sequence[Tensor], clock: Clock) -> tuple[float, float]:
    """Seconds of the forward and the backward pass."""
    began = clock.mark()
    out, leaves = flash_forward(*inputs[:3])
    passed = clock.mark()
    flash_backward(out, leaves, inputs[3])
    return clock.seconds(began, passed), clock.seconds(passed, clock.mark())


def drawn(tokens: int, kv_heads: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    return Sizes(HEADS, kv_heads, SIZE, dtype, CPU).drawn(tokens, seed)


def flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in leaves)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1), leaves


def flash_backward(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    # On this thread, whose seconds are counted.
    with torch.autograd.set_multithreading_enabled(False):
        return list(torch.autograd.grad(out, leaves, dout))


def flash(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    out, leaves = flash_forward(q, k, v)
    return [out.detach(), *flash_backward(out, leaves, dout)]


def work() -> str:
    dtypes = (torch.float32, torch.bfloat16)
    columns = [measure(LONG, dtype, RINGS) for dtype in dtypes]
    lines = ["| layout | ring | work, float32 | efficiency | work, bfloat16 | efficiency |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for pair in zip(*(measured for _, measured in columns), strict=True):
        cells = [shared(each, once) for each, (once, _) in zip(pair, columns, strict=True)]
        lines.append(f"| {pair[0].case.name} | {pair[0].case.ring_size} | " + " | ".join(cells) + " |")
    calls, whole = zip(*((f"{once.seconds():.2f} s", f"{once.whole():.2f} s") for once, _ in columns), strict=True)
    return (
        f"### One long sequence\n\n"
        f"{LONG[0]:,} tokens, {HEADS} heads of {SIZE}, causal, forward and backward, on one thread; the best of "
        f"{ROUNDS} rounds. The reference,\n`scaled_dot_product_attention`, is called once for each head. The {HEADS} "
        f"calls together take {calls[0]} in float32 and\n{calls[1]} in bfloat16. One call with all {HEADS} heads takes "
        f"{whole[0]} and {whole[1]}.\n\n" + "\n".join(lines)
    )


def shared(each: Measured, once: OneCall) -> str:
    even = "–" if each.case.widths else f"{each.efficiency(once.seconds()):.0%}"  # these even out whole layers
    return f"{each.work(once.seconds()):.2f} | {even}"


def mix() -> str:
    ring = RINGS[-1]
    once, measured = measure(MIX, torch.float32, [ring], *(Case(name, ring, True) for name in ("zigzag", "allgather")))
    lines = ["| layout | ring | work | efficiency |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {each.case.name} | {each.case.ring_size} | {shared(each, once)} |" for each in measured]
    return (
        f"### A packed mix\n\n"
        f"One pair of SQuALITY and {len(HH) // 2} pairs of HH-RLHF in one pack: {len(MIX)} sequences of {min(MIX)} to "
        f"{max(MIX):,} tokens, {sum(MIX):,} in all;\nfloat32, the best of {ROUNDS} rounds, on {processor()}. "
        f"Work is relative to one call per sequence. Long sequences are timed head by\nhead "
        f"({once.seconds():.2f} s in total; {once.whole():.2f} s with all heads in one call).\n\n" + "\n".join(lines)
    )


# ---- errors in bfloat16 ----


def errors() -> str:
    lines = ["| layout | heads | sequences | out | dq | dk | dv |", "| --- | ---: | --- |" + " ---: |" * 4]
    for kv_heads in (HEADS, 2):
        for lengths in ERRORS:
            lines += rows_of_errors(lengths, kv_heads)
    return (
        f"### Errors in bfloat16\n\n"
        f"Root mean square error against float64 over the pack, relative to the root mean square of the true value. "
        f"The\nnumber in brackets is relative to the error of one flash call per sequence. Ring of 8, heads of size "
        f"{SIZE}. The column\n`heads` gives the number of query heads / key/value heads.\n\n" + "\n".join(lines)
    )


def rows_of_errors(lengths: Sequence[int], kv_heads: int) -> list[str]:
    sizes = Sizes(HEADS, kv_heads, SIZE, torch.bfloat16, CPU)
    multiple = RINGS[-1]
    segments = packed(lengths, multiple)
    inputs = sizes.drawn(sum(segment.padded for segment in segments), seed=3)
    each = [[x[s.start : s.start + s.length] for x in inputs] for s in segments]
    true = [torch.cat(parts) for parts in zip(*(full(*one) for one in each), strict=True)]
    once = error([torch.cat(parts) for parts in zip(*(flash(*one) for one in each), strict=True)], true)
    what = f"{HEADS}/{kv_heads} | " + " + ".join(f"{length:,}" for length in lengths)
    lines = [f"| one flash call | {what} | " + " | ".join(f"{value:.1e}" for value in once) + " |"]
    for case in cases([multiple]):
        layout = get_layout(case.layout, case.inner)
        assert layout.multiple(multiple) == multiple
        got = whole_ring(layout, segments, multiple, CpuFlash(), sizes, inputs)
        errors_of_layout = error([x[: sum(lengths)] for x in got], true)
        cells = (f"{value:.1e} ({value / known:.2f})" for value, known in zip(errors_of_layout, once, strict=True))
        lines.append(f"| {case.name} | | | " + " | ".join(cells) + " |")
    return lines


def full(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Attention and its gradients in float64 with the whole score matrix, without any code of the kernels."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def error(got: Sequence[Tensor], true: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, true, strict=True)]


TABLES: dict[str, Callable[[], str]] = {"work": work, "packed": mix, "errors": errors}


if __name__ == "__main__":
    main()
