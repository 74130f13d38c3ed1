"""Nodes and ranks per node that nobody stated follow from torchrun and srun; what is stated must agree with them."""

from __future__ import annotations

import pytest

from rlexp.base.errors import ConfigError
from rlexp.config import resolvers
from rlexp.config.checks.layout import choose, heads_of, near
from rlexp.config.hardware import assumed_gpus
from rlexp.config.load import compose_config
from rlexp.config.schema import Config, TransportName

ARGS = ("launch.device=cpu", "logger=none", "parallel.ring_size=4")
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2"}


def by_torchrun(nodes: int) -> dict[str, str]:
    each = 8 // nodes
    return TORCHRUN | {"GROUP_WORLD_SIZE": str(nodes), "LOCAL_WORLD_SIZE": str(each), "GROUP_RANK": str(2 // each)}


def by_srun(nodes: int) -> dict[str, str]:
    each = 8 // nodes
    return SRUN | {"SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})", "SLURM_NODEID": str(2 // each)}


def composed(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], *args: str) -> Config:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return compose_config([*ARGS, *args])


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("started", [by_torchrun, by_srun])
def test_a_ring_over_several_nodes_sends_from_neighbour_to_neighbour(started, nodes: int, monkeypatch) -> None:
    cfg = composed(monkeypatch, started(nodes))
    assert (cfg.launch.nodes, cfg.launch.nproc, cfg.parallel.dp_size) == (nodes, 8 // nodes, 2)
    assert near(cfg, 4) is (nodes < 4)
    travels = TransportName.direct if nodes < 4 else TransportName.neighbour
    assert choose(cfg, heads_of(cfg.model)).transport is travels
    with_sampling = compose_config([*ARGS[:2], "parallel.ring_size=3", "loss=ppo", "reward.text=a", "rollout=pipelined",
                                    "rollout.sampling_ranks=2"])  # fmt: skip
    assert near(with_sampling, 4) is (nodes < 4), "ranks that only sample are ranks of a node too"


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        (by_torchrun(2), ["launch.nodes=1"], "launch.nodes=1: torchrun has started 8 ranks, 4 on each of 2 nodes. Use "
                                             "launch.nodes=2, or leave it out, or use torchrun --nnodes=1."),
        (by_torchrun(1), ["launch.nodes=2"], "launch.nodes=2: torchrun has started 8 ranks, 8 on each of 1 node. Use"),
        (by_torchrun(2), ["launch.nproc=8"], "launch.nproc=8: torchrun has started 8 ranks, 4 on each of 2 nodes. Use "
                                             "launch.nproc=4, or leave it out, or use torchrun --nproc-per-node=8."),
        (by_srun(2), ["launch.nodes=4"], "launch.nodes=4: srun has started 8 ranks, 4 on each of 2 nodes. Use "
                                         "launch.nodes=2, or leave it out, or use srun --nodes=4."),
        (by_srun(2), ["launch.nproc=8"], "or use srun --ntasks-per-node=8."),
        (TORCHRUN, ["launch.nodes=3"], "launch.nodes=3: the launcher has started 8 ranks, and every node must have "
                                       "equally many. Use launch.nodes=2 or 4."),
        (by_srun(2) | {"SLURM_NODEID": "1"}, [], "parallel.ring_size=4: rank 2 is on node 1, and with 4 ranks on each "
                                                 "it must be on node 0: ranks that are neighbours in a ring share a "
                                                 "node. Use srun --distribution=block."),
    ],
)  # fmt: skip
def test_what_contradicts_the_launcher_is_refused(env, args: list[str], said: str, monkeypatch) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(monkeypatch, env, *args)
    assert said in str(refused.value)


def test_what_agrees_with_the_launcher_is_taken(monkeypatch) -> None:
    cfg = composed(monkeypatch, by_srun(2), "launch.nodes=2", "launch.nproc=4")
    assert (cfg.launch.nodes, cfg.launch.nproc) == (2, 4)
    dealt_in_turn = {"SLURM_NODEID": "0", "SLURM_PROCID": "6"}
    for name, value in dealt_in_turn.items():
        monkeypatch.setenv(name, value)
    assert compose_config([*ARGS[:2], "parallel.ring_size=1"]).parallel.dp_size == 8, "a ring of one has no neighbours"


def test_ranks_on_a_node_are_counted_where_each_sees_its_own_gpu_only(monkeypatch) -> None:
    """Each rank then has its share of the cores (`rlexp.launch.joining.threads_of`)."""
    monkeypatch.setattr(resolvers, "visible_gpus", lambda: 1)
    for name, value in by_srun(2).items():
        monkeypatch.setenv(name, value)
    assert compose_config(["launch.device=cuda", *ARGS[1:]]).launch.nproc == 4


def test_a_launcher_that_says_nothing_of_nodes_leaves_them_to_the_user(monkeypatch) -> None:
    assert composed(monkeypatch, TORCHRUN).launch.nodes == 1
    assert composed(monkeypatch, TORCHRUN, "launch.nodes=2").launch.nodes == 2


@pytest.mark.parametrize(
    ("gpus", "mask", "args", "refused"),
    [
        (2, None, [], True),
        (2, "0,1", ["launch.ranks_per_gpu=2"], True),
        (1, None, ["launch.ranks_per_gpu=4"], True),
        (1, "3", [], False),  # a script may show each rank its own
        (4, None, ["launch.ranks_per_gpu=2"], False),
        (8, None, [], False),
    ],
)
def test_more_ranks_of_torchrun_than_gpus(
    gpus: int, mask: str | None, args: list[str], refused: bool, monkeypatch
) -> None:
    """NCCL would refuse two ranks on a GPU late, and with launch.ranks_per_gpu too many would share one unseen."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    words = ["launch.device=cuda", "logger=none", "parallel.ring_size=4", *args]
    for name, value in by_torchrun(1).items():
        monkeypatch.setenv(name, value)
    with assumed_gpus(gpus):
        if not refused:
            assert compose_config(words).launch.nproc == 8
            return
        with pytest.raises(ConfigError, match=rf"launch\.nproc=8: .* {gpus} (is|are) visible\. Use torchrun --nproc-"):
            compose_config(words)
