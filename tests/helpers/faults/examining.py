"""Examine defects one by one, in processes that work side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rlexp.base.errors import UserError
from rlexp.verify.verdict import Failure
from rlexp.verify.verification import Progress
from tests.helpers.faults import ALL_FAULTS
from tests.helpers.faults.base import Fault
from tests.helpers.faults.moved import MOVED
from tests.helpers.faults.tested import TESTED
from tests.helpers.faults.verified import quiet, verify_planted
from tests.helpers.planted import tried

KNOWN = ALL_FAULTS | {fault.name: fault for fault in TESTED}
ELSEWHERE = "no: at step "  # how the answer begins if a defect is found, and another place is named


def examined(fault: Fault, say: Progress) -> str:
    """Return "yes" if the defect is found where it is, and otherwise what came of it."""
    if fault.test:
        return tried(fault)
    try:
        verdict, reached = verify_planted(fault, say=say)
    except UserError as error:
        return f"no: raised {str(error).splitlines()[0]}"
    failure = verdict.failure
    if not reached:
        return "no: not reached"
    if failure is None:
        return "no"
    if not is_named(fault, failure) or fault.step not in (None, failure.step):
        named = "+".join(each["name"] for each in failure.settings) or failure.module
        return f"{ELSEWHERE}{failure.step}, {failure.stage}, {named}: {failure.quantity}, {failure.got}"
    return "yes"


def is_named(fault: Fault, failure: Failure, *, searched: bool = True) -> bool:
    """Whether a failure names the settings that make a defect; or, where no layout moves it, its folder and none."""
    settings = "+".join(each["name"] for each in failure.settings)
    if not searched:
        return fault.name in MOVED or failure.module == fault.module
    return settings == MOVED[fault.name] if fault.name in MOVED else failure.module == fault.module


def timed(name: str, verbose: bool) -> tuple[str, float]:
    began = time.monotonic()
    say: Progress = (lambda line: print(line, file=sys.stderr, flush=True)) if verbose else quiet
    return examined(KNOWN[name], say), time.monotonic() - began


def answered(faults: Sequence[Fault], workers: int, *, verbose: bool) -> Iterator[tuple[str, float]]:
    """Yield each defect's answer in their order. Each worker is a process of its own."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(timed, [fault.name for fault in faults], [verbose] * len(faults))
