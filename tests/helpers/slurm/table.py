"""Write the tables of the docs on Slurm from what the tests measured: faults, and ways back into the queue.

RLEXP_TEST_ROWS=rows.json python -m pytest -m "slurm and table"
python -m tests.helpers.slurm.table rows.json --write docs/measured/slurm.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tables import put
from rlexp.launch.run_folder import git_commit

SHAPES = {"two-nodes": "2 × 1", "two-nodes-that-wait": "2 × 1", "four-ranks": "2 × 2", "one-node": "1 × 2"}
PLACES = {
    "import": "as Python starts", "load": "as rlexp is imported", "meet": "before the process group exists",
    "step": "before a step", "forward": "in the forward pass", "backward": "before the backward pass",
    "collective": "as keys and values are sent",
    "save": "while saving", "end": "after the last collective",
}  # fmt: skip
WAYS = {
    "raise": "an exception", "exit0": "exit 0", "exit3": "exit 3", "quit0": "`sys.exit(0)`", "quit3": "`sys.exit(3)`",
    "kill": "SIGKILL", "memory": "torch cannot allocate memory",
    "eat": "the rank takes more memory than Slurm allows",
    "stop": "SIGSTOP, never continued", "hang": "sleeps for ever", "loop": "an endless loop",
}  # fmt: skip
LONGEST = 110
ROWS = "RLEXP_TEST_ROWS"  # names the file that the rows are written to
HEAD = (
    "where", "fault", "nodes × ranks per node", "seconds until Slurm ended the job",
    "seconds until the sweep reported it", "exit code and state in Slurm", "reason in the sweep", "status",
)  # fmt: skip


def write_row(what: str, **facts: Any) -> None:
    """Add a row to the file of rows, in place of an earlier row of the same name."""
    if path := os.environ.get(ROWS):
        place = Path(path)
        rows = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
        place.write_text(json.dumps(rows | {what: facts}, indent=1), encoding="utf-8")


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", f"| --- | --- | --- |{' ---: |' * 2}{' --- |' * 3}"]
    lines += [line_of(row) for row in sorted(rows.values(), key=order)]
    return "\n".join(lines)


def order(row: dict[str, Any]) -> tuple[int, int, int]:
    return [*PLACES].index(place_of(row)), [*WAYS].index(row["how"]), [*SHAPES].index(row["shape"])


def place_of(row: dict[str, Any]) -> str:
    return re.sub(r"\d", "", row["where"])


def line_of(row: dict[str, Any]) -> str:
    failed = row["status"] == "failed"
    times = (f"{row['ended']:.0f}", f"{row['told']:.0f}") if failed else ("", "")
    return " | ".join((
        f"| {PLACES[place_of(row)]}", WAYS[row["how"]], SHAPES[row["shape"]], *times,
        f"{row['code']} {row['state']}", f"`{short(row['reason'])}`", f"{row['status']} |",
    ))  # fmt: skip


def short(reason: str) -> str:
    """Return the last line of a traceback, or the first line of another reason, cut to the table's width."""
    first, *more = [line for line in reason.splitlines() if not line.startswith(("Its log: ", "It was last seen "))]
    if first.endswith("Traceback (most recent call last):"):
        error = next((line for line in reversed(more) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)), more[-1])
        first = f"{first.partition(':')[0]}: … {error}"
    first = first.replace("|", "/").replace("`", "'")
    return first if len(first) <= LONGEST else f"{first[:LONGEST]} …"


def intro(rows: dict[str, dict[str, Any]]) -> str:
    failed = [row for row in rows.values() if row["status"] == "failed"]
    worst = max(max(row["ended"], row["told"]) for row in failed)
    others = [status for row in rows.values() for status in row["others"]]
    assert set(others) <= {"finished"}, others
    commit = (git_commit() or "unknown")[:12]
    return (
        f"{len(rows)} faults were injected into jobs of sweeps that also had healthy jobs. All healthy jobs finished. "
        f"The longest time\nuntil a failure was reported was {worst:.0f} s.\n"
        f"Measured {time.strftime('%Y-%m-%d')} at commit "
        f"{commit}, Slurm on one machine, CPU and "
        f"gloo, by `make prove-slurm`."
    )


WHO = {"stop": "by rlexp: the ranks stopped in good order", "slurm": "by Slurm", "lost": "by rlexp: a node was lost"}


def requeues(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of ways back into the queue."""
    commit = (git_commit() or "unknown")[:12]
    lines = [
        "Each row is a run on 2 nodes in float64, with a checkpoint every 4 steps and one kind of interruption. The",
        "times depend on the machine: several runs shared two cores. Before Slurm starts a requeued job again, it",
        "waits until the job's credential has expired. On the test cluster this takes 6 seconds, which are included in",
        '"seconds to the next step". W&B has each step exactly once.',
        f"Measured {time.strftime('%Y-%m-%d')} at commit {commit}, by `make prove-slurm`.",
        "",
        "| what happens | steps computed again (most allowed) | restarts, and by whom | seconds to the next step | "
        "largest difference of loss and final weights |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for row in rows:
        who = ", ".join(WHO[each] for each in sorted(set(row["why"])))
        restarts = f"{row['restarts']}, {who}" if who else "none"
        lines.append(f"| {row['path']} | {row['lost']} ({row['most']}) | {restarts} | {row['seconds']:.0f} | "
                     f"{row['apart']:.2g} |")  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.slurm.table", description=__doc__)
    parser.add_argument("rows", type=Path, help="the file that the tests wrote, named by RLEXP_TEST_ROWS")
    parser.add_argument("--write", type=Path, help="put both tables into this page")
    given = parser.parse_args()
    if not given.rows.exists():
        print(f"{given.rows}: no test has written rows. Without a Slurm the page stays as it is.", file=sys.stderr)
        return 0
    rows = json.loads(given.rows.read_text(encoding="utf-8"))
    faults = {key: row for key, row in rows.items() if not key.startswith("requeue: ")}
    again = [row for key, row in rows.items() if key.startswith("requeue: ")]
    sections = {"faults": f"{intro(faults)}\n\n{table(faults)}" if faults else "", "requeue": again and requeues(again)}
    for name, text in sections.items():
        if text:
            print(text)
            if given.write:
                put(given.write, text, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
