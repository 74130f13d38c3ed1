"""Compare the working tree's runs with those of another commit: is every number still the same, to the last bit?

    python -m bench.unmoved                                 with HEAD; runs begun earlier, with the oldest to continue
    python -m bench.unmoved COMMIT --only rows folders host  with this commit, and only these parts

rows      Train some steps of each configuration with both commits' code. All that their rows say must be equal, except
          for seconds, speeds and memory, and so must the final weights.
folders   Begin runs with the commit's code, stop them, and continue a copy with each code. The next rows must be equal.
host      Time a step of a small model in pairs, and count the kernels that a rehearsal launches. Neither may grow.

The exit code is 1 if anything differs. Each configuration has a name; `--case NAME` runs only some.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

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
ROWS = ("data=jsonl", f"data.path={HH}", "data.max_samples=64", "data.eval_size=5", "train.eval_every=2",
        "data.max_length=192", "data.too_long=truncate")  # fmt: skip
MADE = ("data.size=32", "data.eval_size=5", "train.eval_every=2")
DRAWN = ("data=arithmetic", "data.size=16", "data.eval_size=0", "data.max_length=32", "reward.rule=regex",
         'reward.pattern="[0-9]"', "rollout.batch_size=4", "rollout.n_samples=4", "rollout.epochs=2",
         "rollout.max_new_tokens=8", "optim.lr=1e-2")  # fmt: skip
LORA = ("adapter=lora", "adapter.rank=4", "optim.lr=1e-2")
EXACT, SINGLE = ("train.precision=fp64", "engine=torch"), ("train.precision=fp32",)


def on(ring: int, replicas: int, micro: int | str = "auto") -> tuple[str, ...]:
    return f"parallel=ring{ring}", f"launch.nproc={ring * replicas}", f"train.micro_batch_size={micro}"


CASES: Cases = {
    "dpo": (*EXACT, *ROWS, *on(1, 1), "loss=dpo", "eval.buckets=[128]"),
    "dpo, LoRA, ring of 4, not shared": (*EXACT, *ROWS, *LORA, *on(4, 1), "loss=dpo", "data.share_prefix=false"),
    "dpo, 2 x 2, one at a time": (*EXACT, *MADE, *on(2, 2, 1), "loss=dpo", "loss.ld_alpha=0.5"),
    "mpo, stored reference, padded": (*EXACT, *ROWS, *on(2, 1), "loss=mpo", "reference=precompute",
                                      "data.packing=false"),
    "kto, unpaired pairs": (*EXACT, *ROWS, *on(2, 1, 2), "loss=kto", "data.unpair=true"),
    "sft, ring of 4": (*EXACT, *ROWS, *on(4, 1), "loss=sft"),
    "reward model, accumulated": (*EXACT, *ROWS, *on(2, 1, 2), "loss=reward", "loss.center=0.01"),
    "bco_pair, two replicas, accumulated": (*EXACT, *MADE, *on(1, 2, 2), "loss=bco_pair", "loss.sft_weight=0.1"),
    "aot, hybrid ring of 4": (*EXACT, *ROWS, *on(4, 1, 2), "loss=aot", "parallel.layout=hybrid",
                              "parallel.ulysses_size=2"),
    "ppo": (*EXACT, *DRAWN, *on(1, 2, 2), "loss=ppo"),
    "grpo, ring of 2, LoRA": (*EXACT, *DRAWN, *LORA, *on(2, 1), "loss=grpo", "loss.entropy=0.01"),
    "dpo, ZeRO-1": (*SINGLE, *MADE, *on(1, 2, 2), "loss=dpo", "engine=zero1"),
    "dpo, LoRA over ZeRO-3": (*SINGLE, *MADE, *LORA, *on(2, 1), "loss=dpo", "engine=zero3"),
}  # fmt: skip
BEGUN: Cases = {
    "LoRA": (*EXACT, *ROWS, *LORA, *on(2, 1), "loss=dpo"),
    "ZeRO-1": (*SINGLE, *MADE, *on(1, 2, 2), "loss=dpo", "engine=zero1"),
    "ZeRO-3": (*SINGLE, *MADE, *on(2, 1), "loss=dpo", "engine=zero3"),
    "fsdp2": (*MADE, *on(1, 2), "loss=dpo", "engine=fsdp2", "train.precision=fp64"),
    "a stored reference": (*EXACT, *ROWS, *on(1, 1), "loss=dpo", "reference=precompute"),
    "bco_pair's running mean": (*EXACT, *ROWS, *on(1, 2, 2), "loss=bco_pair"),
    "ppo within a rollout": (*EXACT, *DRAWN, *on(1, 2, 2), "loss=ppo"),
}
STOP, LAST = 2, 5  # steps; the second of four on one rollout
TIMED = (*SINGLE, "engine=torch", "data=jsonl", f"data.path={HH}", *on(1, 1), "loss=dpo", "train.max_steps=30")
ROUNDS, WARM = 6, 5  # pairs of runs, whose order takes turns; first steps of each that do not count
SLOWER = 1.02
REHEARSED: Cases = {
    "dpo on a ring of 4": ("model=tiny", "loss=dpo", "parallel=ring4", "launch.nproc=8", "hardware=h100"),
    "kto with LoRA": ("model=tiny", "loss=kto", "data.unpair=true", "adapter=lora", "launch.nproc=2", "hardware=h100"),
    "ppo on a ring of 2": ("+experiment=ppo_tiny", "parallel=ring2", "launch.device=cpu"),
}
CACHE = "cache"


DIFFERS = "DIFFERS: "


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unmoved", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("commit", nargs="?", help=f"the one to compare with (default: HEAD; for folders {OLDEST})")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="which parts")
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="which configurations of rows, folders")
    options = parser.parse_args()
    differing = []
    for part in options.only:
        commit, began = options.commit or (OLDEST if part == "folders" else "HEAD"), time.monotonic()
        with pairs.before(commit) as old, tempfile.TemporaryDirectory(prefix="rlexp-unmoved-") as place:
            lines = [*PARTS[part](old, Path(place), options.case)]
        print("\n".join(lines), f"{part}, beside {commit}: {time.monotonic() - began:.0f} s", sep="\n", flush=True)
        differing += [part] * any(line.startswith(DIFFERS) for line in lines)
    print(f"{' and '.join(differing)}: not as before." if differing else f"{', '.join(options.only)}: as before.")
    return 1 if differing else 0


# ---- the parts ----


def rows(old: Path, place: Path, only: Sequence[str]) -> Iterator[str]:
    cases = chosen(CASES, only)
    folders = [place / "before", place / "now"]
    both(run_all, ((tree, folder, cases) for tree, folder in zip((old, ROOT), folders, strict=True)))
    for name in cases:
        yield from compared(name, *(folder / name for folder in folders))


def folders(old: Path, place: Path, only: Sequence[str]) -> Iterator[str]:
    cases = {name: (*words, f"train.max_steps={LAST}", "train.eval_every=null") for name, words in
             chosen(BEGUN, only).items()}  # fmt: skip
    before, now = place / "before", place / "now"
    run_all(old, before, {name: (*words, f"train.stop_after={STOP}") for name, words in cases.items()})
    shutil.copytree(before, now)
    kept = cached(now)
    both(run_all, ((old, before, cases), (ROOT, now, cases)))
    for name in cases:
        yield from compared(name, before / name, now / name, range(STOP + 1, LAST + 1))
    again = sorted({path.parts[0] for path, written in cached(now).items() if kept.get(path) != written})
    yield f"stored rows (tokens) and references, when runs continue: {', '.join(again) or 'none'} made again"
    for name in cases:
        before_says, now_says = (printed(folder / name) for folder in (before, now))
        yield from (f"{name}: prints now: {line}" for line in now_says if line not in before_says)


def host(old: Path, place: Path, only: Sequence[str]) -> Iterator[str]:  # noqa: ARG001
    yield from timed(old, place)
    for name, words in REHEARSED.items():
        counts = [rehearsed(tree, words, place / "answer.json") for tree in (old, ROOT)]
        for what in counts[0]:
            before, now = (each[what] for each in counts)
            yield f"{DIFFERS if now > before else ''}{name}: {now:,} {what}, {before:,} before"


PARTS: Mapping[str, Callable[[Path, Path, Sequence[str]], Iterator[str]]] = {
    "rows": rows, "folders": folders, "host": host,
}  # fmt: skip


def chosen(cases: Cases, only: Sequence[str]) -> Cases:
    return {name: words for name, words in cases.items() if not only or name in only}


def both(function: Callable[..., object], arguments: Iterable[Sequence[object]]) -> None:
    """Let both commits' code run at the same time."""
    with ThreadPoolExecutor(2) as sides:
        for running in [sides.submit(function, *each) for each in arguments]:
            running.result()


