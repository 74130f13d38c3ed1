"""Bring up a real Slurm on one Debian machine, as root, and take it down again without a trace.

    python -m tests.helpers.slurm.lab up --nodes 2 --cpus 16 --gpus 8     # prints the line that lets a shell talk to it
    python -m tests.helpers.slurm.lab status
    python -m tests.helpers.slurm.lab down

Missing packages are installed, and stay. Everything else is in one folder and is removed with it: munge's key, the
accounting database, and the files of the controller and the nodes. Every node is its own slurmd on this machine. Its
CPUs are only declared, and its GPUs are empty device files. A lab has its own ports and sockets, so it can run beside
other labs and an installed Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.slurm.machine import (
    HOSTS,
    Unable,
    above,
    below,
    environment,
    free_ports,
    has_open,
    hosts_file,
    install,
    last_line,
    make_device,
    one_at_a_time,
    processes,
    refuse_unless_possible,
    wait_until,
)
from tests.helpers.slurm.shape import Shape, slurm_conf, slurmdbd_conf

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ACCOUNTING = ("slurmdbd", "mariadb-server")
MARK = "RLEXP_SLURM_LAB"  # in the environment of every daemon, and at the end of every line in /etc/hosts
STARTING, ENDING = 120.0, 60.0  # seconds in which a daemon must start, or end
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


class Broken(RuntimeError):
    """A lab that should come up and does not."""


class Lab:
    def __init__(self, folder: Path, shape: Shape | None = None) -> None:
        self.folder = folder.absolute()
        self.shape = shape or Shape()
        self.port = 0  # of the controller; the ports of the nodes and then of accounting follow
        self.conf = self.folder / "etc" / "slurm.conf"
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = json.loads((self.folder / "lab.json").read_text(encoding="utf-8"))
            self.port, self.shape = known["port"], shape or Shape(**known["shape"])

    # ---- up ----

    def up(self) -> None:
        """Bring the lab up. One that is up in this shape is kept, a broken one is made anew."""
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
        """Make the nodes' names resolve, since ranks meet at the name of their first node."""
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
        self.conf.write_text(slurm_conf(self.shape, self.folder, self.port), encoding="utf-8")
        (etc / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n", encoding="utf-8"
        )  # none is used; v2 may be refused
        gpus = f"Name=gpu File={self.folder}/gpus/nvidia[0-{self.shape.gpus - 1}]"
        nodes = "".join(f"NodeName={node} {gpus}\n" for node in self.shape.node_names) if self.shape.gpus else ""
        (etc / "gres.conf").write_text(nodes, encoding="utf-8")
        facts = {"port": self.port, "shape": dataclasses.asdict(self.shape)}
        (self.folder / "lab.json").write_text(json.dumps(facts), encoding="utf-8")

    def _account(self) -> None:
        """Start the accounting database and its daemon."""
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
        conf.write_text(slurmdbd_conf(self.shape, self.folder, self.port), encoding="utf-8")
        conf.chmod(0o600)  # slurmdbd refuses it otherwise
        self.start("slurmdbd")
        self._until(lambda: self._try("sacctmgr", "--noheader", "list", "cluster"), "slurmdbd")
        self._do("sacctmgr", "--immediate", "add", "cluster", "lab")

    # ---- its daemons ----

    def start(self, daemon: str) -> None:
        """Start `slurmctld` or `slurmdbd`."""
        self._start(daemon)

    def stop(self, daemon: str) -> None:
        """Stop a daemon with SIGTERM, so that its state is on disk. A killed one may forget that a job had begun."""
        if pid := self._pid(daemon):
            os.kill(pid, signal.SIGTERM)
            if not wait_until(lambda: self._pid(daemon) is None, ENDING):
                raise Broken(f"{daemon} does not end. {self._last_words()}")

    def is_running(self, node: str) -> bool:
        return self._pid(f"slurmd.{node}") is not None

    def start_node(self, node: str) -> None:
        """Start a new node, or one that was lost."""
        self._start("slurmd", "-N", node)

    def stop_slurmd(self, node: str) -> None:
        """Stop slurmd only. The node's jobs run on."""
        self._end([pid for pid in [self._pid(f"slurmd.{node}")] if pid])

    def lose_node(self, node: str) -> None:
        """Kill everything on a node, as a power failure does: slurmd, its step daemons, then the jobs' processes."""
        log = self.folder / "log" / f"slurmd.{node}.log"
        self.stop_slurmd(node)

        def alive() -> list[int]:
            table = processes()
            stepds = [pid for pid, process in table.items() if process.name == "slurmstepd" and has_open(pid, log)]
            named = [pid for pid in table if self._of_job(pid) and environment(pid).get("SLURMD_NODENAME") == node]
            return [*stepds, *below(table, stepds), *named]

        self._end_all(alive, f"{node} is lost, but")

    def _start(self, *command: str) -> None:
        """Start a daemon that goes into the background by itself."""
        answer = self._run(command)
        if answer.returncode:
            raise Broken(f"{' '.join(command[:3])}: {last_line(answer.stderr or answer.stdout)} {self._last_words()}")

    def _pid(self, name: str) -> int | None:
        """Return a daemon's process id if it lives. Another process may have the number by now; that is not it."""
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "run" / f"{name}.pid").read_text())
            if environment(pid).get(MARK) == str(self.folder):
                return pid
        return None

    def _until(self, happens: Callable[[], bool], what: str) -> None:
        if not wait_until(happens, STARTING):
            raise Broken(f"{what} gives no answer within {STARTING:g} s. {self._last_words()}")

    def _last_words(self) -> str:
        """Return the last line of each log, to find out why something failed."""
        logs = sorted((self.folder / "log").glob("*.log"))
        lines = ((log.name, last_line(log.read_text(encoding="utf-8", errors="replace"))) for log in logs)
        return "; ".join(f"{name}: {line}" for name, line in lines if line)

    # ---- asking it ----

    def env(self) -> dict[str, str]:
        """Return the environment in which a process talks to this Slurm."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """Return the output of a Slurm command."""
        answer = self._run(command, timeout)
        if answer.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {answer.returncode}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def states(self) -> dict[str, str]:
        """Return each node's state: idle, mixed, down, …; with a `*` if it does not answer."""
        answer = self._run(("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"), 10.0)
        return dict(line.split() for line in answer.stdout.splitlines())

    def wait_idle(self, within: float = 60.0) -> bool:
        """Wait until every node is up and idle."""
        return wait_until(lambda: [*self.states().values()] == ["idle"] * self.shape.nodes, within, every=0.1)

    def cancel_all(self) -> None:
        """Clear the queue and wait until every node is idle, for the next test."""
        self.run("scancel", "--full", "--user=root")
        if not wait_until(lambda: not self.run("squeue", "--noheader"), 60.0, every=0.2) or not self.wait_idle():
            raise RuntimeError(f"jobs do not end: {self.run('squeue')} {self.states()}")

    def _answers(self) -> bool:
        """Whether the controller answers and all nodes are up, busy or idle."""
        states = self.states() if self._pid("slurmctld") else {}
        return bool(states) and all(not state.startswith(("down", "unk")) for state in states.values())

    def _run(self, command: Sequence[str], timeout: float = STARTING) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "MUNGE"))}
        clean |= {"PATH": f"{os.environ.get('PATH', '')}:{SBIN}", MARK: str(self.folder), **self.env()}
        clean["MYSQL_UNIX_PORT"] = str(self.folder / "run" / "sql")
        # Output goes to files: a daemon would hold a pipe open, and this call would wait for the daemon's end.
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
        """Remove all processes, lines in /etc/hosts and files. Anything that cannot be removed is an error."""
        controller = self._pid("slurmctld")
        self._end([controller] if controller else [])  # first, so that it starts nothing again
        self._end_all(self.processes, f"{self.folder}: is down, but")
        with hosts_file() as lines:
            lines[:] = [line for line in lines if not self._names(line)]
        shutil.rmtree(self.folder, ignore_errors=True)
        if left := self.left():
            raise RuntimeError(f"a lab is down and has left {', '.join(left)}")

    def left(self) -> list[str]:
        """Return everything of this lab that is on the machine."""
        table = processes()
        left = [f"process {pid} ({table[pid].name})" for pid in self.processes() if pid in table]
        left += [f"{HOSTS}: {line}" for line in HOSTS.read_text(encoding="utf-8").splitlines() if self._names(line)]
        return left + ([str(self.folder)] if self.folder.exists() else [])

    def processes(self) -> list[int]:
        """Return the lab's daemons and all processes of its jobs, without this process and those above it."""
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
        """End processes until none is left, since they may start others before they end."""

        def none_left() -> bool:
            left = find()
            self._end(left)
            return not left

        if not wait_until(none_left, ENDING):
            raise RuntimeError(f"{what} these processes do not end: {find()}")


# ---- from the shell ----


def take_down_after(lab: Lab, pid: int) -> None:
    """Wait until a process has ended in any way, then take the lab down."""
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(pid)
        while lab.folder.exists() and not select.select([ended], [], [], 0.5)[0]:
            pass
    if lab.folder.exists():
        lab.down()


def guard(lab: Lab) -> None:
    """Start a process of the lab that takes the lab down when this process is killed."""
    command = ["setsid", "--fork", sys.executable, "-P", "-m", "tests.helpers.slurm.lab", "guard",
               f"--folder={lab.folder}", f"--pid={os.getpid()}"]  # fmt: skip
    env = os.environ | {MARK: str(lab.folder), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=True)  # fmt: skip


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / "rlexp-slurm"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "down", "status", "guard"])
    parser.add_argument("--folder", type=Path, default=default_folder(), help="the lab's folder (%(default)s)")
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
