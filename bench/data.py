"""Measure how a run starts on few and on many rows: seconds to its first step, and memory of ranks and of the machine.

    python -m bench.data                         print the table; seven minutes
    python -m bench.data --write docs/measured/benchmarks.md

Rows are short pairs written for the measurement. Each run is `python -m rlexp` as a user types it, on two ranks: with
an empty cache, with the rows tokenized, and with some of these held out and a limit that a longer pair would exceed.
Memory is what the kernel counts (smaps), five times a second.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.measured import print_tables
from rlexp.training.dataset.generated import CURT, THINGS, VERBS, WORDS

ROWS = (10_000, 100_000, 1_000_000)
RANKS, EVERY = 2, 0.2
LIMITED = ("data.eval_size=0.05", "train.max_tokens_per_micro_batch=800")
CACHES = {"cold": (), "warm": (), "warm; 5 % held out, a limit of tokens": LIMITED}
MIB = 1 << 20


def main() -> None:
    print_tables("bench.data", __doc__, {"rows": rows}, "rows")


def rows() -> str:
    lines = [
        "| pairs | file, MB | cache | seconds to step 1 | peak own memory of a rank "
        "| mapped pages of the store in a rank | peak of all processes | store, MB |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for count in ROWS:
            place = Path(folder) / str(count)
            place.mkdir()
            write_rows(place / "rows.jsonl", count)
            for number, (cache, words) in enumerate(CACHES.items()):
                found = watched_run(place, str(number), *words)
                size = sum(file.stat().st_size for file in (place / "cache").rglob("*") if file.is_file())
                lines.append(
                    f"| {count:,} | {(place / 'rows.jsonl').stat().st_size / 1e6:.0f} | {cache} | {found.seconds:.0f} "
                    f"| "
                    f"{found.own / MIB:.0f} MiB | {found.mapped / MIB:.0f} MiB | {found.together / MIB:.0f} MiB | "
                    f"{size / 1e6:.0f} |"
                )
    return "\n".join(lines)


def write_rows(path: Path, count: int) -> None:
    """Write pairs of a question of about 30 words and answers of about 15, all different."""
    random_ = random.Random(count)
    words = (*WORDS, *THINGS, *VERBS, *CURT)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            asked, *answers = (" ".join(random_.choices(words, k=length)) for length in (30, 15, 15))
            file.write(f'{{"prompt": "{number}: {asked}?", "chosen": "{answers[0]}.", "rejected": "{answers[1]}."}}\n')


@dataclass
class Found:
    """What was seen of a run: bytes, and seconds to its first row of metrics."""

    seconds: float = 0.0
    own: int = 0  # anonymous memory of the largest rank
    mapped: int = 0  # of the store, in the memory of one rank
    together: int = 0  # proportional share of all processes, with what they map
    ranks: set[int] = field(default_factory=set)


def watched_run(place: Path, name: str, *words: str) -> Found:
    command = [
        sys.executable, "-m", "rlexp", "data=jsonl", f"data.path={place / 'rows.jsonl'}", "launch.device=cpu",
        f"parallel=ring{RANKS}", "train.max_steps=1", "logger=none", "checkpoint.export=false",
        "checkpoint.on_exit=false", f"hydra.run.dir={place / name}", *words,
    ]  # fmt: skip
    found, began = Found(), time.monotonic()
    environment = os.environ | {"RLEXP_CACHE": str(place / "cache")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    curve = place / name / "metrics.jsonl"
    while process.poll() is None:
        look(process.pid, place / "cache", found)
        if not found.seconds and curve.exists() and curve.stat().st_size:
            found.seconds = time.monotonic() - began
        time.sleep(EVERY)
    assert process.stderr is not None
    said = process.stderr.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{said}")
    found.seconds = found.seconds or time.monotonic() - began
    return found


def look(root: int, store: Path, found: Found) -> None:
    """Add what all processes of the run hold now; a process that is gone holds nothing."""
    together = 0
    for pid in tree(root):
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            held = rolled_up(pid)
            together += held["Pss"]
            if b"rlexp.training.dataset.tokenize_worker" in words or pid == root:
                continue
            found.own = max(found.own, held["Anonymous"])
            found.mapped = max(found.mapped, of_store(pid, store))
    found.together = max(found.together, together)


def tree(root: int) -> Iterator[int]:
    """Yield a process and all that it started."""
    yield root
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{root}/task"):
            for child in Path(f"/proc/{root}/task/{task}/children").read_text().split():
                yield from tree(int(child))


def rolled_up(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def of_store(pid: int, store: Path) -> int:
    """Return the bytes of the store's files that a process has in its memory."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split(" ")[0]:
            inside = str(store) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    main()
