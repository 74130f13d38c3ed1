"""Where ranks meet that a launcher started."""

from __future__ import annotations

import os

import pytest

from rlexp.launch.place import Place

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
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("slurm_step")
def test_a_slurm_step_meets_on_its_own_first_node() -> None:
    assert Place.joined() == Place(rank=5, world_size=8, local_rank=1, init_method="env://")
    assert os.environ["MASTER_ADDR"] == "gpu03"
    assert 20000 <= int(os.environ["MASTER_PORT"]) <= 60000


@pytest.mark.usefixtures("slurm_step")
def test_two_steps_of_a_job_meet_at_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    Place.joined()
    one = os.environ["MASTER_PORT"]
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    Place.joined()
    assert os.environ["MASTER_PORT"] != one


def test_outside_of_a_launcher_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert Place.joined() is None
