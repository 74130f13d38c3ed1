"""A rank that fails ends its job, and only its job, soon and with a nonzero code; the ledger names its error and its
log.

Many faults are planted in the jobs of one sweep, which also has healthy jobs. Each test checks one job.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlexp.launch import rank_reports
from tests.helpers.runs import steps_of
from tests.helpers.slurm.faults import STEPS, Fault, Part, Seen, run_parts
from tests.helpers.slurm.lab import Lab
from tests.helpers.slurm.shape import Shape
from tests.helpers.slurm.table import order, write_row
from tests.slurm.conftest import brought_up

SOON = 60.0  # seconds from the fault until the job has ended in Slurm, and until the launcher has printed it
WAITS = 20.0  # seconds that ranks wait for one that hangs; long enough for a busy machine to start them
PURPOSE = r"ZeroDivisionError: on purpose"
KILLED = r"rank {rank} failed: the process was killed by SIGKILL on node faulty\d"
CODE = r"rank {rank} failed: the process exited with exit code {code} on node faulty\d"
ZERO = r"rank {rank} failed: the process exited with code 0 before the others had ended"
QUIT = r"rank {rank} failed: Traceback[\s\S]*SystemExit: {code}"
MEMORY = r"rank {rank} ran out of memory .* DefaultCPUAllocator: can't allocate memory"
EATEN = r"rank {rank} failed: .*memory"
HUNG = (
    r"rank {rank} did not come to a collective that the others had begun, within launch.timeout_seconds\. Rank {rank} "
    r"was last seen (after step 2|in step 3)"
)
MEETING = rf"rank {{rank}} did not join the rendezvous within launch.timeout_seconds={WAITS:g}"


def fault(rank: int, where: str, how: str) -> Fault:
    """Return a fault with its expected reason: the rank's own error, or how it ended if it could not report."""
    code = re.sub(r"\D", "", how)
    early = where in ("import", "load")
    told = {"raise": r"rank {rank} failed: [\s\S]*" + PURPOSE, "kill": KILLED, "memory": MEMORY, "eat": EATEN,
            "stop": HUNG, "hang": HUNG, "loop": HUNG}.get(how)  # fmt: skip
    if told is None:
        told = QUIT if how.startswith("quit") and not early else ZERO if code == "0" else CODE
    if how == "stop" and where == "meet":
        told = MEETING
    # A rank whose state cannot be written trains on. A rank that has done all its work may exit with 0.
    finishes = (re.sub(r"\d", "", where), how) in {("save", "raise"), ("end", "exit0")}
    return Fault(rank, where, how, told.format(rank=rank, code=code), finishes)


TWO_NODES = ("parallel=ring2", "launch.nodes=2", "launch.nproc=1")
FOUR_RANKS = ("parallel=ring4", "launch.nodes=2", "launch.nproc=2")
ONE_NODE = ("parallel=ring2", "launch.nproc=2", f"launch.timeout_seconds={WAITS:g}")

QUICK = (
    Part("two-nodes", TWO_NODES, (
        None, fault(1, "load", "raise"), fault(1, "step3", "quit0"), fault(1, "step3", "memory"),
        fault(0, "save", "kill"), fault(1, "end", "raise"),
    )),
    Part("two-nodes-that-wait", (*TWO_NODES, f"launch.timeout_seconds={WAITS:g}"), (
        fault(1, "step3", "stop"), fault(1, "collective3", "hang"), fault(0, "collective3", "stop"),
    )),
    Part("one-node", ONE_NODE, (
        fault(1, "step3", "stop"), None, None, fault(1, "collective3", "hang"), fault(1, "step3", "raise"),
        fault(1, "step3", "exit3"), fault(0, "step3", "kill"),
    )),
)  # fmt: skip
REST = {
    "import": ("kill",), "load": ("exit0", "exit3", "quit0", "kill"),
    "meet": ("raise", "exit0", "exit3", "quit0", "quit3", "kill"),
    "step3": ("raise", "exit0", "exit3", "quit3", "kill", "eat"), "forward3": ("raise", "kill", "memory"),
    "backward3": ("raise", "exit0", "kill", "memory"), "save": ("raise", "exit0", "exit3"),
    "end": ("exit0", "exit3", "quit0", "kill"),
}  # fmt: skip
PROVED = (
    Part("two-nodes", TWO_NODES, (None, *(fault(1, where, how) for where in REST for how in REST[where]), None)),
    Part("four-ranks", FOUR_RANKS, (
        fault(2, "meet", "raise"), fault(2, "step3", "exit0"), fault(0, "step3", "kill"), fault(3, "step3", "kill"),
        fault(3, "save", "exit3"), None,
    )),
    Part("one-node", ONE_NODE, (
        fault(1, "step3", "hang"), fault(0, "step3", "loop"), fault(0, "backward3", "stop"), fault(1, "meet", "stop"),
        None,
    )),
)  # fmt: skip