def run_all(tree: Path, folder: Path, cases: Cases) -> None:
    with side(tree, folder) as runs:
        for name, words in cases.items():
            runs.ask([str(folder / name), [*BASE, *words]])


def side(tree: Path, folder: Path) -> AbstractContextManager[pairs.Worker]:
    """Start a process that runs configurations with a tree's code, with a cache of its own."""
    return pairs.worker(tree, (str(ROOT / "bench" / "unmoved_side.py"),), {"RLEXP_CACHE": str(folder / CACHE)})


# ---- what two runs are compared by ----


def compared(name: str, before: Path, now: Path, steps: Iterable[int] | None = None) -> Iterator[str]:
    """Yield each difference between the rows of two runs, at these steps or at all, or that there is none."""
    curves = [{int(row["step"]): row for row in read_rows(folder / METRICS)} for folder in (before, now)]
    wanted = sorted({*curves[0], *curves[1]}) if steps is None else [*steps]
    if not wanted or any(step not in curve for curve in curves for step in wanted):
        yield f"{DIFFERS}{name}: steps {[*curves[0]]} before, and {[*curves[1]]} now"
        yield from (line for folder in (before, now) for line in printed(folder)[-1:])
        return
    differences = [each for step in wanted for each in differing(step, *(curve[step] for curve in curves))]
    weights = [weights_of(folder) for folder in (before, now)]
    if weights[0].keys() != weights[1].keys():
        differences.append(f"weights have other names: {sorted(weights[0].keys() ^ weights[1].keys())}")
    else:
        differences += [f"after the last step: the weight {each} differs by {np.abs(other - one).max():.1e}"
                        for each, one in weights[0].items()
                        if not np.array_equal(one, other := weights[1][each])]  # fmt: skip
    yield from (f"{DIFFERS}{name}, {each}" for each in differences[:SHOWN])
    if len(differences) > SHOWN:
        yield f"{name}: {len(differences) - SHOWN} more differences"
    if not differences:
        yield f"{name}: {len(wanted)} rows of up to {max(map(len, curves[0].values()))} values, equal to the last bit"


