"""A real Slurm on one Debian machine, as root, from nothing, and gone again.

    python tests/slurm/lab.py up --nodes 2 --cpus 16 --gpus 8     # and says by what line a shell talks to it
    python tests/slurm/lab.py status
    python tests/slurm/lab.py down

Packages are installed where they are missing, and stay. All else lies in one folder and goes with it: munge's key, the
accounting database, what the controller and the nodes write. Every node is a slurmd of its own on this machine, its
CPUs are declared rather than there, and its GPUs are device files that read as nothing. A lab has its own ports and
sockets and lives beside others, an installed Slurm too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ACCOUNTING = ("slurmdbd", "mariadb-server")
HOSTS = Path("/etc/hosts")
MARK = "RLEXP_SLURM_LAB"  # in the environment of every daemon, and behind every line in /etc/hosts
FIRST_PORT, LAST_PORT = 18200, 30000
STARTING, ENDING = 40.0, 20.0  # seconds that a daemon may take
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


class Unable(Exception):
    """Why there can be no lab here, in one line."""


class Broken(RuntimeError):
    """It could be, and does not come up."""


@dataclass(frozen=True)
class Shape:
    """What a lab is like. Two of one shape behave alike."""

    nodes: int = 2
    cpus: int = 16  # of each node
    gpus: int = 8
    memory: int = 16000  # MB, declared, of each node
    accounting: bool = True
    grace: int = 30  # seconds between a pre-emption's signal and its end
    kill_wait: int = 5  # between SIGTERM and SIGKILL
    lost_after: int = 10  # until a node that does not answer is down, and as long as `patience` more
    patience: int = 5  # for an answer of a daemon's: with Slurm's own, 10, a lost node is noticed after half a minute
    remember: int = 600  # seconds for which the controller knows a job that has ended
    enforce_memory: bool = False  # a job that takes more memory than it asked for is killed
    name: str = "node"  # nodes are node1, node2, …

    @property
    def node_names(self) -> list[str]:
        return [f"{self.name}{number}" for number in range(1, self.nodes + 1)]


class Lab:
    def __init__(self, folder: Path, shape: Shape | None = None) -> None:
        self.folder = folder.absolute()
        self.shape = shape or Shape()
        self.port = 0  # of the controller; the nodes' follow, accounting's comes after theirs
        self.conf = self.folder / "etc" / "slurm.conf"
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = json.loads((self.folder / "lab.json").read_text(encoding="utf-8"))
            self.port, self.shape = known["port"], shape or Shape(**known["shape"])

    # ---- up ----

    def up(self) -> None:
        """From whatever is there: a lab that is up in this shape is left alone, a broken one is made anew."""
        if self._answers():
            built = Shape(**json.loads((self.folder / "lab.json").read_text(encoding="utf-8"))["shape"])
            if built != self.shape:
                raise Unable(f"{self.folder}: a lab of another shape is up there. Take it down first.")
            return
        refuse_unless_possible(self.folder)
        self.down()
        with one_at_a_time():
            self._come_up()

    def _come_up(self) -> None:
        for name in ("etc", "log", "run", "nodes", "state", "gpus", "munge", "database", "tmp"):
            (self.folder / name).mkdir(parents=True)
        try:
            install(self._packages(), self.folder / "log" / "apt.log")
            self._name_nodes()
            self._munge()
            self._configure()
            if self.shape.accounting:
                self._account()
            self.start("slurmctld")
            for node in self.shape.node_names:
                self.start_node(node)
            if not self.wait_idle(STARTING):
                raise Broken(f"the nodes are not idle within {STARTING:g} s: {self.states()}. {self._last_words()}")
        except BaseException:
            self.down()
            raise

    def _packages(self) -> list[str]:
        return [*PACKAGES, *(ACCOUNTING if self.shape.accounting else ())]

    def _name_nodes(self) -> None:
        """Ranks meet at the name of their first node, so the names lead somewhere."""
        with hosts_file() as lines:
            lines += [f"127.0.0.1 {node} # {MARK} {self.folder}" for node in self.shape.node_names]

    def _munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o400)
        folder.chmod(0o711)  # munged refuses a key or a socket that others could replace
        self._start("munged", f"--key-file={folder}/key", f"--socket={folder}/socket", f"--seed-file={folder}/seed",
                    f"--pid-file={self.folder}/run/munged.pid", f"--log-file={self.folder}/log/munged.log",
                    "--num-threads=4")  # fmt: skip

    def _configure(self) -> None:
        self.port = free_ports(self.shape.nodes + 2)
        for number in range(self.shape.gpus):
            make_device(self.folder / "gpus" / f"nvidia{number}")
        for node in self.shape.node_names:
            (self.folder / "nodes" / node).mkdir()
        etc = self.folder / "etc"
        self.conf.write_text(slurm_conf(self), encoding="utf-8")
        (etc / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n", encoding="utf-8"
        )  # none is used; v2 may be refused
        gpus = f"Name=gpu File={self.folder}/gpus/nvidia[0-{self.shape.gpus - 1}]"
        nodes = "".join(f"NodeName={node} {gpus}\n" for node in self.shape.node_names) if self.shape.gpus else ""
        (etc / "gres.conf").write_text(nodes, encoding="utf-8")
        facts = {"port": self.port, "shape": dataclasses.asdict(self.shape)}
        (self.folder / "lab.json").write_text(json.dumps(facts), encoding="utf-8")

    def _account(self) -> None:
        """The accounting database, and the daemon before it."""
        data, port = self.folder / "database", self.folder / "run" / "sql"
        plain = ["--no-defaults", "--user=root", f"--datadir={data}", f"--tmpdir={self.folder}/tmp"]
        self._do("mariadb-install-db", *plain, "--auth-root-authentication-method=socket", "--skip-test-db")
        self._start("setsid", "--fork", "mariadbd", *plain, f"--socket={port}", "--skip-networking",
                    f"--pid-file={self.folder}/run/mariadbd.pid", f"--log-error={self.folder}/log/mariadbd.log",
                    "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-lock-wait-timeout=900",
                    "--innodb-flush-log-at-trx-commit=2")  # fmt: skip
        sql = ["mariadb", "--no-defaults", f"--socket={port}", "--execute"]
        self._until(lambda: self._try(*sql, "select 1"), "mariadbd")
        self._do(*sql, "create database slurm; create user slurm@localhost identified by 'slurm'; "
                       "grant all on slurm.* to slurm@localhost")  # fmt: skip
        conf = self.folder / "etc" / "slurmdbd.conf"
        conf.write_text(slurmdbd_conf(self), encoding="utf-8")
        conf.chmod(0o600)  # slurmdbd refuses it otherwise
        self.start("slurmdbd")
        self._until(lambda: self._try("sacctmgr", "--noheader", "list", "cluster"), "slurmdbd")
        self._do("sacctmgr", "--immediate", "add", "cluster", "lab")

    # ---- its daemons ----

    def start(self, daemon: str) -> None:
        """`slurmctld` or `slurmdbd`."""
        self._start(daemon)

    def stop(self, daemon: str) -> None:
        """In good order, so that what it knows is on disk: killed, it has been seen to forget that a job had begun."""
        if pid := self._pid(daemon):
            os.kill(pid, signal.SIGTERM)
            if not wait_until(lambda: self._pid(daemon) is None, ENDING):
                raise Broken(f"{daemon} does not end. {self._last_words()}")

    def is_running(self, node: str) -> bool:
        return self._pid(f"slurmd.{node}") is not None

    def start_node(self, node: str) -> None:
        """A new node, or one that was lost and comes back."""
        self._start("slurmd", "-N", node)

    def stop_slurmd(self, node: str) -> None:
        """slurmd alone: what runs on the node runs on."""
        self._end([pid for pid in [self._pid(f"slurmd.{node}")] if pid])

    def lose_node(self, node: str) -> None:
        """As if its power had failed: slurmd, then what speaks to Slurm for its jobs, then the jobs' processes."""
        log = self.folder / "log" / f"slurmd.{node}.log"
        self.stop_slurmd(node)

        def alive() -> list[int]:
            table = processes()
            stepds = [pid for pid, process in table.items() if process.name == "slurmstepd" and has_open(pid, log)]
            named = [pid for pid in table if self._of_job(pid) and environment(pid).get("SLURMD_NODENAME") == node]
            return [*stepds, *below(table, stepds), *named]

        self._end_all(alive, f"{node} is lost, but")

    def _start(self, *command: str) -> None:
        """A daemon that goes into the background by itself."""
        answer = self._run(command)
        if answer.returncode:
            raise Broken(f"{' '.join(command[:3])}: {last_line(answer.stderr or answer.stdout)} {self._last_words()}")

    def _pid(self, name: str) -> int | None:
        """The process of a daemon, as far as it lives; a number that another process has by now is not it."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "run" / f"{name}.pid").read_text())
            if environment(pid).get(MARK) == str(self.folder):
                return pid
        return None

    def _until(self, happens: Callable[[], bool], what: str) -> None:
        if not wait_until(happens, STARTING):
            raise Broken(f"{what} gives no answer within {STARTING:g} s. {self._last_words()}")

    def _last_words(self) -> str:
        """The last line of each log that has one, for whoever must find out why."""
        logs = sorted((self.folder / "log").glob("*.log"))
        lines = ((log.name, last_line(log.read_text(encoding="utf-8", errors="replace"))) for log in logs)
        return "; ".join(f"{name}: {line}" for name, line in lines if line)

    # ---- asking it ----

    def env(self) -> dict[str, str]:
        """What a process needs to talk to this Slurm, and to no other."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """The answer of one of Slurm's commands."""
        answer = self._run(command, timeout)
        if answer.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {answer.returncode}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def states(self) -> dict[str, str]:
        """Of each node: idle, mixed, down, …; with a `*` where it does not answer."""
        answer = self._run(("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"), 10.0)
        return dict(line.split() for line in answer.stdout.splitlines())

    def wait_idle(self, within: float = 60.0) -> bool:
        """Until every node is up and has nothing to do."""
        return wait_until(lambda: [*self.states().values()] == ["idle"] * self.shape.nodes, within, every=0.1)

    def cancel_all(self) -> None:
        """For the next test: no job in the queue, every node idle."""
        self.run("scancel", "--full", "--user=root")
        if not wait_until(lambda: not self.run("squeue", "--noheader"), 60.0, every=0.2) or not self.wait_idle():
            raise RuntimeError(f"jobs do not end: {self.run('squeue')} {self.states()}")

    def _answers(self) -> bool:
        """Busy or idle, but with all its nodes."""
        states = self.states() if self._pid("slurmctld") else {}
        return bool(states) and all(not state.startswith(("down", "unk")) for state in states.values())

    def _run(self, command: Sequence[str], timeout: float = STARTING) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "MUNGE"))}
        clean |= {"PATH": f"{os.environ.get('PATH', '')}:{SBIN}", MARK: str(self.folder), **self.env()}
        clean["MYSQL_UNIX_PORT"] = str(self.folder / "run" / "sql")
        # Output goes through files: a daemon would hold a pipe open, and this would wait for its end.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            try:
                code = subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd="/",
                                      timeout=timeout, check=False).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 124
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def _try(self, *command: str) -> bool:
        return self._run(command, 5.0).returncode == 0

    def _do(self, *command: str) -> None:
        answer = self._run(command)
        if answer.returncode:
            raise Broken(f"{command[0]}: {last_line(answer.stderr or answer.stdout)}")

    # ---- down ----

    def down(self) -> None:
        """No process, no line in /etc/hosts, no file. What cannot be removed is an error."""
        controller = self._pid("slurmctld")
        self._end([controller] if controller else [])  # first, so that it starts nothing anew
        self._end_all(self.processes, f"{self.folder}: is down, but")
        with hosts_file() as lines:
            lines[:] = [line for line in lines if not self._names(line)]
        shutil.rmtree(self.folder, ignore_errors=True)
        if left := self.left():
            raise RuntimeError(f"a lab is down and has left {', '.join(left)}")

    def left(self) -> list[str]:
        """Whatever of this lab is on the machine."""
        table = processes()
        found = [f"process {pid} ({table[pid].name})" for pid in self.processes() if pid in table]
        found += [f"{HOSTS}: {line}" for line in HOSTS.read_text(encoding="utf-8").splitlines() if self._names(line)]
        return found + ([str(self.folder)] if self.folder.exists() else [])

    def processes(self) -> list[int]:
        """Its daemons, and all that jobs have started. Not this process, and not who asked for it."""
        table = processes()
        ours = [pid for pid in table if environment(pid).get(MARK) == str(self.folder) or self._of_job(pid)]
        log = self.folder / "log"
        ours += [pid for pid, process in table.items() if process.name == "slurmstepd" and has_open(pid, log)]
        spared = {os.getpid(), *above(table, os.getpid())}
        return sorted({*ours, *below(table, ours)} - spared)

    def _of_job(self, pid: int) -> bool:
        known = environment(pid)
        return known.get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in known

    def _names(self, line: str) -> bool:
        return line.endswith(f"# {MARK} {self.folder}")

    def _end(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not set(pids) & set(processes()), ENDING)

    def _end_all(self, find: Callable[[], list[int]], what: str) -> None:
        """Again and again, since what is about to be ended may have started something."""

        def none_left() -> bool:
            found = find()
            self._end(found)
            return not found

        if not wait_until(none_left, ENDING):
            raise RuntimeError(f"{what} these processes do not end: {find()}")


