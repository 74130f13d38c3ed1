"""A real Slurm on one Debian machine, as root, from nothing, and gone again.

    python -m tests.slurm.lab up --nodes 2 --cpus 16 --gpus 8     # and says by what line a shell talks to it
    python -m tests.slurm.lab status
    python -m tests.slurm.lab down

Packages are installed where they are missing, and stay. All else lies in one folder and goes with it: munge's key, the
accounting database, what the controller and the nodes write. Every node is a slurmd of its own on this machine, its
CPUs are declared rather than there, and its GPUs are device files that read as nothing. A lab has its own ports and
sockets and lives beside others, an installed Slurm too.
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

from tests.slurm.machine import (
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
from tests.slurm.shape import Shape, slurm_conf, slurmdbd_conf

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
ACCOUNTING = ("slurmdbd", "mariadb-server")
ROOT = Path(__file__).resolve().parents[2]
MARK = "RLEXP_SLURM_LAB"  # in the environment of every daemon, and behind every line in /etc/hosts
STARTING, ENDING = 40.0, 20.0  # seconds that a daemon may take
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


class Broken(RuntimeError):
    """It could be, and does not come up."""


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
        conf.write_text(slurmdbd_conf(self.shape, self.folder, self.port), encoding="utf-8")
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
    command = ["setsid", "--fork", sys.executable, "-P", "-m", "tests.slurm.lab", "guard", f"--folder={lab.folder}",
               f"--pid={os.getpid()}"]  # fmt: skip
    env = os.environ | {MARK: str(lab.folder), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=True)  # fmt: skip


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