def differing(step: int, before: MetricRow, now: MetricRow) -> Iterator[str]:
    for metric in sorted({*before, *now}):
        one, other = before.get(metric), now.get(metric)
        if metric.startswith(MEASURED) or "second" in metric or one == other:
            continue
        apart = "" if one is None or other is None else f" (relative difference {relative(one, other):.1e})"
        yield f"step {step}: {metric} is {other!r}, and was {one!r}{apart}"


def cached(folder: Path) -> dict[Path, int]:
    """Return the files of a cache, and when they were written."""
    files = [path for path in (folder / CACHE).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder / CACHE): path.stat().st_mtime_ns for path in files}


def printed(folder: Path) -> list[str]:
    """Return the lines that a run printed, without its own path."""
    console = folder / CONSOLE
    return console.read_text(encoding="utf-8").replace(str(folder), "").splitlines() if console.exists() else []


# ---- the host's part of a step ----


def timed(old: Path, place: Path) -> Iterator[str]:
    ratios = []
    with side(old, place / "before") as before, side(ROOT, place / "now") as now:
        sides = [(before, place / "before"), (now, place / "now")]
        for number in range(ROUNDS + 1):
            seconds = {}
            for runs, folder in sides[:: 1 if number % 2 else -1]:
                runs.ask([str(folder / str(number)), [*BASE, *TIMED]])
                seconds[folder.name] = step_seconds(folder / str(number))
            if number:  # the first round makes stores of rows
                ratios.append(math.log(seconds["now"] / seconds["before"]))
    mean, wide = statistics.mean(ratios), pairs.around(ratios)
    ratio, low, high = (math.exp(each) for each in (mean, mean - wide, mean + wide))
    text = f"a step of dpo takes {ratio:.3f} of the time before ({low:.3f} to {high:.3f}), {seconds['now']:.4f} s"
    yield f"{DIFFERS if ratio > SLOWER and low > 1 else ''}{text}"


def step_seconds(folder: Path) -> float:
    return statistics.median(row["train/step_seconds"] for row in read_rows(folder / METRICS)[WARM:])


def rehearsed(tree: Path, words: Sequence[str], answer: Path) -> dict[str, int]:
    """Count what a rehearsed step launches, and how often it waits for the device."""
    command = [sys.executable, "-P", "-m", "rlexp.preflight", "--json", str(answer), *words]
    subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True, capture_output=True)
    step = json.loads(answer.read_text(encoding="utf-8"))["step"]
    return {"launches": step["launches"], "waits": sum(step["host_waits"].values())}


if __name__ == "__main__":
    sys.exit(main())