@pytest.fixture(scope="module")
def faulty_lab() -> Iterator[Lab]:
    """A lab that enforces memory limits, and does not take a node for lost because the machine is busy."""
    with brought_up(Shape(name="faulty", enforce_memory=True, lost_after=120, patience=30)) as lab:
        yield lab


@pytest.fixture(scope="module")
def quick(faulty_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    return run_parts(faulty_lab, tmp_path_factory.mktemp("faults"), QUICK, 600)


@pytest.fixture(scope="module")
def proved(faulty_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    return run_parts(faulty_lab, tmp_path_factory.mktemp("faults"), PROVED, 2400)


def jobs_of(parts: tuple[Part, ...]) -> list[Any]:
    """Return a test parameter for each job, named by its fault."""
    return [
        pytest.param(part.name, number, id=f"{part.name}: {each.name if each else f'healthy {number}'}")
        for part in parts
        for number, each in enumerate(part.faults)
    ]


@pytest.mark.table
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("part", "number"), jobs_of(QUICK))
def test_a_fault(quick: dict[str, list[Seen]], part: str, number: int) -> None:
    held_to_account(quick[part], number, part)


@pytest.mark.prove
@pytest.mark.table
@pytest.mark.timeout(2700)
@pytest.mark.parametrize(("part", "number"), jobs_of(PROVED))
def test_every_other_fault(proved: dict[str, list[Seen]], part: str, number: int) -> None:
    held_to_account(proved[part], number, part)


def held_to_account(part: list[Seen], number: int, name: str) -> None:
    seen = part[number]
    if seen.fault is None or seen.fault.finishes:
        assert (seen.status, seen.slurm.state, seen.slurm.code) == ("finished", "COMPLETED", "0:0"), seen
        assert steps_of(seen.run_dir) == [*range(1, STEPS + 1)]
    else:
        has_failed(seen, seen.fault, number)
    if seen.fault is not None:
        assert seen.at is not None, f"never came to {seen.fault.name}: {seen}"
        assert order({"where": seen.fault.where, "how": seen.fault.how, "shape": name})  # the table has words for it
        others = [each.status for each in part if each.fault is None]
        write_row(f"{name} {seen.fault.name}", where=seen.fault.where, how=seen.fault.how, shape=name,
                  ended=seen.ended, told=seen.told, code=seen.slurm.code, state=seen.slurm.state,
                  reason=seen.reason, status=seen.status, others=others)  # fmt: skip


def has_failed(seen: Seen, planted: Fault, number: int) -> None:
    assert seen.at is not None, f"never came to {planted.name}: {seen}"
    assert seen.status == "failed", seen
    assert re.search(planted.told, seen.reason), f"{seen.reason}\nis not {planted.told}"
    assert seen.slurm.state in ("FAILED", "OUT_OF_MEMORY"), seen
    assert seen.slurm.code != "0:0"
    soon = SOON + (WAITS + rank_reports.PATIENCE) * (planted.how in ("stop", "hang", "loop"))
    assert seen.ended <= soon, seen
    assert seen.told <= soon, seen
    named = rf"\b(seed=)?{number} is failed: rank {planted.rank} (failed|ran out of memory|did not (come|join))"
    assert re.search(named, seen.shown), seen.shown
    assert re.search(planted.told.partition("[")[0], seen.line), seen.line
    (log,) = re.findall(r"^Its log: (.+)$", seen.reason, re.MULTILINE)
    own = Path(log).read_text(encoding="utf-8", errors="replace")
    assert f"planted: {planted.how} by rank {planted.rank} at" in own or re.search(planted.told, own)
    if planted.how == "raise":
        assert "ZeroDivisionError: on purpose" in own


def test_jobs_of_several_ranks_shared_a_node(quick: dict[str, list[Seen]]) -> None:
    """Two jobs shared a node at the same time. The tests above show that each met only its own ranks."""
    jobs = [each.slurm for each in quick["one-node"]]
    together = [
        (one, other)
        for one, other in itertools.combinations(jobs, 2)
        if one.nodes == other.nodes and one.begun < other.ended and other.begun < one.ended
    ]
    assert together, jobs
