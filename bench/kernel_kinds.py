"""Where a step's time goes, by the kind of kernel, as torch's profiler sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

# By name, the first that fits: kernels of a GPU, and torch's operators, which are what a CPU runs.
KINDS = {
    "attention": r"flash|fmha|attention|cunn_sdp|sdpa",
    "optimizer": r"adam|multi_tensor_apply|foreach",
    "products": r"gemm|cutlass|cublas|nvjet|splitk|::(mm|bmm|addmm|addmm_|baddbmm|matmul|_grouped_mm)$",
    "copies": r"memcpy|memset|copy|::(cat|clone|to|contiguous|zero_|fill_)$",
    "reductions": r"reduce|softmax|logsumexp|norm|::(sum|mean|amax|max|argmax|all|any)$",
    "elementwise": r"elementwise|vectorized|triton|unrolled|scatter|gather|index|embedding|aten::|CatArray",
}
LAUNCHES = r"cudaLaunchKernel|cuLaunchKernel|cudaMemcpyAsync|cudaMemsetAsync"
OTHER, LAUNCHING = "other", "launches (the host's time)"


def by_kind(events: Iterable[Any], *, gpu: bool) -> dict[str, tuple[float, int]]:
    """Return the seconds and calls of each kind: of the device's kernels, with the host's launches, or of operators."""
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        on_device = "CUDA" in str(event.device_type)
        micro = event.self_device_time_total if gpu and on_device else event.self_cpu_time_total
        kind = kind_of(event.key)
        if gpu and not on_device:
            if not re.match(LAUNCHES, event.key):
                continue
            kind = LAUNCHING
        elif not gpu and not event.key.startswith(("aten::", "rlexp::")) and kind == OTHER:
            continue  # ranges of the profiler's own, and of autograd
        seconds, calls = found.get(kind, (0.0, 0))
        found[kind] = seconds + micro * 1e-6, calls + event.count
    return found


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, name, re.IGNORECASE)), OTHER)


def table(kinds: dict[str, tuple[float, int]], step: float) -> Iterator[str]:
    """Yield a table of the kinds, the longest first; `step` is how long a step takes without the profiler."""
    total = sum(seconds for kind, (seconds, _) in kinds.items() if kind != LAUNCHING)
    yield f"A step takes {step:.3g} s. In one that is profiled, kernels take {total:.3g} s:"
    yield ""
    yield "| kind | ms | share | calls |"
    yield "| --- | ---: | ---: | ---: |"
    for kind, (seconds, calls) in sorted(kinds.items(), key=lambda each: (each[0] == LAUNCHING, -each[1][0])):
        share = "" if kind == LAUNCHING else f"{seconds / total:.0%}" if total else "–"
        yield f"| {kind} | {seconds * 1e3:,.1f} | {share} | {calls:,} |"
