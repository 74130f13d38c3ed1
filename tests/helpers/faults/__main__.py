"""Run `verify` with every defect of this folder, each in ranks of its own, and print a table of what was found.

A defect of `tested.py` is planted into a pytest run of its test instead, which must fail. The table names the test
where it names the stage of the others. `python -m tests.helpers.faults NAME ...` does it with those named. The exit
code is 1 unless each is found: with its stage and module, or by its test. All of them take half an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from bench.tables import put, signature
from rlexp.base.errors import UserError
from rlexp.verify.verification import Progress
from tests.helpers.faults import ALL_FAULTS, FAULTS
from tests.helpers.faults.base import Fault
from tests.helpers.faults.tested import TESTED
from tests.helpers.faults.verified import quiet, verify_planted
from tests.helpers.planted import tried

KNOWN = ALL_FAULTS | {fault.name: fault for fault in TESTED}
ELSEWHERE = "no: at step "  # how the answer begins if a defect is found, and another place is named


def examined(fault: Fault, references: Path, say: Progress) -> str:
    """Return "yes" if the defect is found where it is, and otherwise what came of it."""
    if fault.test:
        return tried(fault)
    try:
        verdict, reached = verify_planted(fault, references, say=say)
    except UserError as error:
        return f"no: raised {str(error).splitlines()[0]}"
    failure = verdict.failure
    if not reached:
        return "no: not reached"
    if failure is None:
        return "no"
    if (failure.stage, failure.module) != (fault.stage, fault.module) or fault.step not in (None, failure.step):
        return f"{ELSEWHERE}{failure.step}, {failure.stage}, {failure.module}: {failure.quantity}, {failure.got}"
    return "yes"


def timed(name: str, references: str, *, verbose: bool) -> tuple[str, float]:
    began = time.monotonic()
    say: Progress = (lambda line: print(line, file=sys.stderr, flush=True)) if verbose else quiet
    return examined(KNOWN[name], Path(references), say), time.monotonic() - began


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="defects of tests/helpers/faults/; by default all of them"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--verbose", action="store_true", help="print the seconds of each start of ranks")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the sums into this page, between its markers")
    asked = parser.parse_args(args)
    if unknown := sorted(set(asked.names) - KNOWN.keys()):
        parser.error(f"{unknown[0]}: is no defect of tests/helpers/faults/.")
    faults = [KNOWN[name] for name in asked.names] or [*FAULTS, *TESTED]
    print("| defect | stage | module | found | seconds |\n|---|---|---|---|---|", flush=True)
    answers = []
    for fault, (answer, seconds) in zip(faults, answered(faults, asked.workers, verbose=asked.verbose), strict=True):
        answers.append(answer)
        stage = fault.test or fault.stage
        print(f"| {fault.name} | {stage} | {fault.module} | {answer} | {seconds:.1f} |", flush=True)
    found = answers.count("yes")
    print(f"\n{found} of {len(faults)} defects were found, each with its stage and module or by its test.")
    if asked.write:
        put(asked.write, "\n".join(sums(zip(faults, answers, strict=True))), "planted")
    return 0 if found == len(faults) else 1


def answered(faults: Sequence[Fault], workers: int, *, verbose: bool) -> Iterator[tuple[str, float]]:
    """Yield each defect's answer in their order. Each worker is a process with references of its own."""
    with tempfile.TemporaryDirectory(prefix="rlexp-references-") as folder, ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=begin, initargs=(folder,)
    ) as pool:  # fmt: skip
        yield from pool.map(in_worker, [fault.name for fault in faults], [verbose] * len(faults))


_references = ""  # of this worker


def begin(folder: str) -> None:
    global _references
    _references = tempfile.mkdtemp(dir=folder)


def in_worker(name: str, verbose: bool) -> tuple[str, float]:
    return timed(name, _references, verbose=verbose)


def sums(answered: Iterable[tuple[Fault, str]]) -> Iterator[str]:
    """Count what was found, by the folder of the product that a defect was planted in."""
    counts = {
        what: Counter[str]() for what in ("planted", "found by `verify`", "with its stage and folder", "by a test")
    }
    for fault, answer in answered:
        by_verify = not fault.test and (answer == "yes" or answer.startswith(ELSEWHERE))
        for what, holds in zip(counts, (True, by_verify, by_verify and answer == "yes",
                                        bool(fault.test) and answer == "yes"), strict=True):  # fmt: skip
            counts[what][fault.module] += holds
    yield signature("tests.helpers.faults")
    yield ""
    yield f"| defects in | {' | '.join(counts)} |"
    yield f"| --- |{' ---: |' * len(counts)}"
    for module in sorted(counts["planted"]):
        yield f"| `{module}` | {' | '.join(str(each[module]) for each in counts.values())} |"
    yield f"| all | {' | '.join(str(each.total()) for each in counts.values())} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
