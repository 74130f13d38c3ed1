"""Measure kernels and layouts on one GPU, without a network: the time of a ring of N, one rank at a time.

    python -m bench.gpu_attention                                          all tables, on the first GPU
    python -m bench.gpu_attention --write docs/measured/benchmarks.md      and into the page
    python -m bench.gpu_attention --quick                                  short lengths, to see whether it runs
    python -m bench.gpu_attention --device cpu --quick                     the same without a GPU, on torch's CPU kernel

It needs torch, numpy and this checkout; rlexp's other requirements need not be installed. Every table is printed and
written as soon as it is complete. If one fails, the page says how, and the next one begins.

There are four tables:

- Kernels: each available one against torch's own `scaled_dot_product_attention`, restricted to its flash backend.
- Windows: what a window saves, in one call of each kernel.
- Layouts: every rank runs the real kernels, merges and buffers at its real shapes. The other ranks' keys, values and
  gradients are drawn from a seed while the clock is stopped. The ring's time is the sum over the steps of the slowest
  rank's time. The efficiency is the time of one call of the same kernel over the whole pack, divided by the number of
  ranks, relative to the ring's time. No byte is sent: the columns with a link are a model, from the bytes that each
  rank would send and a stated bandwidth.
- Errors: of the results that all ranks together compute, against float64.
"""

from __future__ import annotations

import argparse
import functools
import platform
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.simulate import Alone, Clock, Sizes, Trace, call_of, in_ring, packed, timed
from bench.tables import put
from bench.together import whole_ring
from rlexp.training.ring.kernels import available, get_kernel
from rlexp.training.ring.kernels.base import BlockKernel, Call
from rlexp.training.ring.layouts import get_layout

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
THEIRS = "torch's flash attention"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Bytes a second out of a GPU, one direction: NVLink 4 of an H100, and one 400 Gbit/s adapter for each GPU.
NEAR, FAR = 450.0, 50.0
SHORTEST, LONGEST = 256, 16384  # of a mix's sequences
WINDOWS = (128, 1024, 4096)  # of gpt-oss, Gemma 3, Mistral


@dataclass(frozen=True)
class Options:
    sizes: Sizes
    kernel_tokens: tuple[int, ...]
    layout_tokens: int
    error_tokens: int
    rings: tuple[int, ...]
    repeats: int
    near: float  # bytes a second
    far: float

    @property
    def clock(self) -> Clock:
        return Clock(self.sizes.device)

    def timed(self, work: Callable[[], object]) -> float:
        return timed(work, self.clock, self.repeats, statistics.median)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    options = _options(arguments)
    chosen = [arguments.only] if arguments.only else list(SECTIONS)
    started = time.time()
    texts, failed = [_about(options, arguments.commit or _commit())], False
    for name in chosen:
        try:
            texts.append(SECTIONS[name](options))
        except Exception as error:  # of a library, of the GPU: what was measured until then counts
            traceback.print_exc()
            said = next(iter(str(error).splitlines()), "")
            texts.append(f"The table of {name} failed: {type(error).__name__}: {said}")
            failed = True
        print(texts[-1], end="\n\n", flush=True)
        if arguments.write:
            put(arguments.write, "\n\n".join([*texts, f"In {time.time() - started:.0f} seconds."]), "gpu")
    print(f"{texts[0]}\nAll in {time.time() - started:.0f} seconds.")
    sys.exit(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="short lengths and few repeats")
    parser.add_argument("--only", choices=tuple(SECTIONS))
    parser.add_argument("--write", type=Path, help="put the tables into this page, between its markers")
    parser.add_argument("--commit", help="what to say was measured, where git cannot")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="bf16; on CPU fp32")
    parser.add_argument("--heads", type=int, help="of queries: 32")
    parser.add_argument("--kv-heads", type=int, help="of keys and values: 8")
    parser.add_argument("--size", type=int, help="of a head: 128")
    parser.add_argument("--tokens", type=int, help="of the pack in the table of layouts: 65,536")
    parser.add_argument("--kernel-tokens", type=int, nargs="+", help="8,192 to 131,072")
    parser.add_argument("--error-tokens", type=int, help="4,096")
    parser.add_argument("--rings", type=int, nargs="+", help="2 4 8")
    parser.add_argument("--repeats", type=int, help="5, of which the median counts")
    parser.add_argument("--near", type=float, default=NEAR, help="GB a second between GPUs of a node")
    parser.add_argument("--far", type=float, default=FAR, help="GB a second between nodes, for each GPU")
    given = parser.parse_args()
    if given.only and given.write:
        parser.error("--only leaves the other tables out of the page: give it without --write")
    return given


