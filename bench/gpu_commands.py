"""What only whole commands show, on four ranks of a GPU machine: stops and starts, ranks that sample, and `verify`.

Each command is typed as a user types it, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_here import Machine
from bench.gpu_training import has_deepspeed
from bench.gpu_world import COMMON, RANKS, SAMPLED, bounds, shared
from rlexp.run_files.metrics_jsonl import read_rows

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 300.0  # seconds of a command
ON_HOST = ("launch.device=cpu", "logger.progress=false")
LOSSES = ("dpo", "kto", "reward", "sft", "ppo", "grpo")


@dataclass(frozen=True)
class Shell:
    """Commands on a machine, whose runs lie in a folder."""

    on: Machine
    folder: Path
    patience: float = PATIENCE

    def train(self, run: str, *words: str) -> list[dict[str, Any]]:
        """Train, and return the rows of the run's curve."""
        self.command("rlexp", *COMMON, "logger.progress=false", *words, f"hydra.run.dir={self.folder / run}")
        return read_rows(self.folder / run / "metrics.jsonl")

    def command(self, module: str, *words: str) -> str:
        own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        around = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # of this process
        done = subprocess.run(
            [sys.executable, "-m", module, *words], cwd=self.folder, env=around | own,
            capture_output=True, text=True, timeout=self.patience, check=False,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr, flush=True)
            said = next(iter(reversed((done.stdout + done.stderr).strip().splitlines())), "it said nothing")
            raise Failed(f"{module} {' '.join(words)}: exit status {done.returncode} ({said[:200]})")
        return done.stdout


class Failed(Exception):
    """A command that did not do what it must."""


def here(on: Machine, ring: int) -> list[str]:
    return [*shared(on), f"parallel.ring_size={ring}"]


def agree(what: str, one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], within: float) -> str:
    """Return how far two curves lie apart; fail if it is too far, or if they have other steps."""
    if [row["step"] for row in one] != [row["step"] for row in other]:
        raise Failed(f"{what}: the curves have other steps")
    losses = [(a["train/loss"], b["train/loss"]) for a, b in zip(one, other, strict=True)]
    gap = max(abs(a - b) / max(abs(b), 1e-3) for a, b in losses)
    if not gap <= within:
        raise Failed(f"{what}: the losses are {gap:.1e} apart, and may be {within:.0e}")
    return f"{what}: the losses are at most {gap:.0e} apart"


def resumed(shell: Shell) -> str:
    """Two steps on a ring of 4, two on a ring of 2 on the CPU with another engine, two on a ring of 4 again."""
    exact = ("train.precision=fp64", "train.max_steps=6", "checkpoint.export=false")
    on_device, on_host = (*here(shell.on, RANKS), "engine=fsdp2"), (*ON_HOST, "launch.nproc=2", "engine=torch",
                                                                    "parallel.ring_size=2")  # fmt: skip
    whole = shell.train("whole", *exact, *ON_HOST, "launch.nproc=1", "engine=torch")
    shell.train("parts", *exact, *on_device, "train.stop_after=2")
    shell.train("parts", *exact, *on_host, "train.stop_after=2")
    parts = shell.train("parts", *exact, *on_device)
    what = "A run that went from a ring of 4 to a ring of 2 on the CPU and back, beside one that never stopped"
    return agree(what, parts, whole, bounds(shell.on)["fp64"][0])


def pipelined(shell: Shell) -> str:
    """A ring of two trains while two ranks sample, beside one rank and one that samples on the CPU."""
    words = ("train.precision=fp64", "engine=torch", "loss=grpo", "rollout=pipelined", *SAMPLED, "train.max_steps=4",
             "checkpoint.export=false")  # fmt: skip
    alone = shell.train("alone", *words, *ON_HOST, "launch.nproc=2", "rollout.sampling_ranks=1")
    mine = shell.train("pipelined", *words, *here(shell.on, 2), "rollout.sampling_ranks=2")
    return agree("GRPO, pipelined: a ring of 2 and two ranks that sample", mine, alone, bounds(shell.on)["fp64"][0])


def same_bits(shell: Shell) -> str:
    """In processes of their own, from the command to the model that is exported."""
    words = (*here(shell.on, RANKS), "train.precision=bf16", "launch.deterministic=true",
             f"engine={'zero2' if has_deepspeed() else 'torch'}", "checkpoint.export=true")  # fmt: skip
    one, other = (shell.train(name, *words) for name in ("one", "other"))
    said = agree("The same command twice, with launch.deterministic=true", one, other, 0.0)
    models = [(shell.folder / name / "model" / "model.safetensors").read_bytes() for name in ("one", "other")]
    if models[0] != models[1]:
        raise Failed("the same command twice: the exported models differ")
    return f"{said}, and the exported models are equal"


def verified(loss: str) -> Callable[[Shell], str]:
    def verify(shell: Shell) -> str:
        sampled = SAMPLED if loss in ("ppo", "grpo") else ()
        words = ("logger=none", f"loss={loss}", *sampled, *here(shell.on, RANKS))
        _, _, verdict = shell.command("rlexp.verify", *words).partition("\nPASS: ")
        if not verdict:
            raise Failed(f"rlexp.verify loss={loss}: ended without a verdict")
        return f"`loss={loss}`: {' '.join(verdict.split())}"

    return verify


COMMANDS = {
    "commands": (resumed, pipelined, same_bits),
    "verify": tuple(verified(loss) for loss in LOSSES),
}


def command_section(name: str, on: Machine) -> tuple[str, list[str]]:
    """Run the commands of this section, as many at a time as there are cores for their ranks."""
    at_once = max(1, len(os.sched_getaffinity(0)) // RANKS)
    with tempfile.TemporaryDirectory(prefix="rlexp-") as folder, ThreadPoolExecutor(at_once) as pool:
        asked = [
            pool.submit(_tried, each, Shell(on, _below(folder, number))) for number, each in enumerate(COMMANDS[name])
        ]
        told = [each.result() for each in asked]
    return "\n".join(f"- {said}" for said, _ in told), [said for said, right in told if not right]


def _below(folder: str, number: int) -> Path:
    place = Path(folder, str(number))
    place.mkdir()
    return place


def _tried(command: Callable[[Shell], str], shell: Shell) -> tuple[str, bool]:
    try:
        return command(shell), True
    except (Failed, subprocess.TimeoutExpired) as error:
        return f"failed: {error}", False
