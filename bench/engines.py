"""Compare the engines with the plain one in float64: gradients, and twenty steps.

python -m bench.engines                         print it
python -m bench.engines --write docs/measured/invariance.md

Gradients are taken with SGD and without clipping, since Adam and clipping both hide a wrong scale. They are those of a
train batch in 1, 2 and 5 micro-batches, and of the epoch's short last batch, whose micro-batches are uneven.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.curves import Curve, differences, draw
from bench.tables import put, signature
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks

Gradients = list[dict[str, npt.NDArray[np.float64]]]  # of each step, by parameter

KINDS = (
    ("torch", "none"),
    ("fsdp2", "none"),
    ("zero0", "none"),
    ("zero1", "none"),
    ("zero1", "optimizer"),
    ("zero2", "none"),
    ("zero2", "optimizer"),
    ("zero3", "none"),
    ("zero3", "optimizer"),
    ("zero3", "all"),
)
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))  # ring size, replicas
ACCUMULATIONS = (1, 2, 5)
BATCH, TAIL, STEPS = 20, 7, 20
COMMON = ("launch.device=cpu", "logger=none", f"train.batch_size={BATCH}", f"data.size={BATCH + TAIL}",
          "data.drop_last=false", "data.eval_size=0", "data.max_length=512")  # fmt: skip
PLAIN = ("optim=sgd", "optim.lr=0.05", "optim.max_grad_norm=0", "train.max_steps=2")
ADAM = ("optim.lr=5e-4", f"train.max_steps={STEPS}")
# float32 against float64: the largest ‖a − b‖ / ‖a‖ of any parameter's gradient. Measured: docs/measured/invariance.md.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    engine: str
    offload: str
    ring_size: int
    replicas: int
    accumulation: int
    precision: str = "fp32"

    @property
    def label(self) -> str:
        return self.engine + (f", offload {self.offload}" if self.offload != "none" else "")

    def overrides(self) -> list[str]:
        return [f"engine={self.engine}", f"engine.offload={self.offload}", f"parallel=ring{self.ring_size}",
                f"launch.nproc={self.ring_size * self.replicas}", f"train.precision={self.precision}",
                f"train.micro_batch_size={BATCH // (self.accumulation * self.replicas)}"]  # fmt: skip


EXACT = Case("torch", "none", 1, 1, 1, "fp64")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    options = parser.parse_args()
    began = time.monotonic()
    gradients, broken = gradient_table()
    text = f"{signature('bench.engines')}\n\n{gradients}\n\n{curve_table()}\n\n{bf16_table()}"
    print(text)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write:
        put(options.write, text, "engines")
    for line in broken:
        print(f"BROKEN: {line}", file=sys.stderr)
    return 1 if broken else 0


def gradient_table() -> tuple[str, list[str]]:
    cases = [Case(*kind, *layout, acc) for kind in KINDS for layout in LAYOUTS for acc in ACCUMULATIONS]
    apart = gradient_differences(cases)
    lines = [
        "### Gradients in float32, SGD, no clipping\n\nThe largest ‖a − b‖ / ‖a‖ of any parameter's gradient, for 1, "
        f"2 and 5 micro-batches of a batch of {BATCH} and of the short batch of {TAIL} after it.\n",
        f"| engine | {' | '.join(f'ring {ring} × {replicas}' for ring, replicas in LAYOUTS)} |",
        f"| --- |{' ---: |' * len(LAYOUTS)}",
    ]
    for kind in KINDS:
        worst = dict.fromkeys(LAYOUTS, 0.0)
        for case in cases:
            if (case.engine, case.offload) == kind:
                layout = (case.ring_size, case.replicas)
                worst[layout] = max(worst[layout], apart[case])
        lines.append(f"| {Case(*kind, 1, 1, 1).label} | {' | '.join(f'{value:.1e}' for value in worst.values())} |")
    broken = [f"{case}: gradients differ by {gap:.1e}" for case, gap in apart.items() if not gap <= TOLERANCE]
    return "\n".join(lines), broken


def gradient_differences(cases: Sequence[Case]) -> dict[Case, float]:
    exact = _gradients([EXACT])[EXACT]
    gradients = _gradients(cases)
    return {case: max(_gap(a, b) for a, b in zip(exact, gradients[case], strict=True)) for case in cases}


def _gap(one: dict[str, npt.NDArray[np.float64]], other: dict[str, npt.NDArray[np.float64]]) -> float:
    return max(float(np.linalg.norm(one[name] - other[name]) / np.linalg.norm(one[name])) for name in one)


def _gradients(cases: Sequence[Case]) -> dict[Case, Gradients]:
    prepare_environment(ON_CPU)
    gradients: dict[Case, Gradients] = {}
    for world_size in sorted({case.ring_size * case.replicas for case in cases}):
        some = [case for case in cases if case.ring_size * case.replicas == world_size]
        configs = [compose_config([*COMMON, *PLAIN, *case.overrides()]) for case in some]
        drawn = run_ranks(gradients_rank, world_size, (configs,), preload=(*PRELOAD, "deepspeed"), timeout=1800.0)[0]
        gradients |= dict(zip(some, drawn, strict=True))
    return gradients


def gradients_rank(spec: RankSpec, configs: Sequence[Config]) -> list[Gradients] | None:
    from rlexp.launch.joining import join, launch_on
    from rlexp.training.train.build import build
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    join(spec, launch_on("cpu", 300.0))
    gradients: list[Gradients] = []
    for config in configs:
        task = build(config, around=UNPROBED)
        spy = SpyEngine(task.run.engine)
        task.run = dataclasses.replace(task.run, engine=spy)
        for step in (1, 2):
            train_step(task, step)
        gradients.append([{name: grad.numpy() for name, grad in kept.items()} for kept in spy.kept])
    return gradients if spec.rank == 0 else None


class SpyEngine:
    """An engine that keeps the whole gradient of each step before it takes the step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.kept: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, lr: float) -> None:
        self.kept.append({name: grad.double().cpu() for name, grad in self._engine.gradients().items()})
        self._engine.step(lr)


