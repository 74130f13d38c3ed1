"""Run `verify` with every defect of this folder, each in ranks of its own, and print a table of what was found.

A defect of `tested.py` is planted into a pytest run of its test instead, which must fail. The table names the test
where it names the settings or the folder of the others. `python -m tests.helpers.faults NAME ...` does it with those
named. The exit code is 1 unless each is found: with the settings that make it, with its folder where no layout moves
it, or by its test. All of them take an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.tables import put, signature
from tests.helpers.faults import FAULTS
from tests.helpers.faults.base import Fault
from tests.helpers.faults.examining import ELSEWHERE, KNOWN, answered
from tests.helpers.faults.moved import MOVED
from tests.helpers.faults.tested import TESTED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="defects of tests/helpers/faults/; by default all of them"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--verbose", action="store_true", help="print the seconds of each start of ranks")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the sums into this page, between its markers")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - KNOWN.keys()):
        parser.error(f"{unknown[0]}: is no defect of tests/helpers/faults/.")
    faults = [KNOWN[name] for name in asked.names] or [*FAULTS, *TESTED]
    print("| defect | settings, or test | folder | found | seconds |\n|---|---|---|---|---|", flush=True)
    answers = []
    for fault, (answer, seconds) in zip(faults, answered(faults, asked.workers, verbose=asked.verbose), strict=True):
        answers.append(answer)
        named = fault.test or MOVED.get(fault.name, "")
        print(f"| {fault.name} | {named} | {fault.module} | {answer} | {seconds:.1f} |", flush=True)
    found = answers.count("yes")
    print(f"\n{found} of {len(faults)} defects were found, each with its settings or folder or by its test.")
    if asked.write:
        put(asked.write, "\n".join(sums(zip(faults, answers, strict=True))), "planted")
    return 0 if found == len(faults) else 1


def sums(answered: Iterable[tuple[Fault, str]]) -> Iterator[str]:
    """Count what was found, by the folder of the product that a defect was planted in."""
    columns = ("planted", "found by `verify`", "moved by a layout", "its settings named", "moved by none",
               "its folder named", "found by a test")  # fmt: skip
    counts = {what: Counter[str]() for what in columns}
    for fault, answer in answered:
        by_verify = not fault.test and (answer == "yes" or answer.startswith(ELSEWHERE))
        moved, right = fault.name in MOVED, answer == "yes"
        holding = (True, by_verify, by_verify and moved, by_verify and moved and right, by_verify and not moved,
                   by_verify and not moved and right, bool(fault.test) and right)  # fmt: skip
        for what, holds in zip(columns, holding, strict=True):
            counts[what][fault.module or "two places"] += holds
    yield signature("tests.helpers.faults")
    yield ""
    yield f"| defects in | {' | '.join(counts)} |"
    yield f"| --- |{' ---: |' * len(counts)}"
    for module in sorted(counts["planted"]):
        yield f"| `{module}` | {' | '.join(str(each[module]) for each in counts.values())} |"
    yield f"| all | {' | '.join(str(each.total()) for each in counts.values())} |"


if __name__ == "__main__":
    sys.exit(main())