def _options(given: argparse.Namespace) -> Options:
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench.gpu_attention: no GPU is visible. Use --device cpu --quick to see whether it runs.")
    quick = given.quick
    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    small = quick and given.device == "cpu"
    sizes = Sizes(
        given.heads or (8 if small else 32),
        given.kv_heads or (2 if small else 8),
        given.size or (16 if small else 128),
        DTYPES[given.dtype or ("bf16" if given.device == "cuda" else "fp32")],
        device,
    )
    short = 256 if small else 4096
    return Options(
        sizes,
        tuple(given.kernel_tokens or ((short, 2 * short) if quick else (8192, 16384, 32768, 65536, 131072))),
        given.tokens or (2 * short if quick else 65536),
        given.error_tokens or (short if small else 4096),
        tuple(given.rings or ((2, 4) if small else (2, 4, 8))),
        given.repeats or (1 if small else 5),
        given.near * 1e9,
        given.far * 1e9,
    )


# ---- kernels ----


def kernel_table(options: Options) -> str:
    sizes = options.sizes
    lines = [
        "| tokens | kernel | forward, ms | over torch's | forward and backward, ms | over torch's | TFLOP/s |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tokens in options.kernel_tokens:
        reference: list[float] | None = None  # torch's own, which comes first
        for name, forward, both in _calls(sizes, tokens):
            seconds = _fitting(lambda works=(forward, both): [options.timed(work) for work in works])  # type: ignore[misc]
            if seconds is None:
                lines.append(f"| {tokens:,} | {name} | does not fit | | | | |")
                continue
            if name == THEIRS:
                reference = seconds
            over = (
                [f"{ours / other:.2f}" for ours, other in zip(seconds, reference, strict=True)] if reference else "  "
            )
            operations = 7 * tokens**2 * sizes.heads * sizes.size  # 2 products forward, 5 backward, half of each masked
            first, all_ = seconds
            lines.append(
                f"| {tokens:,} | {name} | {first * 1e3:.2f} | {over[0]} | {all_ * 1e3:.2f} | {over[1]} | "
                f"{operations / all_ / 1e12:.1f} |"
            )
            _say(lines[-1])
    return (
        "### Kernels\n\nOne causal sequence; ours with the conversions to float32 and back that a layout has.\n\n"
        + "\n".join(lines)
    )


def _calls(sizes: Sizes, tokens: int) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Torch's attention first; of each the forward pass, and both."""
    inputs = _fitting(lambda: sizes.drawn(tokens))
    if inputs is None:
        _say(f"{tokens:,} tokens: queries, keys and values alone do not fit")
        return
    q, k, v, dout = inputs
    yield THEIRS, lambda: one_call(q, k, v), lambda: one_call(q, k, v, dout)
    for kernel in _kernels(sizes):
        yield (
            kernel.name,
            lambda kernel=kernel: kernel_call(kernel, inputs, [tokens], sizes, backward=False),  # type: ignore[misc]
            lambda kernel=kernel: kernel_call(kernel, inputs, [tokens], sizes),  # type: ignore[misc]
        )


def _kernels(sizes: Sizes) -> list[BlockKernel]:
    """The available kernels without the plain one, which is a reference."""
    kernels = available(sizes.device.type, sizes.dtype, sizes.size)
    return [kernel for kernel in kernels if kernel.name != "plain"] or kernels


def one_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None) -> list[Tensor]:
    """Torch's own attention over a whole sequence; on CUDA only by its flash backend."""
    q, k, v = (x.detach().requires_grad_(dout is not None) for x in (q, k, v))
    qs, ks, vs = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True).squeeze(0).transpose(0, 1)
    if dout is None:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def kernel_call(
    kernel: BlockKernel,
    inputs: Sequence[Tensor],
    lengths: Sequence[int],
    sizes: Sizes,
    *,
    backward: bool = True,
    window: int | None = None,
) -> list[Tensor]:
    """One causal call over a whole pack, as in a ring of one."""
    q, k, v, dout = inputs
    call = _causal(tuple(lengths), window)
    out, lse = kernel.forward(q, k, v, call, sizes.scale)
    rounded = out.to(q.dtype)
    if not backward:
        return [rounded]
    grads = kernel.backward(dout, q, k, v, rounded, lse, call, sizes.scale)
    return [rounded, *(grad.to(q.dtype) for grad in grads)]


@functools.lru_cache(maxsize=1)  # all layers of a model share it
def _causal(lengths: tuple[int, ...], window: int | None) -> Call:
    return call_of(lengths, lengths, window is None, window, window and (0,) * len(lengths))


# ---- windows ----


