"""Sizes that follow from others are exact, or refused with values that would be."""

from __future__ import annotations

import re

import pytest

from rlexp.base.errors import ConfigError
from rlexp.config import resolvers, sizes


@pytest.mark.parametrize(
    ("batch", "micro", "dp", "expected"), [(8, 1, 1, 8), (8, 1, 8, 1), (8, 8, 1, 1), (12, 2, 3, 2), (8, 2, 4, 1)]
)
def test_accumulation_is_exact(batch: int, micro: int, dp: int, expected: int) -> None:
    assert sizes.grad_acc(batch, micro, dp) == expected
    assert expected * micro * dp == batch


@pytest.mark.parametrize(
    ("batch", "micro", "dp", "remedies"),
    [
        (12, 1, 8, ("train.batch_size=8 or 16", "6 or 12 replicas")),
        (8, 8, 8, ("train.batch_size=64", "train.micro_batch_size=1")),  # the formula of the field trains 64 here
        (4, 1, 8, ("train.batch_size=8", "4 replicas")),
        (10, 4, 1, ("train.batch_size=8 or 12", "train.micro_batch_size=2 or 5")),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(batch: int, micro: int, dp: int, remedies: tuple) -> None:
    with pytest.raises(ConfigError) as error:
        sizes.grad_acc(batch, micro, dp)
    message = str(error.value)
    assert message.startswith(f"train.batch_size={batch}: ")
    assert f"{dp} replica" in message
    assert f"micro_batch_size={micro}" in message
    for remedy in remedies:
        assert remedy in message


def test_every_remedy_works() -> None:
    """The values named in an error are values that would not raise one."""
    for batch in range(1, 25):
        for micro in range(1, 9):
            for dp in range(1, 9):
                try:
                    assert sizes.grad_acc(batch, micro, dp) * micro * dp == batch
                except ConfigError as error:
                    said = str(error).partition("Use ")[2]
                    for value in _numbers(said, r"train\.batch_size=([\d or]+)"):
                        assert sizes.grad_acc(value, micro, dp)
                    for value in _numbers(said, r"train\.micro_batch_size=([\d or]+)"):
                        assert sizes.grad_acc(batch, value, dp)
                    for value in _numbers(said, r"([\d or]+) replicas"):
                        assert sizes.grad_acc(batch, micro, value)


def _numbers(text: str, pattern: str) -> list[int]:
    said = re.search(pattern, text)
    return [int(number) for number in re.findall(r"\d+", said.group(1))] if said else []


def test_data_parallel_size_is_exact() -> None:
    assert sizes.dp_size(8, 2) == 4
    with pytest.raises(ConfigError, match=r"parallel.ring_size=8: the world has 2 ranks.*ring_size=2.*world of 8"):
        sizes.dp_size(2, 8)
    with pytest.raises(ConfigError, match=r"parallel.ring_size=3.*ring_size=2 or 4.*world of 6 or 9"):
        sizes.dp_size(8, 3)
    with pytest.raises(ConfigError, match="at least 1"):
        sizes.dp_size(8, 0)
    with pytest.raises(ConfigError, match=r"is the number of GPUs\)\.$"):  # it is on the CPU
        resolvers.dp_size(2, 8, "cpu")


def test_a_launchers_world_is_joined_and_a_batch_script_is_not() -> None:
    assert sizes.joined_world({}) is None
    assert sizes.joined_world({"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"}) == 8
    assert sizes.joined_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    assert sizes.joined_world({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}) == 8
    assert sizes.joined_rank({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8"}) == 2


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({}, None),
        ({"SLURM_NNODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, None),  # a batch script's step of one task
        (TORCHRUN, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}, 1),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "4"}, 4),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 2),
        # srun starts one torchrun on each of two nodes
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0",
                     "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 2),
        # a script that srun starts exports RANK and WORLD_SIZE
        (TORCHRUN | SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 2),
        (SRUN, None),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8"}, 1),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 2),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,2(x3)"}, 4),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "16"}, None),  # of another step
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "what"}, None),
    ],
)  # fmt: skip
def test_nodes_are_read_from_the_launchers_environment(env: dict[str, str], nodes: int | None) -> None:
    assert sizes.joined_nodes(env) == nodes


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, r"=3\(x2\),2: .*--ntasks-per-node=N"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2"}, r"LOCAL_WORLD_SIZE=5: .* 8 ranks .* 2 nodes"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: .* --nproc-per-node"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: .* --nproc-per-node"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "four"}, "LOCAL_WORLD_SIZE=four: .* not a whole number"),
    ],
)
def test_nodes_with_different_numbers_of_ranks_are_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sizes.joined_nodes(env)


def test_the_node_of_a_rank_is_read_from_the_launchers_environment() -> None:
    assert sizes.joined_node(TORCHRUN | {"GROUP_RANK": "1", "SLURM_NODEID": "0"}) == 1
    assert sizes.joined_node(SRUN | {"SLURM_NODEID": "2"}) == 2
    assert sizes.joined_node(SRUN) is None
    assert sizes.joined_node({"SLURM_NODEID": "2"}) is None
