"""Compare the working tree's runs with those of another commit: is every number still the same, to the last bit?

    python -m bench.unmoved                         rows and host beside HEAD, folders beside the oldest; 4 minutes
    python -m bench.unmoved COMMIT --only folders   beside this commit, and this part alone

rows      Train some steps of each configuration with both commits' code. Rows must be equal, except for seconds, speeds
          and memory, and so must the final weights.
folders   Begin runs with the commit's code, stop them, and continue a copy with each code. The next rows must be equal.
host      Compare the processor time of a small model's step in pairs, and count what a rehearsed step launches.

The exit code is 1 if anything differs. `--case NAME` runs only some configurations of rows and folders.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from bench import pairs
from bench.curves import relative
from bench.resume import weights_of
from bench.unmoved_side import CONSOLE
from rlexp.run_files.metrics_jsonl import METRICS, MetricRow, read_rows

ROOT = Path(__file__).resolve().parents[1]
OLDEST = "c0125d6"  # runs begun there must continue
HH = ROOT / "conf" / "experiment" / "hh_helpful.jsonl.gz"
MEASURED = ("memory/", "train/time/", "train/tflops", "train/mfu")  # differ from run to run, as all seconds do
SHOWN = 6  # differences of one configuration

Cases = Mapping[str, Sequence[str]]
BASE = (
    *("launch.device=cpu", "logger=none", "logger.progress=false", "checkpoint.export=false", "train.max_steps=4"),
    *("model.hidden_size=32", "model.intermediate_size=64", "checkpoint.save_every=null", "train.batch_size=8"),
)
PAIRS = ("data=jsonl", f"data.path={HH}", "data.too_long=truncate")
ROWS = (*PAIRS, "data.max_samples=64", "data.eval_size=5", "train.eval_every=2", "data.max_length=192")
MADE = ("data.size=32", "data.eval_size=5", "train.eval_every=2")
DRAWN = ("data=arithmetic", "data.size=16", "data.eval_size=0", "data.max_length=32", "reward.rule=regex",
         'reward.pattern="[0-9]"', "rollout.batch_size=4", "rollout.n_samples=4", "rollout.epochs=2",
         "rollout.max_new_tokens=8", "optim.lr=1e-2")  # fmt: skip
LORA = ("adapter=lora", "adapter.rank=4", "optim.lr=1e-2")
EXACT = ("train.precision=fp64", "engine=torch")


def on(ring: int, replicas: int, micro: int | str = "auto") -> tuple[str, ...]:
    return f"parallel=ring{ring}", f"launch.nproc={ring * replicas}", f"train.micro_batch_size={micro}"


CASES: Cases = {
    "dpo": (*EXACT, *ROWS, *on(1, 1), "loss=dpo", "eval.buckets=[128]"),
    "dpo, LoRA, ring of 4, not shared": (*EXACT, *ROWS, *LORA, *on(4, 1), "loss=dpo", "data.share_prefix=false"),
    "dpo, 2 x 2, one at a time": (*EXACT, *MADE, *on(2, 2, 1), "loss=dpo", "loss.ld_alpha=0.5"),
    "mpo, stored reference": (*EXACT, *ROWS, *on(2, 1), "loss=mpo", "reference=precompute", "data.packing=false"),
    "kto, unpaired pairs": (*EXACT, *ROWS, *on(2, 1, 2), "loss=kto", "data.unpair=true"),
    "sft, ring of 4": (*EXACT, *ROWS, *on(4, 1), "loss=sft"),
    "reward model, accumulated": (*EXACT, *ROWS, *on(2, 1, 2), "loss=reward", "loss.center=0.01"),
    "bco_pair, accumulated": (*EXACT, *MADE, *on(1, 2, 2), "loss=bco_pair", "loss.sft_weight=0.1"),
    "aot, hybrid": (*EXACT, *ROWS, *on(4, 1, 2), "loss=aot", "parallel.layout=hybrid", "parallel.ulysses_size=2"),
    "ppo": (*EXACT, *DRAWN, *on(1, 2, 2), "loss=ppo"),
    "grpo, ring of 2, LoRA": (*EXACT, *DRAWN, *LORA, *on(2, 1), "loss=grpo", "loss.entropy=0.01"),
    "dpo, fsdp2": ("train.precision=fp64", "engine=fsdp2", *MADE, *on(1, 2), "loss=dpo"),
    "dpo, ZeRO-1": ("train.precision=fp32", "engine=zero1", *MADE, *on(1, 2, 2), "loss=dpo"),
    "dpo, ZeRO-3": ("train.precision=fp32", "engine=zero3", *MADE, *on(2, 1), "loss=dpo"),
    "dpo, LoRA over ZeRO-3": ("train.precision=fp32", "engine=zero3", *MADE, *LORA, *on(2, 1), "loss=dpo"),
}
BEGUN = ("dpo, LoRA, ring of 4, not shared", "dpo, ZeRO-1", "dpo, ZeRO-3", "dpo, fsdp2", "mpo, stored reference",
         "bco_pair, accumulated", "ppo")  # fmt: skip
STOP, LAST = 2, 5  # steps; the second of four on one rollout
TIMED = ("engine=torch", *PAIRS, "data.max_length=96", *on(1, 1, 2), "loss=dpo", "train.max_steps=60")  # mostly Python
ROUNDS, WARM = 8, 5  # pairs of runs; first steps of each that do not count
SLOWER = 1.02
ON_GPUS = ("hardware=h100", "data.max_length=128")
REHEARSED: Cases = {
    "dpo with LoRA on a ring of 4": (*ON_GPUS, "adapter=lora", "loss=dpo", "parallel=ring4", "launch.nproc=8"),
    "ppo": (*ON_GPUS, "loss=ppo", "data=arithmetic", "reward.rule=arithmetic", "launch.nproc=1"),
}
CACHE, DIFFERS = "cache", "DIFFERS: "


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unmoved", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("commit", nargs="?", help=f"the one to compare with (default: HEAD; for folders {OLDEST})")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="which parts")
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES], metavar="NAME", help="which of CASES")
    options = parser.parse_args()
    moved: dict[str, str] = {}
    for part in options.only:
        commit, began = options.commit or (OLDEST if part == "folders" else "HEAD"), time.monotonic()
        with pairs.before(commit) as old, tempfile.TemporaryDirectory(prefix="rlexp-unmoved-") as place:
            for line in PARTS[part](old, Path(place), options.case):
                print(line, flush=True)
                moved |= {part: commit} if line.startswith(DIFFERS) else {}
        print(f"{part}: {time.monotonic() - began:.0f} s beside {commit}", flush=True)
    parts = " and ".join(f"{part} (beside {commit})" for part, commit in moved.items())
    print(f"Not as before: {parts}." if moved else f"As before: {', '.join(options.only)}.")
    return 1 if moved else 0


# ---- the parts ----


def rows(old: Path, place: Path, only: Sequence[str]) -> Iterator[str]:
    cases, before, now = {name: CASES[name] for name in only}, place / "before", place / "now"
    both(run_all, (old, before, cases), (ROOT, now, cases))
    for name in cases:
        yield from compared(name, before / name, now / name, 1)


def folders(old: Path, place: Path, only: Sequence[str]) -> Iterator[str]:
    to_end = (f"train.max_steps={LAST}", "train.eval_every=null", "logger.progress=true")
    cases = {name: (*CASES[name], *to_end) for name in only if name in BEGUN}
    before, now = place / "before", place / "now"
    run_all(old, before, {name: (*words, f"train.stop_after={STOP}") for name, words in cases.items()})
    shutil.copytree(before, now)
    kept = cached(now)
    both(run_all, (old, before, cases), (ROOT, now, cases))
    for name in cases:
        yield from compared(name, before / name, now / name, STOP + 1)
        if not any(line.endswith(f", after step {STOP}") for line in printed(now / name)):
            yield f"{DIFFERS}{name}: does not continue after step {STOP}"
        yield from [line for line in printed(now / name) if line.startswith("rlexp: reference")][-1:]
    again = sorted({path.parts[0] for path, written in cached(now).items() if kept.get(path) != written} - {"notes"})
    yield f"made again in the cache: {', '.join(again) or 'nothing'}"


def host(old: Path, place: Path, only: Sequence[str]) -> Iterator[str]:  # noqa: ARG001
    yield timed(old, place)
    before, now = both(rehearse_all, (old, place / "before"), (ROOT, place / "now"))
    for name, count in now.items():
        yield f"{DIFFERS if count > before[name] else ''}{name}: {count:,}, and {before[name]:,} before"


PARTS = {"rows": rows, "folders": folders, "host": host}


def both(function: Callable[..., Any], *arguments: Sequence[object]) -> list[Any]:
    """Call a function for both commits at the same time."""
    with ThreadPoolExecutor(2) as sides:
        return [running.result() for running in [sides.submit(function, *each) for each in arguments]]


def run_all(tree: Path, folder: Path, cases: Cases) -> None:
    with side(tree, folder) as runs:
        for name, words in cases.items():
            runs.ask([str(folder / name), [*BASE, *words]])


def side(tree: Path, folder: Path) -> AbstractContextManager[pairs.Worker]:
    """Start a process that runs configurations with a tree's code, and with a cache of its own."""
    return pairs.worker(tree, (str(ROOT / "bench" / "unmoved_side.py"),), {"RLEXP_CACHE": str(folder / CACHE)})


