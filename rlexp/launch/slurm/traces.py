"""Traces of ranks that could not report: what srun, torchrun and Slurm's daemons wrote about them in the logs."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlexp.launch.stops import TIME_IS_UP, name_of

GOES_ON = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, TIME_IS_UP}  # signals after which a job is queued again
EXITED_1 = "Exited with exit code 1"
LOOK = 2**16  # bytes read from the end of a log

_SRUN = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$")
_EARLY = re.compile(r"^srun: StepId=\S+ tasks? ([\d,-]+): exited")
_BEGINS = re.compile(r"^rlexp: start (\d+) of job ", re.MULTILINE)
# How torchrun reports a rank that failed.
_TORCHRUN = re.compile(r"^  time +: (\S+)\n.*\n  rank +: (\d+) \(.*\)\n  exitcode +: (-?\d+) ", re.MULTILINE)
_ERROR = re.compile(r"^[\w.]+(Error|Exception)\b")  # the last line of a traceback
_SLURMS = re.compile(r"^(srun|slurmstepd|rlexp): ")
# A node was lost, lost its step, or could start nothing.
NODE_FAILED = re.compile(
    r"^srun: error: (Node failure on|Task launch for .* failed on node|Cannot communicate with node|"
    r"Aborting, (io error and missing step|step missing and io error) on node|"
    r"Aborting, can not test connection to node) ",
    re.MULTILINE,
)
# srun lost the daemon that started the ranks on a node; its node may be lost with it, or not.
NODE_SILENT = re.compile(r"^srun: error: (\w+: )?aborting, io error with slurmstepd on node ", re.MULTILINE)
OUT_OF_MEMORY = re.compile(r"oom[-_ ]kill", re.IGNORECASE)  # the kernel killed a rank
_LIMIT = re.compile(r"^slurmstepd\S*: error: StepId=\S+ exceeded memory limit", re.MULTILINE)


@dataclass(frozen=True)
class Gone:
    """How a rank ended, as srun or its torchrun saw it."""

    rank: int | None  # None for a torchrun itself: srun does not know its ranks
    node: str
    how: str  # Killed, Terminated, Exited with exit code 3, …
    early: bool = False  # it exited with 0 before the others
    task: int | None = None  # srun's number of the torchrun, whose log its ranks share

    @property
    def by_stop(self) -> bool:
        """Whether the rank ended as ranks do that were asked to stop."""
        codes = {f"Exited with exit code {128 + signum}" for signum in GOES_ON | {signal.SIGINT}}
        return self.how in codes | {"Terminated", "User defined signal 1", "User defined signal 2"}


def gone(text: str) -> list[Gone]:
    """Read from srun's log how tasks ended since the job's last start."""
    tasks = []
    for line in text[_last_start(text) :].splitlines():
        if match := _SRUN.match(line):
            tasks += [Gone(rank, match[1], match[3].strip()) for rank in numbers(match[2])]
        elif match := _EARLY.match(line):
            tasks += [Gone(rank, "", "exited", early=True) for rank in numbers(match[1])]
    return tasks


def gone_under_torchrun(logs: Sequence[str], text: str) -> list[Gone]:
    """Read from each torchrun's log how its ranks ended since the job's last start, in the order in which they ended.
    srun sees only the torchruns, which exit with 1 whatever their ranks did. Its own log, `text`, counts only where no
    torchrun wrote of a rank."""
    timed = [(at, Gone(int(rank), "", _how(int(code)), task=task)) for task, log in enumerate(logs)
            for at, rank, code in _TORCHRUN.findall(log[_last_start(log) :])]  # fmt: skip
    ranks = [each for _, each in sorted(timed, key=lambda each: each[0])]
    return ranks or [replace(each, rank=None, task=each.rank) for each in gone(text) if each.how != EXITED_1]


def _last_start(log: str) -> int:
    begins = [line.start() for line in _BEGINS.finditer(log)]
    return begins[-1] if begins else 0


def _how(code: int) -> str:
    """Describe an exit code in srun's words."""
    named = {-signal.SIGKILL: "Killed", -signal.SIGTERM: "Terminated"}
    return f"Exited with exit code {code}" if code >= 0 else named.get(code, name_of(-code))


def numbers(text: str) -> list[int]:
    """Read a list of numbers as Slurm writes it: `0-2,5`."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def last_error(log: str) -> str:
    """Return the last line that a rank wrote, if it is an error. A rank may fail before it can report."""
    own = [line for line in tail(log).splitlines() if line.strip() and not _SLURMS.match(line)]
    return own[-1] if own and _ERROR.match(own[-1]) else ""


def tail(log: str) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - LOOK))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def text_of(log: str) -> str:
    try:
        return Path(log).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def over_limit(log: str) -> bool:
    """Whether Slurm killed this rank's task because the job used too much memory on its node."""
    return bool(_LIMIT.search(tail(log)))


def shows(text: str, what: re.Pattern[str]) -> bool:
    """Whether srun's log shows it in the job's last start."""
    return bool(what.search(text[_last_start(text) :]))
