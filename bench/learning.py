"""Draw learning curves of runs that draw their own samples, as a picture and a table.

The runs are `+experiment=ppo_tiny`, the same with optim.lr=0, and `+experiment=dog` with three algorithms and three
seeds.

    python -m bench.learning --write docs/learning.png --page docs/measured/rollouts_gpu.md --stories FOLDER

Without `--stories` only ppo_tiny runs. With `--keep FILE` the curves are stored there and read again the next time. The
exit code is 1 if ppo_tiny does not keep the bounds below, or learns without a learning rate.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import matplotlib
import numpy as np

from bench import tables
from bench.curves import draw_rank
from bench.pictures import numbers_of, save
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import ON_CPU, RankSpec, prepare_environment
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.run_files.metrics_jsonl import MetricRow

REWARD, ENTROPY, SAMPLES = "train/objective/scores", "train/policy/entropy_avg", "train/episode"
UNTRAINED, LEARNED, FLOOR = (
    0.1,
    0.7,
    2.0,
)  # bounds that ppo_tiny is held to: reward before, reward after (a run reaches 0.99), entropy in nats per token
FIRST = "| run | seed | samples |"  # how the head of its table begins
WINDOW = 128  # samples at the start and at the end that the table takes means over
ALGORITHMS, SEEDS = ("ppo", "grpo", "rloo"), (0, 1, 2)
COLOURS = {"ppo": "#0072b2", "grpo": "#d55e00", "rloo": "#009e73", "still": "#777777"}
NAMES = {"ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO"}


@dataclass(frozen=True)
class Learned:
    """A learning curve, with one value per rollout."""

    samples: list[float]  # drawn so far, this rollout included
    reward: list[float]
    entropy: list[float]  # of the rollout's first train batch
    last_entropy: float
    cpu_seconds: float  # of all ranks

    def ends(self) -> tuple[float, float]:
        """The mean reward of the first and of the last samples."""
        rollouts = max(1, round(WINDOW / self.samples[0]))
        return float(np.mean(self.reward[:rollouts])), float(np.mean(self.reward[-rollouts:]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    parser.add_argument("--page", type=Path, help="the page with the table")
    parser.add_argument("--stories", type=Path, help="the folder of a model that tells stories")
    parser.add_argument("--keep", type=Path, help="a JSON file to keep the curves in")
    options = parser.parse_args()
    prepare_environment(ON_CPU)
    kept: dict[str, Any] = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    curves = {name: Learned(**each) for name, each in kept.items()}
    wanted = overrides(options.stories)
    for name, args in wanted.items():
        if name not in curves:
            curves[name] = learn(compose_config([*args, "launch.device=cpu", "logger=none"]))
            if options.keep:
                options.keep.write_text(json.dumps({each: asdict(curve) for each, curve in curves.items()}))
        begun, ended = curves[name].ends()
        print(f"{name}: reward {begun:.3f} to {ended:.3f}, {curves[name].cpu_seconds:.0f} CPU seconds", flush=True)
    curves = {name: curves[name] for name in wanted}
    draw(curves, options.write)
    if options.page:
        tables.put(options.page, table(curves), "learning")
    sys.exit("\n".join(shortcomings(curves)) or None)


def overrides(stories: Path | None) -> dict[str, list[str]]:
    """The command line of each curve, by its name."""
    tiny = ["+experiment=ppo_tiny", "parallel=ring2"]
    lines = {"tiny": tiny, "tiny still": [*tiny, "optim.lr=0"]}
    if stories is not None:
        dog = ["+experiment=dog", f"model.path={stories.resolve()}"]
        lines |= {f"{name} {seed}": [*dog, f"loss={name}", f"seed={seed}"] for name in ALGORITHMS for seed in SEEDS}
    return lines


def learn(cfg: Config) -> Learned:
    said = run_ranks(timed_rank, cfg.parallel.world_size, (cfg,), preload=(*PRELOAD, "deepspeed"), timeout=1800)
    return learned(said[0][0], sum(seconds for _, seconds in said))


def timed_rank(spec: RankSpec, cfg: Config) -> tuple[list[MetricRow], float]:
    began = process_time()
    curves = draw_rank(spec, [cfg])
    return curves[0].rows if curves else [], process_time() - began


def learned(rows: Sequence[MetricRow], cpu_seconds: float = math.nan) -> Learned:
    firsts = [row for row in rows if REWARD in row]  # of each rollout
    samples, reward, entropy = ([row[name] for row in firsts] for name in (SAMPLES, REWARD, ENTROPY))
    return Learned(samples, reward, entropy, rows[-1][ENTROPY], cpu_seconds)


def shortcomings(curves: dict[str, Learned]) -> list[str]:
    begun, ended = curves["tiny"].ends()
    still = max(curves["tiny still"].reward)
    wrong = []
    if not (begun < UNTRAINED and ended > LEARNED):
        wrong.append(f"ppo_tiny: the reward went from {begun:.3f} to {ended:.3f}, not from {UNTRAINED} to {LEARNED}")
    if not curves["tiny"].last_entropy > FLOOR:
        wrong.append(f"ppo_tiny: the entropy ended at {curves['tiny'].last_entropy:.2f}, not above {FLOOR}")
    if not still < UNTRAINED:
        wrong.append(f"ppo_tiny with optim.lr=0: the reward came to {still:.3f}")
    return wrong


def table(curves: dict[str, Learned]) -> str:
    lines = [
        f"Reward: means over the first and the last {WINDOW} samples. Entropy: of the last train batch, nats a token.",
        tables.signature("bench.learning"),
        "",
        "| run | seed | samples | reward, first | reward, last | entropy, last | CPU seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, curve in curves.items():
        begun, ended = curve.ends()
        lines.append(
            f"| {titled(name)} | {seed_of(name)} | {curve.samples[-1]:,.0f} | {begun:.3f} | {ended:.3f} "
            f"| {curve.last_entropy:.2f} | {curve.cpu_seconds:.0f} |"
        )
    return "\n".join(lines)


def titled(name: str) -> str:
    match name.split():
        case ["tiny"]:
            return "`ppo_tiny`, ring 2"
        case ["tiny", "still"]:
            return "`ppo_tiny`, ring 2, `optim.lr=0`"
        case [algorithm, _]:
            return f"`dog`, {NAMES[algorithm]}"
    raise AssertionError(name)


def seed_of(name: str) -> str:
    last = name.split()[-1]
    return last if last.isdigit() else "0"


def draw(curves: dict[str, Learned], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = 2 if len(curves) > 2 else 1
    figure, grid = plt.subplots(
        2, columns, figsize=(5.2 * columns, 6.0), sharex="col", squeeze=False, layout="constrained",
        facecolor="white", gridspec_kw={"height_ratios": [1.25, 1]},
    )  # fmt: skip
    draw_tiny(grid[0, 0], grid[1, 0], curves)
    if columns == 2:
        draw_dog(grid[0, 1], grid[1, 1], curves)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    for reward, entropy in grid.T:
        reward.set_ylim(-0.03, 1.05)
        entropy.set_ylim(bottom=0)
        entropy.set_xlabel("samples")
    grid[0, 0].set_ylabel("mean reward of a rollout")
    grid[1, 0].set_ylabel("entropy, nats a token")
    figure.get_layout_engine().set(hspace=0.06, wspace=0.04)
    save(figure, path, numbers_of(table(curves), FIRST), dpi=130)


def draw_tiny(reward: Any, entropy: Any, curves: dict[str, Learned]) -> None:
    for name, label, colour in (("tiny", "PPO", COLOURS["ppo"]), ("tiny still", "optim.lr=0", COLOURS["still"])):
        curve = curves[name]
        reward.plot(curve.samples, curve.reward, color=colour, linewidth=2, label=label)
        entropy.plot(curve.samples, curve.entropy, color=colour, linewidth=2)
    for axes, bound in ((reward, UNTRAINED), (reward, LEARNED), (entropy, FLOOR)):
        axes.axhline(bound, color="black", linewidth=0.9, linestyle="--")
    right = {"x": curves["tiny"].samples[-1], "ha": "right", "fontsize": 9}
    reward.text(y=LEARNED - 0.02, s=f"must end above {LEARNED}", va="top", **right)
    reward.text(y=UNTRAINED + 0.02, s=f"must begin below {UNTRAINED}", va="bottom", **right)
    said = f"must stay above {FLOOR:.1f} (ten digits equally likely: ln 10 = {math.log(10):.2f})"
    entropy.text(y=FLOOR - 0.1, s=said, va="top", **right)
    reward.set_title("ppo_tiny: random weights learn to write digits", fontsize=11)
    reward.legend(frameon=False, fontsize=9, loc="center right")


def draw_dog(reward: Any, entropy: Any, curves: dict[str, Learned]) -> None:
    """Three seeds each: their mean, and each of them thinly."""
    for name in ALGORITHMS:
        seeds = [curves[f"{name} {seed}"] for seed in SEEDS]
        for axes, field in ((reward, "reward"), (entropy, "entropy")):
            values = np.array([getattr(curve, field) for curve in seeds])
            axes.plot(seeds[0].samples, values.T, color=COLOURS[name], linewidth=0.7, alpha=0.35)
            axes.plot(seeds[0].samples, values.mean(0), color=COLOURS[name], linewidth=2, label=NAMES[name])
    reward.set_title("dog: stories260K learns to write about dogs, seeds 0, 1, 2", fontsize=11)
    reward.legend(frameon=False, fontsize=9, loc="lower right")


if __name__ == "__main__":
    main()