def slurm_conf(lab: Lab) -> str:
    """Where it has a choice, the quick one: a test waits for it."""
    shape, folder, host = lab.shape, lab.folder, socket.gethostname().partition(".")[0]
    accounting = f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={lab.port + shape.nodes + 1}
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu"""
    memory = "JobAcctGatherType=jobacct_gather/linux\nJobAcctGatherFrequency=task=1\nJobAcctGatherParams=OverMemoryKill"
    gpus = f"Gres=gpu:{shape.gpus}" if shape.gpus else ""
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={lab.port + number} Sockets=1 "
        f"CoresPerSocket={shape.cpus} ThreadsPerCore=1 RealMemory={shape.memory} {gpus} State=UNKNOWN"
        for number, node in enumerate(shape.node_names, 1)
    )
    return f"""ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={lab.port}
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
# A job in `high` puts those in `main` back into the queue, who are told so and have their grace.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=500
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={shape.grace}
PartitionName=high Default=NO PriorityTier=10 PreemptMode=OFF
"""


def slurmdbd_conf(lab: Lab) -> str:
    folder = lab.folder
    return f"""AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={socket.gethostname().partition(".")[0]}
DbdAddr=127.0.0.1
DbdPort={lab.port + lab.shape.nodes + 1}
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


# ---- the machine ----


