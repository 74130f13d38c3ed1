"""Where the ranks of a Slurm step meet: on rank 0's node, at a port that was free, said in a file that all can read.

A port that follows from the job's number is now and then another job's already.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlexp.errors import ConfigError, UserError
from rlexp.files import write_text

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL = 0.1
RUN_DIR = "RLEXP_RUN_DIR"  # of a batch script: the run's folder, which all ranks know
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def start_of_job() -> str:
    """This start of this job: a job that was requeued keeps its number."""
    return f"{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def job_id() -> str | None:
    """Slurm's name of the job that this process is part of, `12` or `12_3`."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def task() -> int | None:
    """Which of a Slurm step's this process is, or belongs to."""
    number = os.environ.get("SLURM_PROCID", "")
    return int(number) if number.isdecimal() else None


def run_dir() -> Path | None:
    """The folder that the batch script said."""
    return Path(os.environ[RUN_DIR]) if os.environ.get(RUN_DIR) else None


def meet(rank: int, world_size: int, timeout: float, interface: str | None) -> TCPStore:
    """The store through which the ranks find each other."""
    from torch.distributed import TCPStore

    interface = speak_through(interface)
    step = os.environ.get("SLURM_STEP_ID", "0")
    place = (run_dir() or Path.cwd()) / f".meeting-{start_of_job()}.{step}"
    began = time.monotonic()
    patience = timedelta(seconds=timeout)
    if rank == 0:
        host = address_of(interface) if interface else os.environ.get("SLURMD_NODENAME", socket.gethostname())
        store = TCPStore(_resolved(host), 0, world_size, True, patience, wait_for_workers=False)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, f"{host} {store.port}")
    else:
        host, port = _hear(place, timeout).split()
        store = TCPStore(_resolved(host), int(port), world_size, False, patience, wait_for_workers=False)
    store.set(f"here/{rank}", "")
    if rank == 0:
        _wait_for_all(store, world_size, began + timeout, timeout)
        place.unlink(missing_ok=True)
    return store


def speak_through(interface: str | None) -> str | None:
    """Set the network interface that gloo and NCCL take, and return it where somebody chose it. Where nobody did, gloo
    would ask a host name, that many machines share or that does not resolve: it is given the one that leads to the
    other nodes of the step."""
    gloo, nccl = INTERFACES
    if interface is not None:
        os.environ[gloo] = os.environ[nccl] = interface
    elif os.environ.get(gloo):
        return os.environ[gloo].partition(",")[0]
    elif (found := interface_towards(nodes())) is not None:
        os.environ[gloo] = found
    return interface


def nodes() -> list[str]:
    """Those of the step, which may have some of the job's only."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    class Step(SlurmJobEnvironment):
        _env = SlurmJobEnvironment._env | {"nodes": "SLURM_STEP_NODELIST"}

    return [*Step().hostnames]


def interface_towards(hosts: Sequence[str]) -> str | None:
    """The one that a packet to another of these hosts would take."""
    others = [host for host in hosts if host != os.environ.get("SLURMD_NODENAME")]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0] if others else "127.0.0.1", 9))  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        if _ipv4(name) == mine:
            return name
    return None


def address_of(interface: str) -> str:
    found = _ipv4(interface)
    if found is None:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"launch.interface={interface}: node {os.environ.get('SLURMD_NODENAME', socket.gethostname())} has no such "
            f"interface with an IPv4 address. It has {there}."
        )
    return found


def _ipv4(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise UserError(
            f"{host}: rank 0's node has a name that does not resolve here. Give the interface that the nodes share: "
            f"launch.interface=NAME (`ip address` lists them)."
        ) from None


def _hear(place: Path, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.listdir(place.parent)  # makes a network's file system look again
            return place.read_text(encoding="utf-8")
        except OSError:
            time.sleep(POLL)
    raise UserError(
        f"{place}: rank 0 did not come to the meeting within launch.timeout_seconds={timeout:g}. It failed before, or "
        f"the folder is not on a file system that all nodes share."
    )


def _wait_for_all(store: TCPStore, world_size: int, deadline: float, timeout: float) -> None:
    missing = [*range(world_size)]
    while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
        if time.monotonic() > deadline:
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise UserError(f"{names} did not come to the meeting within launch.timeout_seconds={timeout:g}.")
        time.sleep(POLL)