def window_table(options: Options) -> str:
    sizes = options.sizes
    lines = [
        "| tokens | kernel | window | pairs | forward, ms | forward and backward, ms | over no window |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tokens in options.kernel_tokens:
        for kernel in _kernels(sizes):
            whole: float | None = None  # without a window, which comes first
            for window in (tokens, *(window for window in WINDOWS if window < tokens)):
                seconds = _fitting(functools.partial(_windowed, options, kernel, tokens, window))
                whole = seconds[1] if seconds and window == tokens else whole
                cells = [f"{each * 1e3:.2f}" for each in seconds] if seconds else ["does not fit", ""]
                ratio = f"{seconds[1] / whole:.2f}" if seconds and whole else ""
                pairs = window * (2 * tokens - window + 1) / tokens / (tokens + 1)
                name = "none" if window == tokens else f"{window:,}"
                lines.append(f"| {tokens:,} | {kernel.name} | {name} | {pairs:.1%} | {' | '.join(cells)} | {ratio} |")
                _say(lines[-1])
    return (
        "### Windows\n\nOne sequence, in one call. Pairs: of a query with a key that it sees, as a share of those "
        "without a window.\n\n" + "\n".join(lines)
    )


def _windowed(options: Options, kernel: BlockKernel, tokens: int, window: int) -> list[float]:
    inputs = options.sizes.drawn(tokens)
    asked = None if window == tokens else window
    one, both = (
        functools.partial(kernel_call, kernel, inputs, [tokens], options.sizes, backward=backward, window=asked)
        for backward in (False, True)
    )
    return [options.timed(one), options.timed(both)]


# ---- layouts ----


def layout_table(options: Options) -> str:
    kernel = get_kernel("auto", options.sizes.device.type, options.sizes.dtype, options.sizes.size)
    lines = [
        "| pack | ring | layout | slowest rank, ms | efficiency | one node | several nodes | sent, MB | peak, MB |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for pack, lengths in (("one sequence", [options.layout_tokens]), ("mix", mixed(options.layout_tokens))):
        whole = _fitting(functools.partial(_whole, options, kernel, lengths))
        for ring in options.rings:
            for name, inner in _layouts(ring, options.sizes.heads):
                row = _fitting(functools.partial(_layout_row, options, kernel, whole, name, inner, ring, lengths))
                lines.append(f"| {pack} | {ring} | {shown(name, inner)} | {row or 'does not fit | | | | |'} |")
                _say(lines[-1])
    mix = mixed(options.layout_tokens)
    near, far = (f"{rate / 1e9:g} GB/s" for rate in (options.near, options.far))
    return (
        f"### Layouts\n\n{options.layout_tokens:,} tokens by `{kernel.name}`, forward and backward: one sequence, and "
        f"a mix of {len(mix)} sequences of {min(mix):,} to {max(mix):,} tokens.\n"
        f"Efficiency: without sending; then by a model, not measured, with {near} out of each GPU inside a node, and\n"
        f"with {far} between nodes, where the groups of a hybrid are inside one. A rank sends so much in a layer.\n"
        f"The peak is of the ranks with the least and the most, with queries, keys, values, output and gradients.\n\n"
        + "\n".join(lines)
    )


def shown(name: str, inner: int) -> str:
    return f"hybrid, ulysses {inner} × zigzag" if name == "hybrid" else name


def _layouts(ring: int, heads: int) -> Iterator[tuple[str, int]]:
    for name in ("zigzag", "contiguous", "allgather"):
        yield name, 1
    if heads % ring == 0:
        yield "ulysses", ring
    for inner in (2, 4):
        if inner < ring and heads % inner == 0:
            yield "hybrid", inner


def mixed(tokens: int) -> list[int]:
    """Lengths like those of prompts with answers: most short, a few long; the same on every machine."""
    lengths: list[int] = []
    drawn = random.Random(0)
    while sum(lengths) < tokens:
        length = int(min(max(drawn.lognormvariate(0, 1) * tokens / 32, tokens * SHORTEST / 65536), LONGEST))
        lengths.append(max(1, min(length, tokens - sum(lengths))))
    return lengths


def _whole(options: Options, kernel: BlockKernel, lengths: Sequence[int]) -> float:
    inputs = options.sizes.drawn(sum(lengths))
    return options.timed(lambda: kernel_call(kernel, inputs, lengths, options.sizes))


def _layout_row(
    options: Options, kernel: BlockKernel, whole: float | None, name: str, inner: int, ring: int, lengths: Sequence[int]
) -> str:
    layout = get_layout(name, inner)
    segments = packed(lengths, layout.multiple(ring))
    traces: list[Trace] = []
    peaks = []
    for rank in range(ring):
        with _Peak(options.sizes.device) as peak:
            alone = Alone(layout, segments, ring, rank, kernel, options.sizes)
            for _ in range(options.repeats + 1):
                alone.play()
            traces.append(alone.trace(statistics.median))
            del alone
        peaks.append(peak.megabytes)
    steps = [trace.steps for trace in traces]
    near = dict.fromkeys(("between", "gather", "scatter", "exchange"), options.near)
    far = near | dict.fromkeys(("between", "gather", "scatter"), options.far)
    if name == "ulysses":
        far["exchange"] = options.far
    shares = [whole / ring / in_ring(steps, links) if whole else None for links in (None, near, far)]
    efficiencies = " | ".join("" if share is None else f"{share:.0%}" for share in shares)
    known = [peak for peak in peaks if peak is not None]
    peak_column = f"{min(known):,.0f} to {max(known):,.0f}" if known else "not measured"
    sent = max(trace.sent() for trace in traces) / 1e6
    return f"{in_ring(steps) * 1e3:.2f} | {efficiencies} | {sent:,.1f} | {peak_column}"


class _Peak:
    """The peak of newly allocated GPU memory; None on CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.megabytes: float | None = None

    def __enter__(self) -> _Peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.megabytes = (torch.cuda.max_memory_allocated(self.device) - self._before) / 1e6


# ---- error ----


def error_table(options: Options) -> str:
    """Root mean square error against float64, relative to the error of one call of torch's attention."""
    sizes, tokens, ring = options.sizes, options.error_tokens, max(options.rings)
    inputs = sizes.drawn(tokens)
    doubled = [x.double() for x in inputs]
    expected = kernel_call(get_kernel("plain", sizes.device.type), doubled, [tokens], sizes)
    theirs = errors_of(one_call(*inputs), expected)
    lines = ["| what | out | dq | dk | dv |", "| --- | ---: | ---: | ---: | ---: |"]
    for each in _kernels(sizes):
        got = kernel_call(each, inputs, [tokens], sizes)
        lines.append(_error_row(f"`{each.name}`, one call", got, expected, theirs))
    kernel = get_kernel("auto", sizes.device.type, sizes.dtype, sizes.size)
    for name, inner in _layouts(ring, sizes.heads):
        layout = get_layout(name, inner)
        segments = packed([tokens], layout.multiple(ring))
        assert segments[0].padded == tokens, "tokens must be a multiple of the ring"
        got = whole_ring(layout, segments, ring, kernel, sizes, inputs)
        lines.append(_error_row(f"{shown(name, inner)}, ring of {ring}", got, expected, theirs))
        _say(lines[-1])
    absolute = ", ".join(f"{name} {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), theirs, strict=True))
    return (
        f"### Error\n\n{tokens:,} tokens, by `{kernel.name}`: root mean square against float64, over that of one call "
        f"of torch's attention\n(relative to the root mean square of the values: {absolute}).\n\n" + "\n".join(lines)
    )


def errors_of(got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [
        float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        for a, b in zip(got, expected, strict=True)
    ]


def _error_row(what: str, got: Sequence[Tensor], expected: Sequence[Tensor], theirs: Sequence[float]) -> str:
    ratios = (error / other for error, other in zip(errors_of(got, expected), theirs, strict=True))
    return f"| {what} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"


SECTIONS: dict[str, Callable[[Options], str]] = {
    "kernels": kernel_table,
    "windows": window_table,
    "layouts": layout_table,
    "errors": error_table,
}


# ---- about ----


def _about(options: Options, commit: str) -> str:
    sizes = options.sizes
    if sizes.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(sizes.device)
        memory = torch.cuda.get_device_properties(sizes.device).total_memory / 2**30
        where = f"one {torch.cuda.get_device_name(sizes.device)} ({memory:.0f} GiB, sm_{major}{minor})"
    else:
        where = f"CPU ({platform.machine()}), one thread, seconds of its own"
    return (
        f"Measured {time.strftime('%Y-%m-%d')} at commit {commit} on {where}, torch {torch.__version__}, by "
        f"`python -m bench.gpu_attention`.\n"
        f"{sizes.heads} heads of queries, {sizes.kv_heads} of keys, size {sizes.size}, "
        f"{str(sizes.dtype).removeprefix('torch.')}; median of {options.repeats}, after one that is not counted."
    )


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


def _fitting(work: Callable[[], T]) -> T | None:
    """Run `work`; None if the GPU's memory is too small."""
    try:
        return work()
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()  # past the handler, which would keep the tensors of what failed
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
