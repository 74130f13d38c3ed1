"""Reward against rollouts: `native` and vLLM, colocated and pipelined, with the same seeds.

Each run is a command as a user types it. Runs that are not timed share the GPU, or the cores. vLLM measures the GPU's
free memory while it starts, so two runs with vLLM never start at the same time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_training import Result
from bench.pictures import numbers_of, save
from bench.vllm_cases import NOT_RUN, PATIENCE, SMOLLM, TINY, Setup, failed_lines, failures, lines_of, share_same
from rlexp.run_files.metrics_jsonl import read_rows
from rlexp.run_files.rollouts_jsonl import lines

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
PART = 6  # of a curve's rollouts, the first, middle and last 1 / PART are averaged
QUANTILE = 4.303  # of Student's t with 2 degrees of freedom, 97.5 %: the spread is that of three seeds
PLAIN = ("logger=none", "logger.progress=false", "checkpoint.export=false", "engine=torch", "data.eval_size=0",
         "launch.preflight=off")  # fmt: skip
ON_GPU = (  # on a CPU, in float32, the reward of `native` goes from 0.02 to 0.99 in 22 rollouts
    *SMOLLM, "loss=grpo", "loss.beta=0", "data=arithmetic", "data.max_length=64", "reward.rule=arithmetic",
    "rollout.batch_size=8", "rollout.n_samples=16", "rollout.max_new_tokens=8", "rollout.micro_batch_size=128",
    "train.batch_size=128", "train.max_steps=30", "optim.lr=1e-5",
)  # fmt: skip
ON_CPU = ("+experiment=ppo_tiny", *TINY)
SHORT = ("train.max_steps=12",)
REWARD = "train/objective/scores"
FIRST = "| samples by | seed |"  # how the head of its table begins


@dataclass(frozen=True)
class Way:
    """A way to generate the samples."""

    name: str
    beside: str  # the way whose curve it must have; of `native`, its own
    vllm: bool = False
    cut: bool = False  # into other micro-batches, so that only rounding is another
    pipelined: bool = False
    colour: str = ""  # in the picture

    def words(self, setup: Setup) -> tuple[str, ...]:
        ranks = 2 if self.pipelined else 1
        words = [f"launch.device={setup.on.device}", f"launch.nproc={ranks}"]
        words += ["rollout=pipelined"] * self.pipelined
        words += ["rollout.micro_batch_size=24", "train.micro_batch_size=16"] * self.cut
        words += [f"launch.ranks_per_gpu={ranks}"] * (self.pipelined and setup.gpu)
        return (*words, *(setup.by_vllm if self.vllm else ()))


WAYS = (
    Way("native", "native", colour="#0072b2"),
    Way("native, cut", "native", cut=True),
    Way("vLLM", "native", vllm=True, colour="#d55e00"),
    Way("native, pipelined", "native, pipelined", pipelined=True, colour="#56b4e9"),
    Way("native, cut, pipelined", "native, pipelined", cut=True, pipelined=True),
    Way("vLLM, pipelined", "native, pipelined", vllm=True, pipelined=True, colour="#e69f00"),
)
Key = tuple[str, int]  # the way's name, and the seed


def label(way: Way, seed: int) -> str:
    return f"curve of {way.name}, seed {seed}"


def curves_section(setup: Setup, picture: Path | None = None) -> tuple[str, list[str]]:
    found = {(way.name, seed): each for way, seed, each in run_all(setup)}
    labelled = {label(way, seed): found[way.name, seed] for way in WAYS for seed in SEEDS}
    text, wrong = table(found)
    if picture is not None and any("rewards" in each for each in found.values()):
        draw(found, picture, gpu=setup.gpu)
    return "\n".join([_about(setup), "", *text, *failed_lines(labelled)]), [*failures(labelled), *wrong]


def _about(setup: Setup) -> str:
    ours = " ".join(ON_GPU if setup.gpu else (*ON_CPU, *(SHORT if setup.short else ())))
    return (
        f"`python -m rlexp {ours}`, with the seeds {', '.join(map(str, SEEDS))}, in "
        f"{'bf16' if setup.gpu else 'fp32'}. Mean reward of the first, the middle and the last sixth of the rollouts, "
        f"and of all. *Cut* has other micro-batches: only rounding is another there, as with vLLM. Pipelined runs have "
        f"π_behaviour in their loss, so rounding moves the weights, and at last the samples. Runs share "
        f"{'the GPU' if setup.gpu else 'the cores'}: their seconds are no comparison of speed."
    )


# ---- running them ----


def run_all(setup: Setup) -> list[tuple[Way, int, Result]]:
    """Run `native` first, then vLLM; what fails beside others is tried again alone."""
    results: dict[Key, Result] = {}
    for vllm in (False, True):
        chosen = [(way, seed) for way in WAYS if way.vllm == vllm for seed in SEEDS]
        starting = threading.Lock() if vllm else None
        with ThreadPoolExecutor(_at_once(setup, vllm=vllm)) as pool:
            asked = [pool.submit(_tried, setup, way, seed, starting) for way, seed in chosen]
            got = [each.result() for each in asked]
        results |= {(way.name, seed): each for (way, seed), each in zip(chosen, got, strict=True)}
    for way in WAYS:
        for seed in SEEDS:
            if setup.gpu and results[way.name, seed].get("failed", NOT_RUN) != NOT_RUN:
                results[way.name, seed] = _tried(setup, way, seed, None)
    return [(way, seed, results[way.name, seed]) for way in WAYS for seed in SEEDS]


def _at_once(setup: Setup, *, vllm: bool) -> int:
    cores = len(os.sched_getaffinity(0))
    return min(cores // 4, 2 if vllm else 6) or 1 if setup.gpu else cores


def _tried(setup: Setup, way: Way, seed: int, starting: threading.Lock | None) -> Result:
    return setup.tried(label(way, seed), lambda: run(setup, way, seed, starting))


def run(setup: Setup, way: Way, seed: int, starting: threading.Lock | None = None) -> Result:
    """Train as one of the curves says."""
    sizes = ON_GPU if setup.gpu else ON_CPU
    words = [*sizes, *PLAIN, *way.words(setup), f"seed={seed}", *(SHORT if setup.short else ())]
    return ran(setup, words, starting)


def ran(setup: Setup, words: Sequence[str], starting: threading.Lock | None = None) -> Result:
    """Run `python -m rlexp` with these words, and return what its files say."""
    with tempfile.TemporaryDirectory(prefix="rlexp-", dir=setup.folder) as place:
        began, run_dir = time.monotonic(), Path(place, "run")
        command([*words, f"hydra.run.dir={run_dir}"], run_dir, starting)
        return said(run_dir) | {"seconds": time.monotonic() - began}


def command(words: Sequence[str], run_dir: Path, starting: threading.Lock | None) -> None:
    """Run rlexp. The lock is held until its first row is there."""
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    around = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}  # of this process
    with tempfile.TemporaryFile("w+") as out:
        with starting or contextlib.nullcontext():
            begun = subprocess.Popen(
                [sys.executable, "-m", "rlexp", *words], cwd=ROOT, env=around | own, stdout=out, stderr=out
            )
            until = time.monotonic() + PATIENCE
            while starting is not None and begun.poll() is None and not _rows(run_dir) and time.monotonic() < until:
                time.sleep(0.2)
        try:
            failed = begun.wait(max(1.0, until - time.monotonic()))
        finally:
            begun.kill()  # its ranks end with it
        if failed:
            out.seek(0)
            text = out.read().strip()
            print(text[-3000:], file=sys.stderr, flush=True)
            raise RuntimeError(text.splitlines()[-1] if text else "it said nothing")


def _rows(run_dir: Path) -> list[Any]:
    file = run_dir / "metrics.jsonl"
    return read_rows(file) if file.exists() else []


def said(run_dir: Path) -> Result:
    """Return each rollout's mean reward, its seconds, and a checksum of each sample."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if REWARD in row]
    return {
        "rewards": [row[REWARD] for row in rows],
        "rollout": float(np.median([row["train/time/rollout"] for row in rows[1:] or rows])),
        "samples": [[each[-1] for each in line["digests"]] for line in lines(run_dir / "rollouts.jsonl")],
    }


