"""Run `verify` with a defect in every rank that it starts.

`python -m tests.helpers.planted` does it with every defect of tests/helpers/faults.py and prints a table of what was
found; `python -m tests.helpers.planted NAME ...` does it with those named. The exit code is 1 unless each is found,
with its stage and module.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlexp.base.errors import UserError
from rlexp.config.load import compose_config
from rlexp.config.schema.data import RowsDataConfig
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.verify import verification as verifying
from rlexp.verify.verification import Progress, Verification, verify
from tests.helpers.faults import ALL_FAULTS, FAULTS, Fault, faulty_rank

# Imported once, in the process that ranks are forked from, by whichever defect comes first.
SERVER = (*PRELOAD, *verifying.OURS, "deepspeed", "tests.helpers.faults")
LONGEST = 240.0  # seconds for one start of ranks
REFERENCE = verifying._expected_rank


def quiet(_line: str) -> None:
    """Progress is of no interest here."""


def verify_planted(
    fault: Fault, references: Path, *, overrides: Sequence[str] | None = None, steps: int = 2, say: Progress = quiet
) -> tuple[Verification, bool]:
    """Verify with the defect in every rank; return what came of it, and whether the defect was at work.

    `references` is a folder that keeps float64 references: the reference of a configuration is computed once.
    """
    with tempfile.TemporaryDirectory(prefix="rlexp-planted-") as folder:
        reached = Path(folder) / "reached"

        def start(target: Callable[..., Any], ranks: int, args: Sequence[Any] = (), **options: Any) -> list[Any]:
            options |= {"preload": SERVER, "timeout": LONGEST}
            if target is REFERENCE:
                return _kept(references, args, options)
            return run_ranks(faulty_rank, ranks, (fault.name, reached, target, args), **options)

        cfg = compose_config(fault.overrides if overrides is None else overrides)
        if isinstance(cfg.data, RowsDataConfig):  # tokens that are kept must have this defect, and no other run's
            cfg = replace(cfg, data=replace(cfg.data, cache=f"{folder}/cache"))
        with patch.object(verifying, "run_ranks", start):
            verdict = verify(cfg, steps, say)
        return verdict, reached.exists()


def _kept(references: Path, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Return the reference of a configuration, and put its files where they are asked for.

    It is computed without a defect: no defect reaches what the reference imports, as tests/verify/test_verify.py shows.
    """
    cfg, plan, folder = args
    if isinstance(cfg.data, RowsDataConfig):  # the reference keeps no tokens
        cfg = replace(cfg, data=replace(cfg.data, cache=None))
    key = repr((cfg, replace(plan, need=0, free=0)))  # the memory that is free says nothing about the result
    kept = references / hashlib.sha256(key.encode()).hexdigest()
    answer = kept / "answer.pickle"
    if not answer.exists():
        expected = run_ranks(REFERENCE, 1, (cfg, plan, kept), **options)
        answer.write_bytes(pickle.dumps(expected))
    shutil.copytree(kept, folder)
    found: list[Any] = pickle.loads(answer.read_bytes())
    return found


# ---- the table ----


def examined(fault: Fault, references: Path, say: Progress) -> str:
    """Return "yes" if the defect is found where it is, and otherwise what came of it."""
    try:
        verdict, reached = verify_planted(fault, references, say=say)
    except UserError as error:
        return f"no: raised {str(error).splitlines()[0]}"
    failure = verdict.failure
    if not reached:
        return "no: not reached"
    if failure is None:
        return "no"
    if (failure.stage, failure.room) != (fault.stage, fault.room) or fault.step not in (None, failure.step):
        return f"no: at step {failure.step}, {failure.stage}, {failure.room}: {failure.quantity}, {failure.got}"
    return "yes"


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.planted", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="defects of tests/helpers/faults.py; by default all of them"
    )
    parser.add_argument("--verbose", action="store_true", help="print the seconds of each start of ranks")
    asked = parser.parse_args(args)
    faults = [ALL_FAULTS[name] for name in asked.names] or FAULTS
    say: Progress = (lambda line: print(line, file=sys.stderr, flush=True)) if asked.verbose else quiet
    print("| defect | stage | room | found | seconds |\n|---|---|---|---|---|", flush=True)
    found = 0
    with tempfile.TemporaryDirectory(prefix="rlexp-references-") as references:
        for fault in faults:
            began = time.monotonic()
            answer = examined(fault, Path(references), say)
            found += answer == "yes"
            seconds = time.monotonic() - began
            print(f"| {fault.name} | {fault.stage} | {fault.room} | {answer} | {seconds:.1f} |", flush=True)
    print(f"\n{found} of {len(faults)} defects were found, each with its stage and room.")
    return 0 if found == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
