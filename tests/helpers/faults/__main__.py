"""Run `verify` with every defect of this folder, each in ranks of its own, and print a table of what was found.

A defect of `tested.py` is planted into a pytest run of its test instead, which must fail, and stands in the table with
that test in the place of a stage. `python -m tests.helpers.faults NAME ...` does it with those named. The exit code is
1 unless each is found: with its stage and module, or by its test.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlexp.base.errors import UserError
from rlexp.verify.verification import Progress
from tests.helpers.faults import ALL_FAULTS, FAULTS
from tests.helpers.faults.base import Fault
from tests.helpers.faults.tested import TESTED
from tests.helpers.faults.verified import quiet, verify_planted
from tests.helpers.planted import tried


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
        return f"no: at step {failure.step}, {failure.stage}, {failure.module}: {failure.quantity}, {failure.got}"
    return "yes"


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="defects of tests/helpers/faults/; by default all of them"
    )
    parser.add_argument("--verbose", action="store_true", help="print the seconds of each start of ranks")
    asked = parser.parse_args(args)
    known = ALL_FAULTS | {fault.name: fault for fault in TESTED}
    faults = [known[name] for name in asked.names] or [*FAULTS, *TESTED]
    say: Progress = (lambda line: print(line, file=sys.stderr, flush=True)) if asked.verbose else quiet
    print("| defect | stage | module | found | seconds |\n|---|---|---|---|---|", flush=True)
    found = 0
    with tempfile.TemporaryDirectory(prefix="rlexp-references-") as references:
        for fault in faults:
            began = time.monotonic()
            answer = examined(fault, Path(references), say)
            found += answer == "yes"
            seconds = time.monotonic() - began
            print(
                f"| {fault.name} | {fault.test or fault.stage} | {fault.module} | {answer} | {seconds:.1f} |",
                flush=True,
            )
    print(f"\n{found} of {len(faults)} defects were found, each with its stage and module or by its test.")
    return 0 if found == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
