"""What Slurm is asked before a job is sent: whether it could ever start, and what it says of states."""

from __future__ import annotations

import os
import signal

import pytest

from rlexp.launch.slurm import queue, traces
from rlexp.launch.slurm.launcher import own_environment
from rlexp.launch.slurm.queue import Known, Partition, exceeded, seconds_of
from rlexp.launch.slurm.verdict import Verdict

PARTITIONS = [
    Partition("main", True, 7200.0, 2, 16, 16000, 8),
    Partition("main", True, 7200.0, 1, 64, 64000, 0),
    Partition("long", False, None, 4, 16, 16000, 4),
]
SMALL = {"partition": None, "nodes": 1, "tasks_per_node": 8, "cpus_per_task": 2, "gpus_per_node": 8, "mem_gb": 8.0,
         "timeout_min": 60}  # fmt: skip


@pytest.mark.parametrize(("changed", "said"), [
    ({}, None),
    ({"partition": "lng"}, "hydra.launcher.partition=lng: this cluster has no partition lng. It has long, main."),
    ({"gpus_per_node": 16}, "launch.nproc=16: no node of partition main has so many GPUs; the largest has 8."),
    ({"tasks_per_node": 32, "cpus_per_task": 1, "gpus_per_node": 16}, "launch.nproc=32 on 16 GPUs: no node of "),
    ({"partition": "long"}, "launch.nproc=8: no node of partition long has so many GPUs; the largest has 4."),
    ({"cpus_per_task": 9}, "launch.nproc × launch.rank_cpus=72: no node of partition main has so many processors"),
    ({"mem_gb": 100.0}, "launch.nproc × launch.rank_memory_gb: 102400 MB are more than a node of partition main"),
    ({"nodes": 4}, "launch.nodes=4: partition main has 3 nodes."),
    ({"timeout_min": 121}, "launch.time_limit: 7260 s are more than partition main allows (7200 s)."),
    ({"partition": "long", "gpus_per_node": None, "timeout_min": 99999}, None),
])  # fmt: skip
def test_a_job_that_could_never_start_is_refused(changed: dict, said: str | None) -> None:
    refusal = exceeded(SMALL | changed, PARTITIONS)
    assert (refusal is None) if said is None else (refusal or "").startswith(said)


def test_sinfos_lines() -> None:
    assert queue.partition_in("main*|1-00:00:00|2|16+|16000|gpu:a100:4(S:0-1),gpu:8") == Partition(
        "main", True, 86400.0, 2, 16, 16000, 12
    )
    assert queue.partition_in("cpu|infinite|2|16|16000|(null)").gpus == 0
    assert queue.partition_in("a|infinite|2|16|16000|gpu:a100:no_consume:4").gpus == 4
    assert [seconds_of(text) for text in ("UNLIMITED", "3:04", "1-02:03:04")] == [None, 184.0, 93784.0]


def test_what_a_job_around_the_command_says_of_itself_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"SLURM_CONF": "/c", "SBATCH_ACCOUNT": "a", "HOME": "/h"}
    own = {
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2", "RANK": "0", "MASTER_ADDR": "x", "RLEXP_RUN_DIR": "/r",
    }  # fmt: skip
    for name, value in (kept | own).items():
        monkeypatch.setenv(name, value)
    with own_environment():
        assert {name: os.environ.get(name) for name in kept | own} == kept | dict.fromkeys(own)
    assert all(os.environ[name] == value for name, value in own.items())


def test_states_and_reasons() -> None:
    assert Known("7", "REQUEUED").alive
    assert not Known("7", "NODE_FAIL").alive
    assert Known("7", "PENDING", "PartitionTimeLimit").hopeless
    assert not Known("7", "PENDING", "PartitionTimeLimit").forbidden
    assert Known("7", "PENDING", "Job's account not permitted to use this partition (high allows physics)").forbidden
    assert Known("7", "PENDING", "InvalidQOS").forbidden
    assert Known("7", "PENDING", "JobHeldUser").hopeless
    assert not Known("7", "PENDING", "JobHeldUser").forbidden
    assert not Known("7", "PENDING", "Resources").hopeless
    assert not Known("7", "PENDING", "AssociationJobLimit").forbidden  # a place becomes free
    assert Known("7", "PENDING", "launch failed requeued held").hopeless
    assert signal.SIGXCPU in traces.GOES_ON
    assert Verdict("x", "y", 0).requeue == ""
