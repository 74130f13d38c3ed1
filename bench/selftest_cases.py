"""The cases of `make selftest`: some of each section of `make gpu`, on as many ranks as there are GPUs.

With several GPUs each rank has one, and NCCL carries what they exchange. With one, four ranks share it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import gpu_world
from bench.gpu_commands import PATIENCE, Failed, Shell
from bench.gpu_here import Machine
from bench.gpu_training import Started, has_deepspeed, in_turn, started
from rlexp.base.kernel_needs import NEEDS, able, installed, takes
from rlexp.config.hardware import gpu_generations
from rlexp.config.schema import LaunchConfig
from rlexp.launch.joining import RankSpec, launch_on

MOST = 8  # ranks
SECONDS = 100.0  # in which a rank that computes one kernel after the other gets further
FAILURES = 3  # failures one after the other that end a section
OPTIONS = ("LoRA", "checkpointing", "GRPO, colocated")  # of the section of this name
HEAD_SIZES = (64, 128)
LENGTHS = (300, 700, 24)  # tokens of the sequences in a pack
# How far the results of a kernel in bf16 may lie from those of float64: root mean square, of that of the values. Both
# kernels for CPUs come to 2e-3.
KERNEL_WITHIN = 1.5e-2


@dataclass(frozen=True)
class Finding:
    """What a case has shown."""

    section: str
    case: str
    errors: dict[str, float] = field(default_factory=dict)  # relative to float64
    allowed: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    why: str | None = None  # it does not agree; None: it does


def ranks_on(on: Machine) -> int:
    """Return how many ranks start: one on each GPU, or as many as share the only one."""
    return min(on.ring, MOST) if on.device == "cuda" and on.gpus > 1 else gpu_world.RANKS


def chosen(section: str, on: Machine) -> list[gpu_world.Case]:
    """Return the cases of a section of `make gpu` that a selftest has."""
    ranks = ranks_on(on)
    every = gpu_world.CASES[section](on, (ranks // 2, ranks))
    return [dataclasses.replace(case, ranks=ranks) for case in every if _matters(section, case, ranks)]


def _matters(section: str, case: gpu_world.Case, ranks: int) -> bool:
    if section == "engines":  # two replicas in fp32, and all ranks in one ring in the other precisions
        return (case.ring == ranks) == (case.precision != "fp32")
    if case.ring != ranks or case.twice:
        return False
    if section == "options":
        return case.name in OPTIONS and (case.name != "LoRA" or has_peft())
    return not case.name.endswith(", windows") or case.name == "zigzag, direct, windows"


def has_peft() -> bool:
    return find_spec("peft") is not None


def left_out(on: Machine) -> list[str]:
    """Say what a selftest cannot try here."""
    out = [] if has_deepspeed() else ["engines zero0 to zero3: DeepSpeed is not installed"]
    out += [] if has_peft() else ["LoRA: peft is not installed"]
    if on.device == "cuda":
        out += [f"kernel {name}: not installed" for name in NEEDS if not installed(name)]
        generations = gpu_generations()
        known = able(max(generations), None) if generations else NEEDS  # no nvidia-smi tells them
        out += [f"kernel {name}: not for this GPU" for name in NEEDS if installed(name) and name not in known]
    return out


# ---- running them ----


def world(section: str) -> Callable[[Machine, Path], list[Finding]]:
    """Train each case on one world of ranks."""

    def run(on: Machine, folder: Path) -> list[Finding]:
        found = gpu_world.run_all(on, chosen(section, on), folder, patience=FAILURES)
        return [finding(section, on, case, each) for case, each in found.items()]

    return run


def finding(section: str, on: Machine, case: gpu_world.Case, found: gpu_world.Found) -> Finding:
    loss, gradient = gpu_world.bounds(on)[case.precision]
    errors: dict[str, float] = {name: found[name] for name in ("loss", "gradient") if name in found}
    return Finding(
        section, case.label.replace("`", ""), errors, {"loss": loss, "gradient": gradient}, found.get("seconds"),
        gpu_world.wrong(on, case, found),
    )  # fmt: skip


@dataclass(frozen=True)
class KernelCase:
    """A kernel in one call over a pack, both passes, in bf16."""

    kernel: str
    head_size: int

    @property
    def label(self) -> str:
        return f"{self.kernel}, heads of {self.head_size}, bf16"


def kernel_cases(on: Machine) -> Iterator[KernelCase]:
    for kernel, size in itertools.product(gpu_world.kernels(on), HEAD_SIZES):
        if on.device == "cpu" or takes(kernel, size, max(gpu_generations())):
            yield KernelCase(kernel, size)


def kernels(on: Machine, folder: Path) -> list[Finding]:
    launch = launch_on(on.device, SECONDS)

    def start(todo: Sequence[KernelCase]) -> Started:
        return started(kernel_rank, 1, (todo, launch), launch, folder)

    found = in_turn(list(kernel_cases(on)), start, lambda case: case.label, FAILURES)
    return [_of_kernel(case, each) for case, each in found.items()]


def _of_kernel(case: KernelCase, found: dict[str, Any]) -> Finding:
    errors = {name: value for name, value in found.items() if name in PARTS}
    why = f"failed: {found['failed']}" if "failed" in found else None
    for part, error in errors.items():
        if not error <= KERNEL_WITHIN:
            why = f"{part} is {error:.1e} off, and may be {KERNEL_WITHIN:.0e}"
    return Finding("kernels", case.label, errors, dict.fromkeys(PARTS, KERNEL_WITHIN), found.get("seconds"), why)


PARTS = ("out", "dq", "dk", "dv")  # of a kernel's results


def kernel_rank(spec: RankSpec, cases: Sequence[KernelCase], launch: LaunchConfig, out: str) -> None:
    """Compare each kernel with the plain one in float64 on the CPU."""
    import torch

    from bench.gpu_attention import errors_of, kernel_call
    from bench.simulate import Sizes
    from rlexp.launch.joining import join, leave_world
    from rlexp.training.ring.kernels import Plain, get_kernel

    join(spec, launch)
    device = torch.device(launch.device.value)
    for case in cases:
        began = time.monotonic()
        sizes = Sizes(8, 2, case.head_size, torch.bfloat16, device)
        inputs = sizes.drawn(sum(LENGTHS))
        kernel = get_kernel(case.kernel, device.type, torch.bfloat16, case.head_size)
        exact = kernel_call(Plain(), [each.double().cpu() for each in inputs], LENGTHS, sizes)
        got = [each.cpu() for each in kernel_call(kernel, inputs, LENGTHS, sizes)]
        errors = dict(zip(PARTS, errors_of(got, exact), strict=True))
        Started.add(out, errors | {"seconds": round(time.monotonic() - began, 1)})
    leave_world()


def verified(on: Machine, folder: Path) -> list[Finding]:
    """Verify DPO on a ring of all ranks, in float64 and in the precision of the run."""
    ranks = ranks_on(on)
    words = ("logger=none", "loss=dpo", *gpu_world.shared(on, ranks), f"parallel.ring_size={ranks}")
    why = None
    began = time.monotonic()
    try:
        Shell(on, folder, 2 * PATIENCE).command("rlexp.verify", "--json", "verify.json", *words)
    except (Failed, subprocess.TimeoutExpired) as error:
        why = f"failed: {error}"
    file = folder / "verify.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if failure := said.get("failure"):
        why = f"{failure['quantity']}, at step {failure['step']} in {failure['precision']}"
    largest = said.get("float64", {}).get("largest", {})
    errors = {short: largest[name] for short, name in OF_VERIFY.items() if name in largest}
    label = f"rlexp.verify loss=dpo, ring {ranks} × 1"
    return [Finding("verify", label, errors, _verify_allows(), round(time.monotonic() - began, 1), why)]


OF_VERIFY = {"loss": "loss", "gradient": "gradient, whole"}  # names in its JSON


def _verify_allows() -> dict[str, float]:
    from rlexp.verify.checks import FLOAT64

    return {"loss": FLOAT64.loss, "gradient": FLOAT64.gradient}


SECTIONS: dict[str, Callable[[Machine, Path], list[Finding]]] = {
    "engines": world("engines"),
    "rings": world("rings"),
    "kernels": kernels,
    "options": world("options"),
    "verify": verified,
}
