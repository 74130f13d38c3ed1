"""The shape of a lab, and the configuration of its daemons."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """The settings of a lab. Two labs of one shape behave alike."""

    nodes: int = 2
    cpus: int = 16  # of each node
    gpus: int = 8
    memory: int = 16000  # MB that each node declares
    accounting: bool = True
    grace: int = 30  # seconds that a pre-empted job keeps running after its signal
    kill_wait: int = 5  # between SIGTERM and SIGKILL
    lost_after: int = 10  # seconds, plus `patience`, until a node that does not answer is down
    patience: int = 5  # seconds for a daemon's answer; with Slurm's default, 10, losing a node takes half a minute
    remember: int = 600  # seconds for which the controller knows a job that has ended
    enforce_memory: bool = False  # a job that takes more memory than it asked for is killed
    name: str = "node"  # nodes are node1, node2, …

    @property
    def node_names(self) -> list[str]:
        return [f"{self.name}{number}" for number in range(1, self.nodes + 1)]


def slurm_conf(shape: Shape, folder: Path, port: int) -> str:
    """Return slurm.conf. Where Slurm has a choice, the quicker setting is taken, since tests wait for it."""
    host = socket.gethostname().partition(".")[0]
    accounting = f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port + shape.nodes + 1}
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu"""
    memory = "JobAcctGatherType=jobacct_gather/linux\nJobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill"
    gpus = f"Gres=gpu:{shape.gpus}" if shape.gpus else ""
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + number} Sockets=1 "
        f"CoresPerSocket={shape.cpus} ThreadsPerCore=1 RealMemory={shape.memory} {gpus} State=UNKNOWN"
        for number, node in enumerate(shape.node_names, 1)
    )
    return f"""ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/nodes/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
# No systemd and no cgroups; more CPUs and memory than are there.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
MpiDefault=none
MailProg=/bin/true
{memory if shape.enforce_memory else "JobAcctGatherType=jobacct_gather/none"}
{accounting if shape.accounting else "AccountingStorageType=accounting_storage/none"}
ReturnToService=2
SlurmdTimeout={shape.lost_after}
MessageTimeout={shape.patience}
KillWait={shape.kill_wait}
MinJobAge={shape.remember}
JobRequeue=1
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PriorityType=priority/basic
# A job in `high` pre-empts jobs in `main`: they get a signal, their grace, and are queued again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=500
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={shape.grace}
PartitionName=high Default=NO PriorityTier=10 PreemptMode=OFF
"""


def slurmdbd_conf(shape: Shape, folder: Path, port: int) -> str:
    return f"""AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={socket.gethostname().partition(".")[0]}
DbdAddr=127.0.0.1
DbdPort={port + shape.nodes + 1}
SlurmUser=root
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
CommunicationParameters=NoInAddrAny
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm
StorageUser=slurm
StoragePass=slurm
"""
