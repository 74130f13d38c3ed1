"""Examine defects one by one, in processes that work side by side."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rlexp.base.errors import UserError
from rlexp.verify.verification import Progress
from tests.helpers.faults import ALL_FAULTS
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
