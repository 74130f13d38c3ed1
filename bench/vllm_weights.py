"""Seconds of handing the policy's weights over to vLLM, and what vLLM's sleep gives back.

The hand-over is compared with one plain copy of the same number of weights on the same device: of float32 to vLLM's
dtype, and of vLLM's dtype to itself. No hand-over can be shorter.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from typing import Any

from bench.gpu_here import GIB
from bench.gpu_training import Result, Started, has_deepspeed
from bench.vllm_cases import (
    Setup,
    Size,
    checksums,
    drawer_of,
    failed_lines,
    failures,
    joined_task,
    lines_of,
    share_same,
    sizes,
    timed,
)
from rlexp.config.schema import Config

GOAL = 3.0  # times a plain copy of the float32 weights
LATER = 5  # hand-overs after the first
POLICIES = {
    "`torch`": ("engine=torch",),
    "`zero1`": ("engine=zero1",),
    "`torch`, LoRA": ("engine=torch", "adapter=lora"),
}
STEPS = 3


def there(name: str) -> bool:
    return "zero" not in name or has_deepspeed()


# ---- the hand-over ----


def handover_section(setup: Setup, rank: Callable[..., None] | None = None) -> tuple[str, list[str]]:
    """One vLLM for each model gets the weights of several policies, one after the other."""
    size = sizes(setup)[-1]
    found: dict[str, Result] = {}
    for name, words in POLICIES.items():
        if there(name):
            asked = [*_words(setup, size), *words]
            found[name] = setup.tried(f"hand-over of {name}", setup.on_rank, rank or handover_rank, asked)
    text, wrong = handover_table(setup, size, found)
    return "\n".join([*text, *failed_lines(found)]), [*failures(found), *wrong]


def _words(setup: Setup, size: Size) -> list[str]:
    return [*size.words_on(setup), *setup.by_vllm]


def handover_rank(spec: Any, cfg: Config, file: str) -> None:
    from rlexp.launch.joining import leave_world

    task = joined_task(spec, cfg)
    Started.add(file, handed_over(task))
    leave_world()


def handed_over(task: Any) -> Result:
    """Return the seconds of hand-overs, of yielding the weights alone, and of plain copies."""
    import torch

    drawer, run = drawer_of(task), task.run
    weights = run.engine.merged

    def yielded() -> None:
        for _ in weights():
            pass

    first = timed(run.device, drawer.renew, weights)
    later = [timed(run.device, drawer.renew, weights) for _ in range(LATER)]
    alone = [timed(run.device, yielded) for _ in range(LATER)]
    number = sum(weight.numel() for _, weight in weights())
    to = run.dtype if run.dtype is torch.bfloat16 else torch.float32
    found = {"weights": float(number), "first": first, "later": min(later),
             "yielding": min(alone)}  # fmt: skip
    for name, dtype in (("masters", torch.float32), ("same", to)):
        source = torch.ones(number, dtype=dtype, device=run.device)
        target = torch.empty(number, dtype=to, device=run.device)
        copies = [timed(run.device, target.copy_, source) for _ in range(LATER + 1)]
        found[name] = min(copies[1:])
        del source, target
    return found


def handover_table(setup: Setup, size: Size, found: dict[str, Result]) -> tuple[list[str], list[str]]:
    rows, wrong = [], []
    dtype = "bf16" if setup.gpu else "fp32"
    for name, each in found.items():
        if "failed" in each:
            continue
        ratio = each["later"] / each["masters"]
        rows.append([
            name, f"{each['weights'] / 1e9:.3f}", *(f"{each[part]:.3g}" for part in ("first", "later", "yielding")),
            f"{each['masters']:.3g}", f"{each['same']:.3g}", f"{ratio:.1f}",
        ])  # fmt: skip
        if setup.gpu and ratio > GOAL:
            wrong.append(f"{name}: a later hand-over takes {ratio:.1f} times a plain copy, and may take {GOAL:g}")
    head = ("engine", "billion weights", "first, s", "later, s", "of it yielding them, s", f"copy fp32 → {dtype}, s",
            f"copy {dtype} → {dtype}, s", "later / copy of fp32")  # fmt: skip
    said = [
        f"The weights of {size.name}: the first time, and the shortest of {LATER} later times. *Yielding* is what the "
        f"engine takes to give its weights one by one, without vLLM. The goal is at most {GOAL:g} times the plain "
        f"copy of the float32 weights.",
        "",
        *lines_of(head, rows),
    ]
    missing = [name for name in POLICIES if not there(name)]
    return [*said, *(f"\nDeepSpeed is not installed: {name} was left out." for name in missing)], wrong


# ---- sleep ----


def sleep_section(setup: Setup, rank: Callable[..., None] | None = None) -> tuple[str, list[str]]:
    if not setup.gpu and rank is None:
        return "vLLM has no sleep on a CPU: not measured.", []
    size = sizes(setup)[-1]
    found = {}
    for name, asleep in (("awake", "false"), ("asleep", "true")):
        asked = [*_words(setup, size), f"rollout.vllm_sleep={asleep}", f"train.max_steps={STEPS + 1}"]
        found[name] = setup.tried(f"sleep: {name}", setup.on_rank, rank or sleep_rank, asked)
    return "\n".join([*sleep_table(setup, size, found), *failed_lines(found)]), failures(found)


def sleep_rank(spec: Any, cfg: Config, file: str) -> None:
    from rlexp.launch.joining import leave_world

    task = joined_task(spec, cfg)
    Started.add(file, slept(task))
    leave_world()


def slept(task: Any) -> Result:
    """Train a few steps; return the device's memory in use while training, and the seconds of each sleep and wake."""
    from rlexp.training.train.step import train_step

    llm = drawer_of(task)._llm
    seconds: dict[str, list[float]] = {"sleep": [], "wake_up": []}
    for name, taken in seconds.items():
        setattr(llm, name, _timing(task.run.device, getattr(llm, name), taken))
    used = []
    for step in range(1, STEPS + 1):
        train_step(task, step)
        gc.collect()
        used.append(in_use(task.run.device))
    wakes = [sum(pair) for pair in zip(seconds["wake_up"][::2], seconds["wake_up"][1::2], strict=True)]
    found: Result = {"used": max(used[1:]), "samples": checksums(task.rollouts.own_samples)}
    found |= {name: statistics.median(each) for name, each in (("sleep", seconds["sleep"]), ("wake", wakes)) if each}
    return found


