"""Ranks that a launcher started find their place and meet."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from rlexp.base.errors import ConfigError
from rlexp.config.load import compose_config
from rlexp.config.schema import Device, LaunchConfig
from rlexp.launch import watch
from rlexp.launch.joining import RankSpec, join, launch_on, prepare_environment
from rlexp.launch.slurm import meeting
from rlexp.launch.stops import Terminated
from rlexp.run import job
from rlexp.training.engine import zero
from tests.helpers import warm

STEP = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


@pytest.fixture
def slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what is set below
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("slurm_step")
def test_a_slurm_step_has_a_meeting_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankSpec.joined() == RankSpec(rank=5, world_size=8, local_rank=1, init_method="slurm://")
    assert meeting.nodes() == ["gpu03", "gpu04"]  # the step's number of tasks, not the job's
    monkeypatch.setenv("MASTER_ADDR", "gpu03")  # an address that the user gives is used
    spec = RankSpec.joined()
    assert spec is not None
    assert spec.init_method == "env://"


JOIN = """
import os, sys, torch, torch.distributed as dist
from rlexp.launch.joining import RankSpec, join, launch_on
try:
    join(RankSpec.joined(), launch_on("cpu", float(sys.argv[1]), interface=sys.argv[2] or None))
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
total = torch.tensor([float(os.environ["SLURM_JOB_ID"])])
dist.all_reduce(total)
print(total.item(), os.environ.get("GLOO_SOCKET_IFNAME"))
"""


def step_of(folder: Path, job: int, rank: int, world: int, timeout: float = 240, interface: str = "") -> warm.Process:
    env = os.environ | {
        "SLURM_STEP_NUM_TASKS": str(world), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost",
        "SLURMD_NODENAME": "localhost", "RLEXP_RUN_DIR": str(folder),
    }  # fmt: skip
    return warm.start("-c", [JOIN, str(timeout), interface], folder, env=env)


def test_two_jobs_meet_in_one_folder_on_one_node(tmp_path: Path) -> None:
    """The ranks of each job meet only each other, at free ports, and leave no file."""
    ranks = {(job, rank): step_of(tmp_path, job, rank, 2) for job in (71, 72) for rank in range(2)}
    for (number, _), process in ranks.items():
        said, complaint = process.communicate(timeout=240)
        assert said.split()[:1] == [str(2.0 * number)], complaint
        assert said.split()[1] == "lo"
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_come_to_the_meeting_is_named(tmp_path: Path) -> None:
    alone, late = step_of(tmp_path, 73, 0, 3, timeout=30), step_of(tmp_path, 73, 1, 3)
    wrong = step_of(tmp_path, 74, 0, 2, interface="no0")
    orphan = step_of(tmp_path, 75, 1, 2, timeout=2)
    said = [process.communicate(timeout=240)[1].strip() for process in (alone, late, wrong, orphan)]
    assert said[0].endswith("UserError: rank 2 did not join the rendezvous within launch.timeout_seconds=30.")
    assert "launch.interface=no0: node localhost has no such interface" in said[2]
    assert "has lo" in said[2].replace("It has", "has")
    assert "rank 0 did not join the rendezvous within launch.timeout_seconds=2" in said[3]


def test_outside_of_a_launcher_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert RankSpec.joined() is None


@pytest.mark.parametrize("befalls", [RuntimeError("the network is down"), Terminated(signal.SIGTERM)])
@pytest.mark.parametrize("unfinished", [False, True])
def test_a_finished_run_stays_finished_whatever_befalls_who_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, befalls: BaseException, unfinished: bool
) -> None:
    """A rank that a launcher started writes its own end into run.json. Slurm, torch and the exit are stubs here."""

    def befall(*_: object) -> NoReturn:
        raise befalls

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    (tmp_path / "run.json").write_text('{"status": "finished"}', encoding="utf-8")
    monkeypatch.setattr(RankSpec, "joined", lambda: RankSpec(0, 2, 0, "env://"))
    monkeypatch.setattr(job.stops, "hear_stops", lambda **_: None)
    monkeypatch.setattr(job.stops, "ignore_stops", lambda: None)
    monkeypatch.setattr(job, "join_for", befall)
    monkeypatch.setattr(job, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(job.run_folder, "enter", lambda *_: unfinished)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        job.run_joined(compose_config(["launch.device=cpu"]), tmp_path)
    assert ended.value.code == (1 if isinstance(befalls, RuntimeError) else 128 + signal.SIGTERM)
    status = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["status"]
    assert status == ("finished" if not unfinished else "failed" if isinstance(befalls, RuntimeError) else "stopped")


READ = ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "DS_ACCELERATOR")


def prepared(monkeypatch: pytest.MonkeyPatch, launch: LaunchConfig, **given: str) -> dict[str, str]:
    """Return what a rank then finds in its environment, on a machine with 64 cores."""
    for name in (*READ, "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    prepare_environment(launch)
    return {name: os.environ[name] for name in READ if name in os.environ}


def test_a_rank_beside_a_gpu_has_its_share_of_the_cores_and_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = LaunchConfig(device=Device.cuda, nproc=8)
    grown = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert prepared(monkeypatch, gpus) == {"OMP_NUM_THREADS": "8", **grown}
    assert prepared(monkeypatch, gpus, SLURM_CPUS_PER_TASK="64") == {"OMP_NUM_THREADS": "64", **grown}
    alone = dataclasses.replace(gpus, nproc=1)
    assert prepared(monkeypatch, alone)["OMP_NUM_THREADS"] == "64"
    own = {"OMP_NUM_THREADS": "3", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert prepared(monkeypatch, gpus, **own) == own, "what the user sets stays"
    exact = dataclasses.replace(gpus, deterministic=True)
    assert prepared(monkeypatch, exact)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert prepared(monkeypatch, LaunchConfig(device=Device.cpu)) == {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


@pytest.mark.parametrize(
    ("visible", "local_rank", "each", "own"), [(1, 5, 1, 0), (8, 5, 1, 5), (1, 3, 4, 0), (2, 3, 2, 1)]
)
def test_deepspeed_reads_the_gpu_that_the_rank_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: int, local_rank: int, each: int, own: int
) -> None:
    """A site may show each rank its own GPU alone, and ranks may share one. DeepSpeed takes LOCAL_RANK for the GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "as srun left it")
    for name in meeting.INTERFACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    join(RankSpec(0, 1, local_rank, f"file://{tmp_path}/store"), launch_on("cuda", 10.0, ranks_per_gpu=each))
    watch.end()
    assert taken == [own]
    assert {os.environ[name] for name in meeting.INTERFACES} == {"lo"}, "others cannot reach these ranks"
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "1", str(own))


@pytest.mark.parametrize(("built_for", "said"), [(None, "was built without CUDA"), ("13.0", "Its driver may be older")])
def test_gpus_that_torch_does_not_see_are_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built_for: str | None, said: str
) -> None:
    """The launcher counts the driver's GPUs. A rank finds out what torch sees."""
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=rf"^launch\.device=cuda: .*{said}.* use launch\.device=cpu\.$"):
        join(RankSpec(0, 1, 0, f"file://{tmp_path}/store"), launch_on("cuda", 10.0))


@pytest.mark.parametrize("gpu", [True, False])
def test_deepspeeds_look_at_its_operators_is_answered_on_cpu_only(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """On a GPU the table is not even read: the first look at it tries every operator."""
    deepspeed = zero.import_deepspeed()
    answers: dict[str, bool] = {}
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", answers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    zero.import_deepspeed()
    assert answers == ({} if gpu else {"deepspeed_shm_comm": False})