def refuse_unless_possible(folder: Path) -> None:
    if os.geteuid() != 0:
        raise Unable("a Slurm of one's own needs root: its daemons run jobs for every user.")
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise Unable("there is no apt-get: the packages of Slurm are Debian's and Ubuntu's.")
    if len(str(folder)) > 80 or set(" %[],=#") & set(str(folder)):
        raise Unable(f"{folder}: sockets lie in it, and Slurm reads its name. It must be short and plain; set TMPDIR.")


def install(packages: Sequence[str], log: Path) -> None:
    """Those that are missing. None of their daemons is started: this machine's services are not the lab's."""
    known = subprocess.run(["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *packages],
                           capture_output=True, text=True, check=False).stdout  # fmt: skip
    missing = [package for package in packages if f"{package} installed" not in known.splitlines()]
    if not missing:
        return
    with log.open("w", encoding="utf-8") as out, no_services():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            code = subprocess.run(["apt-get", *command], stdout=out, stderr=out, env=quiet, check=False).returncode
            if code and command[0] == "install":
                said = last_line(log.read_text(encoding="utf-8"))
                raise Unable(f"apt-get cannot install {', '.join(missing)}: {said}")


@contextlib.contextmanager
def no_services() -> Iterator[None]:
    """Debian asks this file whether a package's daemon may be started."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def make_device(path: Path) -> None:
    """What stands for a GPU: a device file that reads as /dev/null does."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError as error:
        raise Unable(f"{path}: no device file can be made here, so there are no GPUs to declare ({error}).") from None


def free_ports(count: int) -> int:
    """The first of `count` ports in a row on which nobody listens, below those that are handed out by chance."""
    for first in range(FIRST_PORT, LAST_PORT, 20 + count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(contextlib.closing(socket.socket())).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise Unable(f"no {count} ports in a row are free between {FIRST_PORT} and {LAST_PORT}.")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two labs that come up together would find the same ports free."""
    with (Path(tempfile.gettempdir()) / "rlexp-slurm.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def hosts_file() -> Iterator[list[str]]:
    """The lines of /etc/hosts, to be changed. In place: in a container the file cannot be replaced."""
    with HOSTS.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read().splitlines()
        lines = list(before)
        yield lines
        if lines != before:
            file.seek(0)
            file.write("".join(f"{line}\n" for line in lines))
            file.truncate()


@dataclass(frozen=True)
class Process:
    name: str
    parent: int


def processes() -> dict[int, Process]:
    """All that live; what has ended and was not yet asked for does not."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            state, parent = after.split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = Process(before.partition("(")[2], int(parent))
    return found


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; nothing once it has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.partition("=")[::2] for line in text.split("\0") if "=" in line)
    return {}


def has_open(pid: int, path: Path) -> bool:
    """Whether a process holds this file, or a file in this folder, open."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = Path(os.readlink(link))
                if path == target or path in target.parents:
                    return True
    return False


def below(table: dict[int, Process], roots: Iterable[int]) -> list[int]:
    """The processes that these have started, and those have, and so on."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found, open_ = [], list(roots)
    while open_:
        next_ = children.get(open_.pop(), [])
        found += next_
        open_ += next_
    return found


def above(table: dict[int, Process], pid: int) -> list[int]:
    found = []
    while pid in table and table[pid].parent:
        pid = table[pid].parent
        found.append(pid)
    return found


def wait_until(happens: Callable[[], bool], within: float, *, every: float = 0.05) -> bool:
    until = time.monotonic() + within
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# ---- from the shell ----


def take_down_after(lab: Lab, pid: int) -> None:
    """Once that process has ended, however it did, the lab goes too."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        while lab.folder.exists() and not select.select([ended], [], [], 0.5)[0]:
            pass
    if lab.folder.exists():
        lab.down()


def guard(lab: Lab) -> None:
    """Have the lab taken down when this process is killed, by one that is of the lab itself."""
    command = ["setsid", "--fork", sys.executable, __file__, "guard", f"--folder={lab.folder}", f"--pid={os.getpid()}"]
    subprocess.run(command, env=os.environ | {MARK: str(lab.folder)}, cwd="/", stdin=subprocess.DEVNULL,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)  # fmt: skip


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "rlexp-slurm"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "down", "status", "guard"])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where all of it lies (%(default)s)")
    parser.add_argument("--pid", type=int, help="guard: take the lab down once this process has ended")
    for field in dataclasses.fields(Shape):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default, help="(%(default)s)")
    return parser


def main() -> int:
    given = options().parse_args()
    began = time.monotonic()
    try:
        if given.what == "up":
            shape = Shape(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Shape)})
            lab = Lab(given.folder, shape)
            lab.up()
            print(f"# up after {time.monotonic() - began:.1f} s: {lab.states()}")
            print(f"export SLURM_CONF={lab.conf}")
            return 0
        lab = Lab(given.folder)
        if given.what == "down":
            lab.down()
            print(f"down after {time.monotonic() - began:.1f} s, nothing is left but the packages "
                  f"{', '.join((*PACKAGES, *ACCOUNTING))}")  # fmt: skip
        elif given.what == "guard":
            take_down_after(lab, given.pid)
        elif lab.conf.exists():
            print(lab.run("sinfo"), lab.run("squeue"), f"export SLURM_CONF={lab.conf}", sep="\n")
        else:
            print("\n".join(lab.left()) or f"{lab.folder}: no lab is up there.")
    except (Unable, RuntimeError) as error:
        print(f"lab.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
