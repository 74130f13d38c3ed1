"""`python -m rlexp.launch.slurm.ended CODE`, when the ranks of a job are gone: what became of the run, written into
its run.json, and whether the job is to be queued again. Prints `requeue`, or nothing; exits as the job should.

It runs in the job's own batch script, so that a sweep needs no launcher that lives as long as its jobs.
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

from rlexp.checkpoint.folder import latest_first, step_of
from rlexp.launch import folder, reports, whereabouts
from rlexp.launch.slurm import traces
from rlexp.launch.slurm.meeting import job_id, run_dir, start_of_job
from rlexp.launch.slurm.queue import Silent, ask
from rlexp.launch.slurm.verdict import Facts, Verdict, ambiguous, judge, silent_ranks

ANSWER = 15.0  # seconds for a node to start a process, or for Slurm to say since when it is up
SAME = 10.0  # seconds that clocks may differ, or a rank may say nothing, before a node's new start
STARTED = re.compile(r"\bSlurmdStartTime=(\S+)")
# Of the job, and more than a process needs that only says that its node is there.
REQUESTS = {"SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_NODE", "SLURM_GPUS",
            "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS",
            "SLURM_NPROCS", "SLURM_KILL_BAD_EXIT", "SLURM_DISTRIBUTION"}  # fmt: skip


def gather(code: int, where: Path, retries: int, log: str, srun: str | None = None, torchrun: bool = False) -> Facts:
    run = folder.read(where)
    log = log.replace("%j", job_id() or "")
    text = traces.text_of(srun or log.replace("%t", "0"))
    went, newest = traces.gone(text), latest_first(where)
    if torchrun:
        nodes = range(int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
        went = traces.gone_under_torchrun([traces.text_of(log.replace("%t", str(node))) for node in nodes], text)
        code = min(code, 1)  # how the one that srun ended last was ended
    killed = [task.rank for task in went if task.how == "Killed" and task.rank is not None]
    begun = run.get("start") == start_of_job()  # else it is an earlier start's word
    return Facts(
        code=code,
        status=run.get("status") if begun or (code == 0 and run.get("status") == "finished") else None,
        reason=run.get("reason") if begun else None,
        reports=reports.read(where, start_of_job()),
        gone=went,
        out_of_memory=traces.out_of_memory(text),
        world_size=max(int(os.environ.get("SLURM_NTASKS", "1")), run.get("sizes", {}).get("world_size", 1)),
        step=step_of(newest[0]) if newest else 0,
        requeues=[each for each in run.get("requeues", []) if each["job"] == os.environ.get("SLURM_JOB_ID")],
        retries=retries,
        run_dir=where,
        log=log,
        node_failed=traces.node_failed(text),
        node_silent=traces.node_silent(text),
        over_limit=[rank for rank in killed if traces.over_limit(log.replace("%t", str(rank)))],
    )


def all_nodes_answer() -> bool:
    """Whether each can still start a process of this job."""
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
    """Whether one was started anew while this job had it, and a silent rank was not seen since: lost, and back before
    anybody missed it. A slurmd that is only replaced leaves the ranks alone, and they go on."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        began = _moment(ask("squeue", "--noheader", f"--jobs={job_id()}", "--format=%S", patience=ANSWER))
        since = STARTED.findall(ask("scontrol", "--oneliner", "show", "node", nodes, patience=ANSWER))
    except Silent:
        return False
    return began is not None and any((_moment(each) or 0.0) > max(began, last_seen - SAME) for each in since)


def _moment(text: str) -> float | None:
    """Of a time as Slurm writes it in UTC; None of N/A, Unknown or None."""
    try:
        return datetime.fromisoformat(f"{text.strip()}+00:00").timestamp()
    except ValueError:
        return None


def judge_and_record(facts: Facts, where: Path) -> Verdict:
    """Judge the job and write the verdict into its run's folder, also if the run had not begun."""
    if ambiguous(facts):
        silent = silent_ranks(facts)
        last_seen = max((line["at"] for line in whereabouts.read(where) if line["rank"] in silent), default=0.0)
        facts = replace(facts, nodes_answer=all_nodes_answer() and not a_node_came_back(last_seen))
    verdict = judge(facts)
    told: dict[str, Any] = {"status": verdict.status, "reason": verdict.reason}
    if verdict.requeue:
        again = folder.requeue(os.environ.get("SLURM_JOB_ID"), verdict.requeue, facts.step)
        told["requeues"] = [*folder.read(where).get("requeues", []), again]
    reports.write_verdict(where, job_id(), told)
    if is_ours(where):
        folder.record_end(where, **told)
    return verdict


def is_ours(where: Path) -> bool:
    """A job that was refused a folder, since another's run is in it or lives there, leaves that run as it is; and so
    does a start of the run's own job that found it finished."""
    run = folder.read(where)
    if run.get("status") == "finished" and run.get("start") != start_of_job():
        return False
    return run.get("job_id") == job_id() or (run.get("status") != "finished" and not folder.in_use(where))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlexp.launch.slurm.ended", description=__doc__)
    parser.add_argument("code", type=int, help="srun's exit code")
    parser.add_argument("--run-dir", type=Path, default=run_dir(), help="the run's folder; default: RLEXP_RUN_DIR")
    parser.add_argument("--retries", type=int, default=0, help="starts after a rank was killed from outside")
    parser.add_argument("--log", default="", help="where a rank's errors stand: %%j is the job, %%t the rank")
    parser.add_argument("--srun", help="where srun's own words stand; default: in rank 0's log")
    parser.add_argument("--torchrun", action="store_true", help="srun's tasks are torchruns, and %%t is theirs")
    given = parser.parse_args(argv)
    if given.run_dir is None:
        parser.error("--run-dir is not given, and RLEXP_RUN_DIR is not set")
    facts = gather(given.code, given.run_dir, given.retries, given.log, srun=given.srun, torchrun=given.torchrun)
    verdict = judge_and_record(facts, given.run_dir)
    sys.stderr.write(f"rlexp: {verdict.status}: {verdict.reason}\n")
    if verdict.requeue:
        sys.stdout.write("requeue\n")
    return verdict.code


if __name__ == "__main__":
    sys.exit(main())
