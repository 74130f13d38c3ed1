"""`python -m rlexp.launch.slurm.ended CODE` judges a job when its ranks are gone, and writes the verdict into the run's
run.json. It prints `requeue` if the job must be queued again, and exits with the code that the job should exit with.

The job's own batch script runs it, so a sweep needs no launcher that lives as long as its jobs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlexp.launch import rank_progress, rank_reports, run_folder
from rlexp.launch.slurm import traces
from rlexp.launch.slurm.meeting import job_id, run_dir, start_of_job
from rlexp.launch.slurm.queue import Silent, ask
from rlexp.launch.slurm.verdict import Facts, Verdict, ambiguous, judge, silent_ranks
from rlexp.run_files.checkpoint_folder import latest_first, step_of

ANSWER = 15.0  # seconds for a node to start a process, or for Slurm to answer
SAME = 10.0  # seconds by which a rank's last sign of life may precede its node's restart, or clocks differ
STARTED = re.compile(r"\bSlurmdStartTime=(\S+)")
# Variables of the job's own requests, removed for a process that only shows that its node answers.
REQUESTS = {"SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_NODE", "SLURM_GPUS",
            "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS",
            "SLURM_NPROCS", "SLURM_KILL_BAD_EXIT", "SLURM_DISTRIBUTION"}  # fmt: skip


def gather(code: int, where: Path, retries: int, log: str, srun: str | None = None, torchrun: bool = False) -> Facts:
    run = run_folder.read(where)
    log = log.replace("%j", job_id() or "")
    text = traces.text_of(srun or log.replace("%t", "0"))
    went, newest = traces.gone(text), latest_first(where)
    if torchrun:
        nodes = range(int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
        went = traces.gone_under_torchrun([traces.text_of(log.replace("%t", str(node))) for node in nodes], text)
        code = min(code, 1)  # srun's code is that of whichever torchrun it ended last
    killed = [task.rank for task in went if task.how == "Killed" and task.rank is not None]
    begun = run.get("start") == start_of_job()  # else an earlier start wrote run.json
    return Facts(
        code=code,
        status=run.get("status") if begun or (code == 0 and run.get("status") == "finished") else None,
        reason=run.get("reason") if begun else None,
        reports=rank_reports.read(where, start_of_job()),
        gone=went,
        out_of_memory=traces.shows(text, traces.OUT_OF_MEMORY),
        world_size=max(int(os.environ.get("SLURM_NTASKS", "1")), run.get("sizes", {}).get("world_size", 1)),
        step=step_of(newest[0]) if newest else 0,
        requeues=[each for each in run.get("requeues", []) if each["job"] == os.environ.get("SLURM_JOB_ID")],
        retries=retries,
        run_dir=where,
        log=log,
        node_failed=traces.shows(text, traces.NODE_FAILED),
        node_silent=traces.shows(text, traces.NODE_SILENT),
        over_limit=[rank for rank in killed if traces.over_limit(log.replace("%t", str(rank)))],
    )


def all_nodes_answer() -> bool:
    """Whether every node can still start a process of this job."""
    count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    options = ("--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--cpus-per-task=1",
               "--mem=0", "--gres=none", "--kill-on-bad-exit", "--quiet")  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name not in REQUESTS}
    try:
        return not subprocess.run(
            ["srun", *options, "true"], env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=ANSWER, check=False,
        ).returncode  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False


def a_node_came_back(last_seen: float) -> bool:
    """Whether a node restarted during this job, and the silent ranks were last seen before that: it was lost, and back
    before Slurm noticed. When only slurmd restarts, the ranks go on."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        began = _moment(ask("squeue", "--noheader", f"--jobs={job_id()}", "--format=%S", patience=ANSWER))
        since = STARTED.findall(ask("scontrol", "--oneliner", "show", "node", nodes, patience=ANSWER))
    except Silent:
        return False
    return began is not None and any((_moment(each) or 0.0) > max(began, last_seen - SAME) for each in since)


def _moment(text: str) -> float | None:
    """Read a time as Slurm writes it, in UTC. None for N/A, Unknown and None."""
    try:
        return datetime.fromisoformat(f"{text.strip()}+00:00").timestamp()
    except ValueError:
        return None


def judge_and_record(facts: Facts, where: Path) -> Verdict:
    """Judge the job and write the verdict into its run's folder, also if the run had not begun."""
    if ambiguous(facts):
        silent = silent_ranks(facts)
        last_seen = max((line["at"] for line in rank_progress.read(where) if line["rank"] in silent), default=0.0)
        facts = replace(facts, nodes_answer=all_nodes_answer() and not a_node_came_back(last_seen))
    verdict = judge(facts)
    record: dict[str, Any] = {"status": verdict.status, "reason": verdict.reason}
    if verdict.requeue:
        again = run_folder.requeue(os.environ.get("SLURM_JOB_ID"), verdict.requeue, facts.step)
        record["requeues"] = [*run_folder.read(where).get("requeues", []), again]
    rank_reports.write_verdict(where, job_id(), record)
    if is_ours(where):
        run_folder.record_end(where, **record)
    return verdict


def is_ours(where: Path) -> bool:
    """Whether the run in this folder is this job's. If the folder was refused to the job, it holds another job's run. A
    start that found its run finished leaves run.json as it is."""
    run = run_folder.read(where)
    if run.get("status") == "finished" and run.get("start") != start_of_job():
        return False
    return run.get("job_id") == job_id() or (run.get("status") != "finished" and not run_folder.in_use(where))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlexp.launch.slurm.ended", description=__doc__)
    parser.add_argument("code", type=int, help="srun's exit code")
    parser.add_argument("--run-dir", type=Path, default=run_dir(), help="the run's folder; default: RLEXP_RUN_DIR")
    parser.add_argument("--retries", type=int, default=0, help="restarts allowed after a rank was killed from outside")
    parser.add_argument("--log", default="", help="path of a rank's error log; %%j is the job, %%t the rank")
    parser.add_argument("--srun", help="path of srun's own log; default: rank 0's log")
    parser.add_argument("--torchrun", action="store_true", help="srun's tasks are torchruns, and %%t is their number")
    given = parser.parse_args(argv)
    if given.run_dir is None:
        parser.error("give --run-dir, or set RLEXP_RUN_DIR")
    facts = gather(given.code, given.run_dir, given.retries, given.log, srun=given.srun, torchrun=given.torchrun)
    verdict = judge_and_record(facts, given.run_dir)
    sys.stderr.write(f"rlexp: {verdict.status}: {verdict.reason}\n")
    if verdict.requeue:
        sys.stdout.write("requeue\n")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
