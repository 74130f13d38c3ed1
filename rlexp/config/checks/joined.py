"""Where torchrun or srun has started ranks, and whether the configuration says the same."""

from __future__ import annotations

import os

from rlexp.base.errors import ConfigError
from rlexp.config import sizes
from rlexp.config.schema import Config


def check_joined(cfg: Config) -> None:
    """Refuse nodes, or ranks on each, that the launcher of this process has not started."""
    ranks, nodes = sizes.joined_world(), sizes.joined_nodes()
    assert ranks is not None
    if nodes is None:
        if ranks % cfg.launch.nodes:
            fitting = sizes.listed(sizes.nearest(cfg.launch.nodes, sizes.divisors(ranks)))
            raise ConfigError(
                f"launch.nodes={cfg.launch.nodes}: the launcher has started {ranks} ranks, and every node must have "
                f"equally many. Use launch.nodes={fitting}."
            )
        return
    torchrun = "RANK" in os.environ
    name, each = ("torchrun", "--nproc-per-node") if torchrun else ("srun", "--ntasks-per-node")
    for key, stated, started, option in (
        ("launch.nodes", cfg.launch.nodes, nodes, "--nnodes" if torchrun else "--nodes"),
        ("launch.nproc", cfg.launch.nproc, ranks // nodes, each),
    ):
        if stated != started:
            raise ConfigError(
                f"{key}={stated}: {name} has started {ranks} ranks, {ranks // nodes} on each of {nodes} "
                f"node{'s' * (nodes > 1)}. Use {key}={started}, or leave it out, or use {name} {option}={stated}."
            )
    _check_neighbours(cfg, ranks // nodes)


def _check_neighbours(cfg: Config, on_each: int) -> None:
    """Refuse ranks that srun has dealt to the nodes in turn: a ring's neighbours would lie on different nodes."""
    rank, node = sizes.joined_rank(), sizes.joined_node()
    if rank is None or node is None or cfg.parallel.ring_size == 1 or rank // on_each == node:
        return
    raise ConfigError(
        f"parallel.ring_size={cfg.parallel.ring_size}: rank {rank} is on node {node}, and with {on_each} ranks on each "
        f"it must be on node {rank // on_each}: ranks that are neighbours in a ring share a node. Use srun "
        f"--distribution=block."
    )
