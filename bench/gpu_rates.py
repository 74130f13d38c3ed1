"""Measure the rates by which a step is estimated, as shares of the data sheet's (`rlexp/preflight/rehearsal/rates.py`).

On request, those that were measured are kept for estimates to come (`rlexp/preflight/rehearsal/measured.json`).

Shape letters: T tokens, E hidden size, V vocabulary, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu_here import Machine
from bench.simulate import Clock, Sizes, call_of, timed
from rlexp.base import kernel_rates
from rlexp.base.kernel_rates import BACKWARD, FORWARD, KernelRate
from rlexp.config.elsewhere import compose_elsewhere
from rlexp.config.schema import HardwareConfig
from rlexp.launch.joining import RankSpec

REPEATS = 10


@dataclass(frozen=True)
class Scale:
    """Sizes of what is timed: those of an 8B Llama, or small ones on the CPU."""

    tokens: int
    width: int
    between: int
    heads: int
    kv_heads: int
    size: int
    sizes: tuple[int, ...]  # of heads, in attention
    vocabulary: int
    lengths: tuple[int, ...]  # of one causal sequence
    copied: int  # bytes
    launches: int
    link: int  # bytes that a rank sends to the next


LARGE = Scale(8192, 4096, 14336, 32, 8, 128, (64, 128), 128256, (4096, 8192, 32768), 1 << 31, 2000, 1 << 28)
TINY = Scale(64, 32, 64, 4, 2, 16, (16,), 128, (64, 128), 1 << 16, 10, 1 << 12)


@dataclass(frozen=True)
class Rate:
    """What was timed, how fast it was, and the data sheet's rate in the same unit."""

    what: str
    share: str  # the name of the share in rates.py that assumes something of it
    rate: float
    unit: str
    peak: float
    assumed: float | None = None  # the share, if not that of its name
    row: KernelRate | None = None  # of both passes of a kernel, on the backward pass


def rates_section(
    machine: Machine, *, kernels: Path | None = None, others: Path | None = None
) -> tuple[str, list[str]]:
    """Return the section, and what is wrong. With files, the rates of attention kernels go to the one, and what
    estimates of this hardware assume from now on to the other."""
    hardware = compose_elsewhere([*machine.words, "logger=none"]).hardware
    found = [*_alone(machine, hardware), *_between(machine, hardware)]
    text = "\n".join(_table(found, machine, hardware))
    if kernels is None and others is None:
        return text, []
    if not machine.known:
        return text, [f"no rates of {machine.name} were kept: conf/hardware does not describe it"]
    if kernels is not None:
        kernel_rates.write([replace(each.row, card=machine.hardware) for each in found if each.row], kernels)
    if others is not None:
        write_kept(others, machine, kept(found))
    return text, []


def kept(found: Sequence[Rate]) -> dict[str, float]:
    """Return the rates that an estimate takes: medians of the products of a layer, and of what moves bytes."""
    products = [each.rate for each in found if each.what.startswith("product, ") and "head" not in each.what]
    memory = [each.rate for each in found if each.share == "MEMORY"]
    (launch,) = (each.rate for each in found if each.share == "hardware.launch_us")
    rates = {"products_tflops": statistics.median(products), "memory_tb_s": statistics.median(memory),
             "launch_us": launch}  # fmt: skip
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def write_kept(file: Path, machine: Machine, rates: dict[str, float]) -> None:
    known = json.loads(file.read_text(encoding="utf-8"))
    known[machine.hardware] = {"card": f"{machine.name}, torch {machine.torch}", "date": time.strftime("%Y-%m-%d"),
                               **rates}  # fmt: skip
    file.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _alone(machine: Machine, hardware: HardwareConfig) -> list[Rate]:
    """Measure on one GPU, in a process that ends and frees its memory."""
    from rlexp.launch.local import run_ranks

    given = (hardware, machine.device)
    (found,) = run_ranks(one_rank, 1, given, device=machine.device, preload=("torch",), timeout=900.0)
    return list(found)


def one_rank(_spec: RankSpec, hardware: HardwareConfig, device: str) -> list[Rate]:
    import torch

    torch.set_num_threads(1)
    timing = Timing(torch.device(device, 0) if device == "cuda" else torch.device(device), hardware,
                    LARGE if device == "cuda" else TINY)  # fmt: skip
    return [
        *timing.products(), *timing.attention(), *timing.head(), *timing.memory(), *timing.optimizer(),
        *timing.merging(), *timing.launches(),
    ]  # fmt: skip


