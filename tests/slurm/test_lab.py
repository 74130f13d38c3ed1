"""The tests' Slurm is a real one, its nodes can be lost, and nothing of it is left behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import python
from tests.helpers.slurm import lab as lab_module
from tests.helpers.slurm.lab import MARK, ROOT, Lab
from tests.helpers.slurm.machine import HOSTS, Unable, environment, one_at_a_time, processes, wait_until
from tests.helpers.slurm.shape import Shape

# Writes its place and its restarts to `said`, then works for as long as `hold` exists.
RANK = 'echo "$SLURM_RESTART_COUNT $SLURMD_NODENAME $SLURM_PROCID" >> said; while [ -e hold ]; do sleep 0.1; done'


def submit(lab: Lab, folder: Path, *options: str, rank: str = RANK) -> str:
    """Submit a job of two nodes with two ranks each, which runs until `hold` is removed."""
    (folder / "hold").touch()
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit bash -c {shlex.quote(rank)}\n", encoding="utf-8")
    return lab.run("sbatch", "--parsable", f"--chdir={folder}", "--nodes=2", "--ntasks-per-node=2", "--time=5",
                   *options, str(script))  # fmt: skip


def said(folder: Path) -> list[str]:
    return sorted((folder / "said").read_text().splitlines()) if (folder / "said").exists() else []


def ranks(count: int, restarts: str = "") -> list[str]:
    """Return what the ranks of a job of two nodes write."""
    return [f"{restarts} node{1 + rank // (count // 2)} {rank}" for rank in range(count)]


def state_of(lab: Lab, job: str) -> str:
    return lab.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")


def test_a_job_of_two_nodes_with_four_ranks_each(lab: Lab, tmp_path: Path) -> None:
    say = "echo $SLURMD_NODENAME $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(wc -c < /dev/null)"
    answer = lab.run("srun", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=1", "--job-name=eight",
                     "bash", "-c", say)  # fmt: skip
    assert sorted(answer.splitlines()) == [f"node{1 + rank // 4} {rank} 0,1,2,3 0" for rank in range(8)]
    assert {socket.gethostbyname(node) for node in lab.shape.node_names} == {"127.0.0.1"}

    def known() -> list[str]:
        asked = lab.run("sacct", "--noheader", "--parsable2", "--allocations", "--name=eight",
                        "--format=State,NNodes,ExitCode,AllocTRES")  # fmt: skip
        return asked.splitlines()

    assert wait_until(lambda: len(known()) == 1 and known()[0].startswith("COMPLETED"), 30)
    assert known()[0].startswith("COMPLETED|2|0:0|")
    assert "gres/gpu=8" in known()[0]


def test_more_than_a_node_has_is_refused(lab: Lab) -> None:
    with pytest.raises(RuntimeError, match="Requested node configuration is not available"):
        lab.run("srun", "--nodes=1", "--gpus-per-node=9", "true")


@pytest.mark.prove
def test_a_lost_node_is_noticed_and_its_job_begins_again(lab: Lab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path)
    assert wait_until(lambda: said(tmp_path) == ranks(4), 30), (said(tmp_path), state_of(lab, job))
    there = [pid for pid in lab.processes() if environment(pid).get("SLURMD_NODENAME") == "node2"]
    assert len(there) >= 2
    lab.lose_node("node2")
    assert not set(there) & set(processes())
    assert lab.is_running("node1")
    assert wait_until(lambda: lab.states()["node2"].startswith("down"), 60), lab.states()
    lab.start_node("node2")
    assert wait_until(lambda: said(tmp_path) == sorted([*ranks(4), *ranks(4, "1")]), 90), state_of(lab, job)
    (tmp_path / "hold").unlink()
    assert wait_until(lambda: state_of(lab, job) == "COMPLETED", 30)


@pytest.mark.prove
def test_slurmd_alone_may_go_and_come_back(lab: Lab, tmp_path: Path) -> None:
    job = submit(lab, tmp_path)
    assert wait_until(lambda: len(said(tmp_path)) == 4, 30), state_of(lab, job)
    of_jobs = [pid for pid in lab.processes() if "SLURM_PROCID" in environment(pid)]
    before = {pid for pid, process in processes().items() if pid in of_jobs and process.name != "sleep"}
    assert len(before) >= 4
    lab.stop_slurmd("node1")
    assert not lab.is_running("node1")
    assert before <= set(processes())
    lab.start_node("node1")
    (tmp_path / "hold").unlink()
    assert wait_until(lambda: state_of(lab, job) == "COMPLETED", 60), state_of(lab, job)
    assert said(tmp_path) == ranks(4)


@pytest.mark.prove
def test_a_higher_partition_warns_every_rank(lab: Lab, tmp_path: Path) -> None:
    warned = 'trap "echo warned $SLURM_PROCID >> said; exit 1" USR2; while [ -e hold ]; do sleep 0.1; done'
    job = submit(lab, tmp_path, "--exclusive", "--signal=USR2@60", rank=f"echo here >> said; {warned}")
    assert wait_until(lambda: len(said(tmp_path)) == 4, 30), state_of(lab, job)
    lab.run("srun", "--partition=high", "--nodes=2", "--exclusive", "--time=1", "true", timeout=100)
    assert {line for line in said(tmp_path) if line.startswith("warned")} == {f"warned {rank}" for rank in range(4)}


def test_without_accounting_there_is_no_answer_of_it(lab_without_accounting: Lab) -> None:
    lab = lab_without_accounting
    assert lab.run("srun", "--time=1", "bash", "-c", "echo $SLURMD_NODENAME") == "bare1"
    with pytest.raises(RuntimeError, match="Slurm accounting storage is disabled"):
        lab.run("sacct")


def traces(folder: Path) -> list[str]:
    """Return all that names this folder: processes (command line, environment, files) and lines of /etc/hosts."""
    traces = [line for line in HOSTS.read_text(encoding="utf-8").splitlines() if str(folder) in line]
    for pid, process in processes().items():
        try:
            texts = [
                (Path(f"/proc/{pid}") / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")
            ]
            texts += [os.readlink(link) for link in [f"/proc/{pid}/cwd", *Path(f"/proc/{pid}/fd").iterdir()]]
        except OSError:
            continue
        if pid != os.getpid() and str(folder) in "\n".join(texts):
            traces.append(f"{pid} {process.name}")
    return traces


def hosts_without_labs() -> list[str]:
    """Return the lines of /etc/hosts that no lab has written, since other labs may come up and go meanwhile."""
    return [line for line in HOSTS.read_text(encoding="utf-8").splitlines() if MARK not in line]


def by_hand(*args: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "tests.helpers.slurm.lab", *args)


@pytest.fixture
def elsewhere() -> Path:
    """A folder for the test's own lab, beside the session's lab."""
    folder = Path(f"/tmp/rlexp-slurm-by-hand-{os.getpid()}")
    yield folder
    Lab(folder).down()


def test_nothing_is_left(elsewhere: Path, tmp_path: Path) -> None:
    """A lab from the shell, with a process whose environment does not tell which job it belongs to."""
    before = hosts_without_labs()
    up = by_hand("up", f"--folder={elsewhere}", "--nodes=1", "--name=hand")
    if up.returncode:
        pytest.skip(f"no Slurm here: {up.stderr}")
    assert re.fullmatch(r"# up after [\d.]+ s: {'hand1': 'idle'}\nexport SLURM_CONF=\S+\n", up.stdout)
    print(up.stdout)
    again = by_hand("up", f"--folder={elsewhere}", "--nodes=1", "--name=hand")
    assert again.returncode == 0, again.stderr
    other = by_hand("up", f"--folder={elsewhere}", "--nodes=2", "--name=hand")
    assert other.returncode == 1
    assert "a lab of another shape is up there" in other.stderr

    lab = Lab(elsewhere)
    assert lab.shape.name == "hand"
    hidden = f"env -i setsid bash -c 'echo $$ > {tmp_path}/pid; sleep 1000 & wait'"
    lab.run("sbatch", "--export=NONE", f"--chdir={tmp_path}", "--time=5", f"--wrap={hidden}")
    assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 30)
    assert "RUNNING" in lab.run("squeue", "--format=%T")
    names = " ".join(traces(elsewhere))
    for daemon in ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd", "hand1"):
        assert daemon in names
    port, hidden_pid = lab.port, int((tmp_path / "pid").read_text())
    assert environment(hidden_pid).keys() <= {"PWD", "SHLVL", "_"}
    busy = by_hand("up", f"--folder={elsewhere}", "--nodes=1", "--name=hand")
    assert busy.returncode == 0, busy.stderr
    assert hidden_pid in processes()

    with one_at_a_time():  # no other lab takes the ports that become free
        down = by_hand("down", f"--folder={elsewhere}")
        assert down.returncode == 0, down.stderr
        print(down.stdout)
        assert "nothing is left but the packages" in down.stdout
        assert traces(elsewhere) == []
        assert hidden_pid not in processes()
        assert not elsewhere.exists()
        assert hosts_without_labs() == before
        for offset in range(3):
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended linger
                free.bind(("127.0.0.1", port + offset))
    assert by_hand("down", f"--folder={elsewhere}").returncode == 0


def test_a_lab_goes_with_the_tests_that_were_killed(elsewhere: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.helpers.slurm.lab import *\n"
        f"lab = Lab(Path({str(elsewhere)!r}), Shape(nodes=1, accounting=False, name='hand')); lab.up(); guard(lab)\n"
        "print('up', flush=True); time.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    if said != "up\n":
        pytest.skip("no Slurm here")
    assert wait_until(lambda: not traces(elsewhere) and not elsewhere.exists(), 120), traces(elsewhere)


def test_where_it_cannot_be_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is one line, and nothing is begun."""
    before, services = hosts_without_labs(), Path("/usr/sbin/policy-rc.d").exists()
    lab = Lab(tmp_path / "lab", Shape(accounting=False))
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(Unable, match="needs root"):
            lab.up()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(Unable, match="there is no apt-get"):
            lab.up()
    with monkeypatch.context() as patched:
        patched.setattr(lab_module, "PACKAGES", ("munge", "no-such-package-of-slurm"))
        with pytest.raises(Unable, match=r"cannot install no-such-package-of-slurm: E: Unable to locate package"):
            lab.up()
    with pytest.raises(Unable, match="must be short and plain"):
        Lab(tmp_path / ("deep" * 20)).up()
    assert traces(lab.folder) == []
    assert not lab.folder.exists()
    assert hosts_without_labs() == before
    assert Path("/usr/sbin/policy-rc.d").exists() is services
