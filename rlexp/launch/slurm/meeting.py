"""Let the ranks of a Slurm step meet: on rank 0's node, at a free port, written to a file that all ranks can read.

A port computed from the job's number would sometimes be in use by another job.
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

from rlexp.base.errors import ConfigError, UserError
from rlexp.base.files import write_text
from rlexp.launch.watch import listed

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL = 0.1
RUN_DIR = "RLEXP_RUN_DIR"  # variable that a batch script sets: the run's folder
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def start_of_job() -> str:
    """Name this start of this job. A requeued job keeps its number, so the restart count is part of the name."""
    return f"{os.environ.get('SLURM_JOB_ID', '0')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def job_id() -> str | None:
    """Return Slurm's name of this process's job, `12` or `12_3`."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def task() -> int | None:
    """Return the number of this process's task in its Slurm step."""
    number = os.environ.get("SLURM_PROCID", "")
    return int(number) if number.isdecimal() else None


def run_dir() -> Path | None:
    """Return the run's folder, as the batch script set it."""
    return Path(os.environ[RUN_DIR]) if os.environ.get(RUN_DIR) else None


def meet(rank: int, world_size: int, timeout: float, interface: str | None) -> TCPStore:
    """Return the store through which the ranks find each other."""
    from torch.distributed import TCPStore

    interface = speak_through(interface)
    step = os.environ.get("SLURM_STEP_ID", "0")
    place = (run_dir() or Path.cwd()) / f".meeting-{start_of_job()}.{step}"
    began = time.monotonic()
    patience = timedelta(seconds=timeout)
    if rank == 0:
        host = address_of(interface) if interface else os.environ.get("SLURMD_NODENAME", socket.gethostname())
        store = TCPStore(_resolved(host), 0, world_size, is_master=True, timeout=patience, wait_for_workers=False)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, f"{host} {store.port}")
    else:
        host, port = _hear(place, timeout).split()
        store = TCPStore(_resolved(host), int(port), world_size, timeout=patience, wait_for_workers=False)
    store.set(f"here/{rank}", "")
    if rank == 0:
        missing = [*range(world_size)]
        while missing := [each for each in missing if not store.check([f"here/{each}"])]:
            if time.monotonic() > began + timeout:
                raise UserError(
                    f"{listed(missing)} did not join the rendezvous within launch.timeout_seconds={timeout:g}."
                )
            time.sleep(POLL)
        place.unlink(missing_ok=True)
    return store


def speak_through(interface: str | None) -> str | None:
    """Set the network interface of gloo and NCCL, and return it if the user or the site chose one. Otherwise gloo gets
    the interface towards the step's other nodes: by itself it would look up the host name, which may not resolve."""
    gloo, nccl = INTERFACES
    if interface is not None:
        os.environ[gloo] = os.environ[nccl] = interface
    elif os.environ.get(gloo):
        return os.environ[gloo].partition(",")[0]
    elif (towards := interface_towards(nodes())) is not None:
        os.environ[gloo] = towards
    return interface


def nodes() -> list[str]:
    """Return the step's nodes, which may be only some of the job's."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    class SlurmStep(SlurmJobEnvironment):
        _env = SlurmJobEnvironment._env | {"nodes": "SLURM_STEP_NODELIST"}

    return [*SlurmStep().hostnames]


def interface_towards(hosts: Sequence[str]) -> str | None:
    """Return the interface that a packet to another of these hosts would take."""
    others = [host for host in hosts if host != os.environ.get("SLURMD_NODENAME")]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0] if others else "127.0.0.1", 9))  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        if _ipv4(name) == address:
            return name
    return None


def address_of(interface: str) -> str:
    address = _ipv4(interface)
    if address is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"launch.interface={interface}: node {os.environ.get('SLURMD_NODENAME', socket.gethostname())} has no such "
            f"interface with an IPv4 address. It has {names}."
        )
    return address


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
            f"{host}: this name of rank 0's node does not resolve here. Give the interface that the nodes share: "
            f"launch.interface=NAME (`ip address` lists them)."
        ) from None


def _hear(place: Path, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            os.listdir(place.parent)  # makes a network file system look again
            return place.read_text(encoding="utf-8")
        except OSError:
            time.sleep(POLL)
    raise UserError(
        f"{place}: rank 0 did not join the rendezvous within launch.timeout_seconds={timeout:g}. It failed before, or "
        f"the folder is not on a file system that all nodes share."
    )