@dataclass(frozen=True)
class Timing:
    device: Any
    hardware: HardwareConfig
    scale: Scale

    def seconds(self, work: Callable[[], object]) -> float:
        return timed(work, Clock(self.device), REPEATS, statistics.median)

    def drawn(self, *shape: int) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(0)
        return torch.empty(*shape, dtype=torch.bfloat16, device=self.device).normal_(generator=generator)

    def computing(self, what: str, share: str, work: Callable[[], object], flops: float) -> Rate:
        return Rate(what, share, flops / self.seconds(work) / 1e12, "TFLOP/s", self.hardware.bf16_tflops)

    def moving(self, what: str, work: Callable[[], object], size: float) -> Rate:
        return Rate(what, "MEMORY", size / self.seconds(work) / 1e12, "TB/s", self.hardware.memory_tb_s)

    def products(self) -> Iterator[Rate]:
        import torch

        s = self.scale
        for name, inner, outer in (
            ("queries", s.width, s.width),
            ("MLP up", s.width, s.between),
            ("MLP down", s.between, s.width),
            ("head", s.width, s.vocabulary),
        ):
            x, weight = self.drawn(s.tokens, inner), self.drawn(inner, outer)
            yield self.computing(
                f"product, {name}: {s.tokens:,} × {inner:,} × {outer:,}", "PRODUCTS",
                functools.partial(torch.matmul, x, weight), 2.0 * s.tokens * inner * outer,
            )  # fmt: skip

    def attention(self) -> Iterator[Rate]:
        """Time each kernel that runs here; arithmetic as a rehearsal counts it."""
        import torch

        from rlexp.training.ring.kernels import available

        for size in self.scale.sizes:
            for kernel in available(self.device.type, torch.bfloat16, size):
                for length in self.scale.lengths if kernel.name != "plain" else ():
                    yield from self.kernel(kernel, size, length)

    def kernel(self, kernel: Any, size: int, length: int) -> Iterator[Rate]:
        import torch

        from rlexp.preflight.rehearsal.kernel_cost import by_length

        s, peak = self.scale, self.hardware.bf16_tflops
        sizes = Sizes(s.heads, s.kv_heads, size, torch.bfloat16, self.device)
        q, k, v, dout = sizes.drawn(length)
        call = call_of((length,), (length,), True)
        out, lse = kernel.forward(q, k, v, call, sizes.scale)
        given = (dout, q, k, v, out.to(q.dtype), lse, call, sizes.scale)
        inputs, work = (q, k, v, call, sizes.scale), float(by_length(call).total()) * s.heads * size
        what = f"`{kernel.name}`, heads of {size}, {length:,} tokens"
        one = self.computing(f"{what}, forward", "ATTENTION", lambda: kernel.forward(*inputs), FORWARD * work)
        other = self.computing(f"{what}, backward", "ATTENTION", lambda: kernel.backward(*given), BACKWARD * work)
        if kernel.generation is None:  # of a CPU, which stands in for a GPU
            yield from (one, other)
            return
        on = (kernel.name, kernel.generation, size, length)
        row = KernelRate(*on, round(one.rate, 1), round(other.rate, 1), peak, "", time.strftime("%Y-%m-%d"))
        known = kernel_rates.speed(*on)
        shares = (known.forward, known.backward) if known is not None and known.absolute else (None, None)
        yield from (replace(one, assumed=shares[0]), replace(other, assumed=shares[1], row=row))

    def head(self) -> Iterator[Rate]:
        """Time the function that every policy's log-probabilities come from, in as many pieces as here."""
        import torch

        from rlexp.training.model.head import HeadLogps, logits_at_once
        from rlexp.training.train.surroundings import HERE
        from rlexp.training.types import Wanted

        s = self.scale
        head = HeadLogps(Wanted(), logits_at_once(HERE.memory(self.device)))
        weight = (self.drawn(s.vocabulary, s.width) * 0.02).requires_grad_()
        hidden = self.drawn(s.tokens, s.width).requires_grad_()
        shard = _Shard(s.tokens, s.vocabulary, self.device)

        def both() -> None:
            said = head(weight, None, hidden, shard)
            torch.autograd.grad(said.logps_n.sum(), (weight, hidden))

        flops = 8.0 * s.tokens * s.width * s.vocabulary  # forward, the logits again, and two products backward
        yield self.computing(f"head, forward and backward, {s.tokens:,} tokens", "PRODUCTS", both, flops)

    def memory(self) -> Iterator[Rate]:
        x = self.drawn(self.scale.copied // 2)
        y = x.clone()
        yield self.moving("copy", lambda: y.copy_(x), 2.0 * x.nbytes)
        yield self.moving("addition in place", lambda: y.add_(x), 3.0 * x.nbytes)

    def optimizer(self) -> Iterator[Rate]:
        """Time AdamW, fused: it reads 16 bytes of a parameter and writes 12."""
        import torch

        weight = torch.zeros(self.scale.copied // 16, device=self.device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        adam = torch.optim.AdamW([weight], fused=True)
        yield self.moving("AdamW", lambda: adam.step(), 28.0 * weight.numel())

    def merging(self) -> Iterator[Rate]:
        """Time the fused kernel that merges a block: it reads and writes float32, and reads the block's bfloat16."""
        import torch

        from rlexp.training.ring.kernels.fused import merge_rows

        s = self.scale
        block, out = self.drawn(s.tokens, s.heads, s.size), torch.zeros(s.tokens, s.heads, s.size, device=self.device)
        lse, block_lse = (torch.zeros(s.tokens, s.heads, device=self.device) for _ in range(2))
        size = 2.0 * out.nbytes + block.nbytes + 3.0 * lse.nbytes
        yield self.moving("merge of a block", lambda: merge_rows(out, lse, block, block_lse), size)

    def launches(self) -> Iterator[Rate]:
        """Time many kernels that do nearly nothing: in a bare loop, and in a small model's passes, with what Python and
        autograd do between them."""
        import torch

        x = torch.zeros(1, device=self.device)

        def many() -> None:
            for _ in range(self.scale.launches):
                x.add_(1.0)

        each = self.seconds(many) / self.scale.launches
        yield Rate("launch of a kernel, in a bare loop", "", each * 1e6, "µs", self.hardware.launch_us)
        both, count = self.small_passes()
        each = self.seconds(both) / count
        yield Rate("launch of a kernel, in a model's passes", "hardware.launch_us", each * 1e6, "µs",
                   self.hardware.launch_us)  # fmt: skip

    def small_passes(self) -> tuple[Callable[[], object], int]:
        """Return both passes of a Llama so small that the host is slower than the device, and count its launches."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
                             num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(self.device)
        tokens = torch.arange(64, device=self.device).unsqueeze(0)

        def both() -> None:
            model(input_ids=tokens, use_cache=False).logits.sum().backward()

        both()  # makes the gradients
        return both, launches_of(both)


def launches_of(work: Callable[[], object]) -> int:
    """Count the kernels that some work launches, as a rehearsal counts them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from rlexp.preflight.rehearsal.operators import launches

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += launches(func)
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        work()
    return counting.count


class _Shard:
    """What the head reads of a shard."""

    def __init__(self, tokens: int, vocabulary: int, device: Any) -> None:
        import torch

        self.trained_u = torch.arange(tokens, device=device)
        self.targets_t = self.trained_u % vocabulary

    def by_token(self, values_u: Any) -> Any:
        return values_u


def _between(machine: Machine, hardware: HardwareConfig) -> list[Rate]:
    """Measure a step of the ring, in which every rank sends to the next."""
    from rlexp.launch.local import run_ranks

    if machine.ring < 2:
        return []
    given = (machine.device,)
    seconds = run_ranks(link_rank, machine.ring, given, device=machine.device, preload=("torch",), timeout=600.0)
    size = LARGE.link if machine.device == "cuda" else TINY.link
    rate = size / max(seconds) / 1e9
    return [Rate(f"a step of a ring of {machine.ring}", "LINKS", rate, "GB/s", hardware.link_gb_s)]


def link_rank(spec: RankSpec, device: str) -> float:
    import torch
    import torch.distributed as dist

    from rlexp.launch.joining import join, launch_on, leave_world
    from rlexp.training.ring.collectives import between
    from rlexp.training.world.groups import build_world

    join(spec, launch_on(device, 300.0))
    ring = build_world(spec.world_size).ring
    size = LARGE.link if device == "cuda" else TINY.link
    buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    received = torch.empty_like(buffer)
    found = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        between(ring, [((ring.rank + 1) % ring.size, buffer)], [((ring.rank - 1) % ring.size, received)]).wait()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    leave_world()
    return statistics.median(found[1:])


def _table(found: list[Rate], machine: Machine, hardware: HardwareConfig) -> Iterator[str]:
    from rlexp.preflight.rehearsal import rates

    measured = rates.measured_rates(hardware)
    known = {"PRODUCTS": "products_tflops", "MEMORY": "memory_tb_s", "hardware.launch_us": "launch_us"}
    assumed = {"PRODUCTS": rates.PRODUCTS, "ATTENTION": rates.ATTENTION, "MEMORY": rates.MEMORY, "LINKS": rates.LINKS}
    stands = "" if machine.known else f", which is that of {machine.hardware}"
    yield (
        f"bf16, medians of {REPEATS}. The share is that of the data sheet's rate (`conf/hardware/`{stands}); an "
        "estimate of a step assumes the last column (`rlexp/preflight/rehearsal/rates.py`, for kernels "
        "`rlexp/base/kernel_rates.csv`)."
    )
    yield ""
    yield "| what | rate | share | assumed |"
    yield "| --- | ---: | ---: | ---: |"
    for each in found:
        share_of = each.assumed or assumed.get(each.share)
        assumes = f"{share_of:.0%}" if share_of else f"{each.peak:g} {each.unit}"
        if known.get(each.share) in measured:
            assumes = f"{measured[known[each.share]]:g} {each.unit}, as measured before"
        share = f"{each.rate / each.peak:.0%}" if each.share in assumed else ""
        yield f"| {each.what} | {each.rate:,.4g} {each.unit} | {share} | {assumes} |"
    if machine.ring < 2:
        yield "\nOne GPU: no link was measured."