# ---- what they say ----


def parts(rewards: Sequence[float]) -> list[float]:
    """Return the mean of the first, the middle and the last rollouts, and of all."""
    few = max(1, len(rewards) // PART)
    middle = (len(rewards) - few) // 2
    return [float(np.mean(rewards[at : at + few])) for at in (0, middle, len(rewards) - few)] + [
        float(np.mean(rewards))
    ]


def noise(natives: Sequence[float]) -> float:
    """Return how far the mean of as many other seeds may lie from that of these, by these seeds' own spread."""
    return QUANTILE * float(np.std(natives, ddof=1)) * float(np.sqrt(2 / len(natives)))


def table(found: dict[Key, Result]) -> tuple[list[str], list[str]]:
    rows, wrong, beside = [], [], []
    for way in WAYS:
        for seed in SEEDS:
            if "failed" not in (each := found[way.name, seed]):
                cells = [f"{part:.3f}" for part in parts(each["rewards"])]
                same = _same(each, found[way.beside, seed]) if way.name != way.beside else ["", ""]
                rows.append([way.name, str(seed), *cells, f"{each['rollout']:.2f}", *same])
        if way.name != way.beside and (compared := _compared(found, way)):
            beside.append(f"- {'; '.join(said for said, _ in compared)}.")
            wrong += [said for said, right in compared if not right]
    head = ("samples by", "seed", "first", "middle", "last", "all", "seconds of a rollout",
            "samples as `native`'s, rollout 1", "all rollouts")  # fmt: skip
    how = (
        f"\nThe check: the mean of three seeds may lie as far from that of `native` as two such means do by chance: "
        f"{QUANTILE:g} (Student's t, 95 %) × the standard deviation of the seeds under `native` × √(2/3).\n"
    )
    return [*lines_of(head, rows), how, *beside], wrong


def _same(one: Result, other: Result) -> list[str]:
    """Return the share of samples that are the same, in the first rollout and in all."""
    if "failed" in other:
        return ["–", "–"]
    return [share_same(a, b) for a, b in ((one["samples"][0], other["samples"][0]), (_all(one), _all(other)))]


def _all(result: Result) -> list[int]:
    return [each for rollout in result["samples"] for each in rollout]


def _compared(found: dict[Key, Result], way: Way) -> list[tuple[str, bool]] | None:
    """Say how far a way's curves lie from those of `native`, and whether that is chance; None if seeds are missing."""
    mine, natives = ([found[name, seed] for seed in SEEDS] for name in (way.name, way.beside))
    if any("failed" in each for each in (*mine, *natives)):
        return None
    compared = []
    for place, of in ((-2, "the last rollouts"), (-1, "all rollouts")):
        ours, theirs = ([parts(each["rewards"])[place] for each in several] for several in (mine, natives))
        apart, bound = abs(float(np.mean(ours) - np.mean(theirs))), noise(theirs)
        said = f"{way.name} is {apart:.4f} from {way.beside} in {of}, and may be {bound:.4f}"
        compared.append((said, apart <= bound))
    return compared


def draw(found: dict[Key, Result], path: Path, *, gpu: bool) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, pipelined in zip(panels, (False, True), strict=True):
        for way in (way for way in WAYS if way.colour and way.pipelined == pipelined):
            curves = [found[way.name, seed]["rewards"] for seed in SEEDS if "rewards" in found[way.name, seed]]
            for number, rewards in enumerate(curves):
                style = {"linestyle": "--", "linewidth": 1.8} if way.vllm else {"linewidth": 1.2, "alpha": 0.8}
                axes.plot(
                    range(1, len(rewards) + 1), rewards, color=way.colour, label=None if number else way.name, **style
                )
        axes.set(xlabel="rollout", title="pipelined" if pipelined else "colocated")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", title=f"{len(SEEDS)} seeds each")
    panels[0].set(ylabel="mean reward", ylim=(0, 1))
    where = "GPU" if gpu else "CPU"
    figure.suptitle(f"ppo_tiny, measured on a {where}: vLLM has the curves of native", fontsize=11)
    save(figure, path, numbers_of("\n".join(table(found)[0]), FIRST), dpi=110)