def curve_table() -> str:
    """Twenty AdamW steps, with and without clipping."""
    layouts = ((1, 2), (2, 2), (4, 1))
    lines = [
        f"### {STEPS} AdamW steps in float32\n\nThe largest relative difference of the loss, over all steps, to "
        "`torch` in float64 in one process; clipped at 0.5 (every step is clipped) and not clipped.\n",
        f"| engine | {' | '.join(f'ring {r} × {n}, {c}' for r, n in layouts for c in ('clipped', 'not'))} |",
        f"| --- |{' ---: |' * (2 * len(layouts))}",
    ]
    columns = [(layout, clip) for layout in layouts for clip in ("0.5", "0")]
    configs = [_adam(Case(*kind, *layout, 2), clip) for kind in KINDS for layout, clip in columns]
    exact = dict(zip(("0.5", "0"), draw([_adam(EXACT, clip) for clip in ("0.5", "0")]), strict=True))
    curves = iter(draw(configs))
    for kind in KINDS:
        cells = [f"{_loss_gap(exact[clip], next(curves)):.1e}" for _, clip in columns]
        lines.append(f"| {Case(*kind, 1, 1, 1).label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bf16_table() -> str:
    """Each engine in bfloat16 on a ring of 2 × 2, beside the difference of bfloat16 to float64."""
    kinds = [kind for kind in KINDS if kind[1] != "optimizer"]
    configs = [_adam(dataclasses.replace(EXACT, precision="bf16", accumulation=acc), "1") for acc in (1, 2, 5)]
    configs += [_adam(Case(*kind, 2, 2, 2, "bf16"), "1") for kind in kinds]
    exact = draw([_adam(EXACT, "1")])[0]
    one, two, five, *others = draw(configs)
    floor = max(_loss_gap(one, two), _loss_gap(one, five))
    lines = [
        f"### {STEPS} AdamW steps in bfloat16\n\nRing 2 × 2 against one process in bfloat16. The noise floor (one "
        f"process with another micro-batch size) is {floor:.1e}; bfloat16 differs from float64 by "
        f"{_loss_gap(exact, one):.1e}.\n",
        "| engine | loss |",
        "| --- | ---: |",
    ]
    for kind, curve in zip(kinds, others, strict=True):
        lines.append(f"| {Case(*kind, 1, 1, 1).label} | {_loss_gap(one, curve):.1e} |")
    return "\n".join(lines)


def _adam(case: Case, clip: str) -> Config:
    return compose_config([*COMMON, *ADAM, f"optim.max_grad_norm={clip}", *case.overrides()])


def _loss_gap(one: Curve, other: Curve) -> float:
    return differences(one, other)["train/loss"]


if __name__ == "__main__":
    sys.exit(main())