# ---- how two runs differ ----


def compared(name: str, before: Path, now: Path, first: int) -> Iterator[str]:
    """Yield each difference between two runs, from a step on, or that there is none."""
    one, other = ({int(row["step"]): row for row in read_rows(folder / METRICS)} for folder in (before, now))
    if not one or one.keys() != other.keys():
        yield f"{DIFFERS}{name}: has steps {[*other]}, and had {[*one]}"
        yield from (line for folder in (before, now) for line in printed(folder)[-1:])
        return
    steps = [step for step in one if step >= first]
    differences = [each for step in steps for each in of_rows(one[step], other[step])] + [*of_weights(before, now)]
    yield from (f"{DIFFERS}{name}, {each}" for each in differences[:SHOWN])
    if differences:
        yield f"{name}: {len(differences)} differences in all"
    else:
        yield f"{name}: steps {steps[0]} to {steps[-1]}, {len(one[steps[-1]])} values, and weights are equal"


def of_rows(before: MetricRow, now: MetricRow) -> Iterator[str]:
    for metric in sorted({*before, *now}):
        one, other = before.get(metric), now.get(metric)
        if one != other and not (metric.startswith(MEASURED) or "second" in metric):
            apart = "" if one is None or other is None else f" (relative difference {relative(one, other):.1e})"
            yield f"step {before['step']}: {metric} is {other!r}, and was {one!r}{apart}"


