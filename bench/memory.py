"""Count the bytes that real ranks hold, with and without a reference model, and put preflight's prediction beside them.

    python -m bench.memory                                     print the table; ten minutes on 2 cores
    python -m bench.memory --write docs/measured/adapters.md

Eight ranks on the CPU make 8 / ring replicas. They take two steps of the product on pairs of the greatest length, and
count their live tensors throughout, as `memory.count_tensors=always` does. The table shows the second step on the rank
that held most. On a CPU what stays on the host counts too, so a model on the host is held beside the copies of two of
its layers. The exit code is 1 if a prediction is further off than 2 %.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.checkpoint import join_world, on_ranks
from bench.given import LONGEST
from bench.gpu_foretell import Asked, foretell
from bench.measured import print_tables
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.training.metrics.live_tensors import TensorCount
from rlexp.training.metrics.memory import Phases
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step

RANKS, RINGS = 8, (1, 2, 4, 8)
CLOSE = 0.02
PHASES = ("data", "forward", "reference", "backward", "optimizer")  # of a step
COMMON = ("launch.device=cpu", f"launch.nproc={RANKS}", "logger=none", "train.precision=bf16", "train.max_steps=2",
          "data.max_length=256", "memory.count_tensors=always", "model.layers=4", "model.hidden_size=256",
          "model.intermediate_size=768")  # fmt: skip
KINDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("all weights", "a model"): ("reference=model",),
    ("all weights", "a model on the host"): ("reference=model", "reference.offload=true"),
    ("all weights", "precomputed"): ("reference=precompute",),
    ("LoRA", "a model"): ("adapter=lora", "reference=model"),
    ("LoRA", "the adapter off"): ("adapter=lora", "reference=adapter"),
}
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    trained: str
    reference: str
    ring: int
    measured: int  # bytes
    predicted: int

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    prepare_environment(ON_CPU)
    wrong: list[str] = []
    print_tables("bench.memory", __doc__, {"bytes": lambda: table(wrong)}, precision="bfloat16")
    sys.exit("\n".join(wrong) or None)


def table(wrong: list[str]) -> str:
    lines = [
        "| trained | reference | ring | MiB held | predicted | off by |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows():
        lines.append(
            f"| {row.trained} | {row.reference} | {row.ring} | {row.measured / MIB:.2f} | {row.predicted / MIB:.2f} | "
            f"{row.off:+.2%} |"
        )
        if abs(row.off) > CLOSE:
            wrong.append(f"{row.trained}, {row.reference}, ring {row.ring}: the prediction is off by {row.off:+.1%}")
    return "\n".join(lines)


def rows() -> Iterator[Row]:
    """Measure all configurations, one after the other, and then predict them side by side."""
    found = []
    with tempfile.TemporaryDirectory(prefix="rlexp-memory-") as folder:
        os.environ["RLEXP_CACHE"] = folder  # where a precomputed reference is kept
        for (trained, reference), words in KINDS.items():
            for ring in RINGS:
                batch = f"train.batch_size={2 * RANKS // ring}"  # two micro-batches of a pair
                cfg = compose_config([*COMMON, *words, f"parallel.ring_size={ring}", batch, "train.micro_batch_size=1"])
                step = on_ranks(measured, RANKS, cfg)
                held, rank = int(step["memory/tensors_peak_bytes"]), int(step["memory/tensors_peak_rank"])
                found.append((trained, reference, ring, held, Asked(cfg, gpu=False, rank=rank)))
    for (trained, reference, ring, held, _), told in zip(found, foretell([each[-1] for each in found]), strict=True):
        if told.failed is not None:
            raise SystemExit(f"{trained}, {reference}, ring {ring}: {told.failed}")
        yield Row(trained, reference, ring, held, max(told.peaks[phase] for phase in PHASES if phase in told.peaks))


def measured(spec: RankSpec, cfg: Config) -> dict[str, float]:
    """Return the second step's metrics, which are the same on every rank."""
    join_world(spec, cfg)

    cpu = torch.device("cpu")
    phases = Phases(cpu, count=TensorCount(cpu, always=True))
    with phases.throughout():
        task = build(cfg, phases, around=LONGEST)
        return [train_step(task, step) for step in (1, 2)][1]


if __name__ == "__main__":
    main()
