"""Draw the picture of the bug report: the loss that others log beside the loss that rlexp logs.

    python -m bench.bug_report --write docs/why.png

Eight ranks, batch 8, and three layouts of the same training: ring 1 with micro-batch 1, ring 8 with micro-batch 1, ring
8 with micro-batch 8. Others log the loss of rank 0's last micro-batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

from bench.pictures import save
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import run_ranks
from rlexp.training.algos.base import Loss, Losses, Values

LAYOUTS = (
    ("ring 1, micro-batch 1", "ring1", 1),
    ("ring 8, micro-batch 1", "ring8", 1),
    ("ring 8, micro-batch 8: one micro-batch is the whole batch", "ring8", 8),
)
COLOURS, WIDTHS, STYLES = ("#0072b2", "#d55e00", "#009e73"), (4.4, 2.4, 1.2), ("-", "-", "--")
STEPS = 30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bug_report", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    options = parser.parse_args()
    logged, elsewhere = curves()
    draw(logged, elsewhere, options.write)
    gap = max(float(np.abs(curve / logged[0] - 1).max()) for curve in logged)
    swing = max(float(np.abs(curve / elsewhere[0] - 1).max()) for curve in elsewhere)
    print(f"{options.write}: the curves logged here differ by {gap:.1e}, those of the last micro-batch by {swing:.1e}")


def curves(first: int = STEPS) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Train on each layout, and return the logged curves and those of rank 0's last micro-batches: the first steps."""
    prepare_environment(ON_CPU)
    configs = [
        compose_config(
            ["+experiment=bug_report", "logger=none", f"train.max_steps={STEPS}", f"parallel={ring}",
             f"train.micro_batch_size={micro}"]
        )
        for _, ring, micro in LAYOUTS
    ]  # fmt: skip
    logged, elsewhere = run_ranks(draw_rank, 8, (configs, first), timeout=1800)[0]
    return logged, elsewhere


class Listening:
    """A loss that remembers the mean of its last micro-batch."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.wanted = loss, loss.wanted
        self.last = float("nan")

    def __call__(self, values: Values) -> Losses:
        result = self.loss(values)
        self.last = float(result.losses_E.detach().mean())
        return result


def draw_rank(spec: RankSpec, configs: list[Config], first: int = STEPS) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each configuration, the logged curve and the curve of rank 0's last micro-batches."""
    from rlexp.launch.joining import join
    from rlexp.training.train.build import build
    from rlexp.training.train.rows_task import RowsTask
    from rlexp.training.train.step import train_step
    from rlexp.training.train.surroundings import UNPROBED

    join(spec, configs[0].launch)
    logged, elsewhere = [], []
    for cfg in configs:
        task = build(cfg, around=UNPROBED)
        assert isinstance(task, RowsTask)
        loss = task.loss = Listening(task.loss)
        curve = []
        for step in range(1, first + 1):
            curve.append((train_step(task, step)["train/loss"], loss.last))
        logged.append(np.array([each[0] for each in curve]))
        elsewhere.append(np.array([each[1] for each in curve]))
    return logged, elsewhere


def draw(logged: list[np.ndarray], elsewhere: list[np.ndarray], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.1), sharey=True, layout="constrained")
    for axes, curves, title in (
        (left, elsewhere, "Logged elsewhere: rank 0, last micro-batch"),
        (right, logged, "Logged by rlexp: the train batch"),
    ):
        for (label, _, _), curve, colour, width, style in zip(LAYOUTS, curves, COLOURS, WIDTHS, STYLES, strict=True):
            axes.plot(range(1, STEPS + 1), curve, style, color=colour, linewidth=width, label=label)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    left.set_ylabel("DPO loss")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.suptitle("DPO of a small model on 8 ranks with batch 8, trained on three layouts", fontsize=12)
    save(figure, path, {"logged": [each.tolist() for each in logged],
                        "elsewhere": [each.tolist() for each in elsewhere]}, dpi=130)  # fmt: skip


if __name__ == "__main__":
    main()