def of_weights(before: Path, now: Path) -> Iterator[str]:
    one, other = weights_of(before), weights_of(now)
    for name in sorted({*one, *other}):
        if name not in one or name not in other or one[name].shape != other[name].shape:
            yield f"after the last step: the weight {name} is not in both, or has another shape"
        elif not np.array_equal(one[name], other[name]):
            yield f"after the last step: the weight {name} differs by {np.abs(other[name] - one[name]).max():.1e}"


def cached(folder: Path) -> dict[Path, int]:
    """Return the files of a cache, and when they were written."""
    files = [path for path in (folder / CACHE).rglob("[!.]*") if path.is_file()]
    return {path.relative_to(folder / CACHE): path.stat().st_mtime_ns for path in files}


def printed(folder: Path) -> list[str]:
    console = folder / CONSOLE
    return console.read_text(encoding="utf-8").splitlines() if console.exists() else []


# ---- the host's part of a step ----


def timed(old: Path, place: Path) -> str:
    """Compare the processor's seconds for the same steps. Both run at once, and suffer alike from what else runs."""
    ratios = []
    with side(old, place / "before") as before, side(ROOT, place / "now") as now:
        for number in map(str, range(ROUNDS)):
            runs = {before: place / "before" / number, now: place / "now" / number}
            both(pairs.Worker.ask, *((each, [str(folder), [*BASE, *TIMED]]) for each, folder in runs.items()))
            one, other = (
                [row["train/step_seconds"] for row in read_rows(folder / METRICS)[WARM:]] for folder in runs.values()
            )
            ratios.append(statistics.median(math.log(b / a) for a, b in zip(one, other, strict=True)))
    mean, wide = statistics.mean(ratios), pairs.around(ratios)
    ratio, low, high = (math.exp(each) for each in (mean, mean - wide, mean + wide))
    text = f"{ratio:.3f} of the processor time before ({low:.3f} to {high:.3f}), {statistics.median(other):.4f} s"
    return f"{DIFFERS if ratio > SLOWER and low > 1 else ''}a step of dpo takes {text}"


def rehearse_all(tree: Path, folder: Path) -> dict[str, int]:
    """Count what each rehearsed step launches, and how often it waits for the device."""
    counts: dict[str, int] = {}
    answer = folder / "answer.json"
    for name, words in REHEARSED.items():
        command = [sys.executable, "-P", "-m", "rlexp.preflight", "--json", str(answer), *words]
        environment = os.environ | {"PYTHONPATH": str(tree), "RLEXP_CACHE": str(folder / CACHE)}
        subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
        step = json.loads(answer.read_text(encoding="utf-8"))["step"]
        counts |= {f"{name}, launches": step["launches"], f"{name}, waits": sum(step["host_waits"].values())}
    return counts


if __name__ == "__main__":
    sys.exit(main())