def _timing(device: Any, inner: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> None:
        taken.append(timed(device, functools.partial(inner, *args, **options)))

    return call


def in_use(device: Any) -> float:
    """Return the bytes of the device that are in use, by whoever; on a CPU those of this process."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free, whole = torch.cuda.mem_get_info(device)
        return float(whole - free)
    from rlexp.training.metrics.memory import peak_bytes

    return float(peak_bytes(device))


def sleep_table(setup: Setup, size: Size, found: dict[str, Result]) -> list[str]:
    rows = [
        [
            name, f"{each['used'] / GIB:.1f}",
            *(f"{each[part]:.2f}" if part in each else "–" for part in ("sleep", "wake")),
            share_same(each["samples"], found["awake"].get("samples")),
        ]
        for name, each in found.items()
        if "failed" not in each
    ]  # fmt: skip
    head = ("vLLM while the ranks train", "GPU memory in use, GiB", "sleep, s", "wake, s",
            f"samples of rollout {STEPS} as awake")  # fmt: skip
    return [
        f"{size.name}, `rollout.vllm_memory={setup.share}`, {STEPS} steps of GRPO: the memory in use after a step, "
        f"without the first; and the medians of falling asleep and of waking up, without the hand-over of the weights.",
        "",
        *lines_of(head, rows),
    ]
