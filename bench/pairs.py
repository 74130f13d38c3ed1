"""Compare the time of attention with another commit's, in pairs: is any layout slower than before?

    python -m bench.pairs COMMIT                                     print it; two hours on 2 quiet cores
    python -m bench.pairs COMMIT --write docs/measured/attention.md
    python -m bench.pairs COMMIT --only mix                          or one sequence

Each commit's own code runs at the same inputs: all ranks of a ring of 8, one after the other, as bench.attention runs
them. Each core has a case. A pair is two new processes, since one may be 2 % faster than the next for as long as they
live. They take turns rank by rank, and which begins changes from pair to pair. Every process keeps the memory that it
once had: else up to a tenth of its time is spent on getting pages from the system, in one process more than in the
next. A ratio is the geometric mean over the pairs, with an interval for 95 of 100 cases.
There are as many pairs as it takes for the interval to reach 1.25 % to each side, and to say whether we are slower by
2 % or not, at most 48. Stopping there makes it a little too narrow: it has the ratio in 93 to 95 of 100 cases.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RING = 8
DTYPES = ("float32", "bfloat16")
TOKENS = {"one": "one sequence", "mix": "the mix"}
PAIRS, MOST = 10, 48
WIDE = 0.0125  # of an interval, to each side
SLOWER = math.log(1.02)
# What glibc never gives back. By itself it learns from what a process frees, and gives pages back as it thinks fit.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("commit", nargs="?", help="the one to compare with")
    parser.add_argument("--only", choices=TOKENS, help="which tokens")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.commit is None:
        parser.error("name the commit to compare with, such as HEAD~1")
    if options.only and options.write:
        parser.error("--only leaves rows out of the page: give it without --write")
    from bench.tables import put, signature

    lines = ["| layout | tokens | dtype | pairs | time, relative to before |", "| --- | --- | --- | ---: | ---: |"]
    with before(options.commit) as old, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        asked = cases([options.only] if options.only else TOKENS)
        for line in cores.map(functools.partial(compared, old), asked):
            lines.append(line)
            print(line, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short=12", options.commit], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.strip()  # fmt: skip
    text = (
        f"### Compared with commit {commit}\n\nAll ranks of a ring of {RING}, forward and backward: the same inputs "
        f"in {PAIRS} to {MOST} pairs of\nturns. In brackets, the interval that has the ratio in 93 to 95 of 100 "
        f"cases. On {processor()}.\n{signature('bench.pairs')}\n\n" + "\n".join(lines)
    )
    if options.write:
        put(options.write, text, "pairs")
    return 0


def cases(which: Iterable[str]) -> Iterator[dict[str, Any]]:
    from bench.attention import cases as of_rings

    for tokens in which:
        for dtype in DTYPES:
            for case in of_rings([RING]):
                yield {"layout": case.layout, "inner": case.inner, "tokens": tokens, "dtype": dtype}


def compared(old: Path, case: dict[str, Any]) -> str:
    """Return a line with the ratio of our time to that of the other commit, and the ends of its interval."""
    ratios: list[float] = []
    while len(ratios) < PAIRS or (not said(ratios) and len(ratios) < MOST):
        first, second = (ROOT, old) if len(ratios) % 2 else (old, ROOT)
        seconds = pair(first, second, case)
        ratios.append(math.log(seconds[ROOT] / seconds[old]))
    mean, wide = statistics.mean(ratios), around(ratios)
    ratio, low, high = (math.exp(each) for each in (mean, mean - wide, mean + wide))
    names = f"{case['layout']} | {TOKENS[case['tokens']]} | {case['dtype']} | {len(ratios)}"
    return f"| {names} | {ratio:.3f} ({low:.3f} to {high:.3f}) |"


def pair(first: Path, second: Path, case: dict[str, Any]) -> dict[Path, float]:
    """Return the seconds of two commits' code. The second process begins when the first one waits."""
    seconds = {first: 0.0, second: 0.0}
    with worker(first) as one:
        one.ask(case)
        with worker(second) as other:
            other.ask(case)
            for rank in range(RING):
                seconds[first] += one.ask(rank)
                seconds[second] += other.ask(rank)
    return seconds


def said(ratios: Sequence[float]) -> bool:
    """Say whether the interval is narrow, and on one side of what we call slower."""
    wide = around(ratios)
    return wide < min(WIDE, abs(statistics.mean(ratios) - SLOWER))


def around(values: Sequence[float]) -> float:
    """Return how far the mean's interval reaches to each side."""
    normal, freedom = statistics.NormalDist().inv_cdf(0.975), len(values) - 1
    student = normal + (normal**3 + normal) / (4 * freedom) + (5 * normal**5 + 16 * normal**3) / (96 * freedom**2)
    return student * statistics.stdev(values) / math.sqrt(len(values))


@contextmanager
def before(commit: str) -> Iterator[Path]:
    """Unpack a commit into a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="rlexp-before-") as folder:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
        yield Path(folder)


class Worker:
    """A process with the code of one commit: it takes a case, and then says how long a rank of it takes."""

    def __init__(self, process: subprocess.Popen[str], tree: Path) -> None:
        self.process, self.tree = process, tree

    def ask(self, question: object) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError(f"the process in {self.tree} ended at {question}")
        return float(answer)


@contextmanager
def worker(
    tree: Path, command: Sequence[str] = (__file__, "--serve"), more: Mapping[str, str] = KEPT
) -> Iterator[Worker]:
    """Start this file, or another, but not that of the commit, which may have none. It imports all else from the
    commit's tree. `more` is added to its environment."""
    environment = os.environ | more | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-P", *command], cwd=tree, env=environment, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        yield Worker(process, tree)
    finally:
        process.communicate()  # ends its input, and so the process


def processor() -> str:
    found = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
             if line.startswith("model name")]  # fmt: skip
    return found[0] if found else "an unknown processor"


# ---- in a worker ----


def serve() -> None:
    import torch

    torch.set_num_threads(1)
    ranks: list[Any] = []
    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, int):
            print(played(ranks[question]), flush=True)
        else:
            ranks = ranks_of(question)
            print(sum(map(played, ranks)), flush=True)  # the first time does not count


def ranks_of(case: dict[str, Any]) -> list[Any]:
    import torch

    from bench.attention import HEADS, LONG, MIX, SIZE
    from bench.simulate import Alone, Sizes, packed
    from rlexp.training.ring.kernels.cpu_flash import CpuFlash
    from rlexp.training.ring.layouts import get_layout

    layout = get_layout(case["layout"], case["inner"])
    segments = packed(MIX if case["tokens"] == "mix" else LONG, layout.multiple(RING))
    sizes = Sizes(HEADS, HEADS, SIZE, getattr(torch, case["dtype"]), torch.device("cpu"))
    return [Alone(layout, segments, RING, rank, CpuFlash(), sizes) for rank in range(RING)]


def played(rank: Any) -> float:
    """Let a rank attend once; return the seconds."""
    rank.play()
    return sum(end - begin for begin, end, *_ in rank.runs.pop())


if __name__ == "__main__":
    sys.exit(main())
