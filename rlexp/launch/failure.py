"""Report the error that ends this process, for whoever judges the run when all ranks are gone."""

from __future__ import annotations

import time
import traceback

from rlexp.base.errors import UserError
from rlexp.config import sizes
from rlexp.config.explain import explain
from rlexp.launch import rank_reports
from rlexp.launch.local import RankFailed
from rlexp.launch.slurm import meeting


def report_of(rank: int, error: BaseException) -> rank_reports.RankReport:
    """Return what a rank reports of the error that ends it."""
    mistake = error if isinstance(error, UserError) else None
    text = str(error) if mistake else "".join(traceback.format_exception(error))
    killed = isinstance(error, RankFailed) and error.killed  # a rank that this process started
    return rank_reports.RankReport(rank, time.time(), text, mistake, task=meeting.task(), killed=killed)


def report_here(error: BaseException) -> None:
    """Report why a process of a Slurm job ended before it was a rank, for the batch script's verdict."""
    if (known := meeting.run_dir()) is not None:
        message = explain(error)
        shown = error if message is None or isinstance(error, RankFailed) else UserError(message)
        rank_reports.write(known, meeting.start_of_job(), report_of(sizes.joined_rank() or 0, shown))
