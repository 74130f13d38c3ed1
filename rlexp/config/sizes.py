"""The arithmetic of sizes: pure, exact, and in one place. Sizes that do not divide are refused with sizes that do."""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Mapping

from rlexp.base.errors import ConfigError
from rlexp.config.schema import Config
from rlexp.config.schema.bounds import check_number

# What torchrun puts into the environment of a rank.
OF_A_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
              "MASTER_PORT")  # fmt: skip


def joined_world(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the world size of the launcher that started this process (torchrun, srun), or None without one.

    A batch script or an interactive shell on Slurm is one task, which may start its own ranks. So only a Slurm step
    with several tasks counts.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size, rank = _whole("WORLD_SIZE", env), _whole("RANK", env)
        if rank >= world_size:
            raise ConfigError(f"RANK={rank}: the environment has WORLD_SIZE={world_size}. Unset both, or use torchrun.")
        if "MASTER_ADDR" not in env:
            raise ConfigError(
                f"WORLD_SIZE={world_size}, RANK={rank}: are in the environment without MASTER_ADDR and MASTER_PORT. "
                f"Unset them, or start with torchrun."
            )
        return world_size
    tasks = _whole("SLURM_STEP_NUM_TASKS", env) if "SLURM_STEP_NUM_TASKS" in env else 1
    return tasks if tasks > 1 and "SLURM_PROCID" in env else None


def _whole(name: str, env: Mapping[str, str]) -> int:
    if not env[name].isdecimal():
        raise ConfigError(f"{name}={env[name]}: is in the environment and is not a whole number. Unset it.")
    return int(env[name])


def joined_rank(env: Mapping[str, str] = os.environ) -> int | None:
    if joined_world(env) is None:
        return None
    return int(env["RANK"]) if "RANK" in env else int(env["SLURM_PROCID"])


def joined_nodes(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the nodes on which the launcher of this process has started ranks, or None where none did or says so.

    Each node has equally many: others are refused.
    """
    world_size = joined_world(env)
    if world_size is None:
        return None
    if "RANK" not in env:
        return _nodes_of_step(world_size, env)
    if "LOCAL_WORLD_SIZE" not in env:  # a script that starts ranks by srun may give each its RANK
        same = env.get("SLURM_STEP_NUM_TASKS") == str(world_size)
        return _nodes_of_step(world_size, env) if same else None
    on_this = _whole("LOCAL_WORLD_SIZE", env)
    nodes = _whole("GROUP_WORLD_SIZE", env) if "GROUP_WORLD_SIZE" in env else world_size // max(on_this, 1)
    if nodes * on_this != world_size:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={on_this}: this node has so many of the {world_size} ranks that torchrun has started on "
            f"{nodes} nodes, and every node must have equally many. Use one --nproc-per-node on all nodes."
        )
    return nodes


def _nodes_of_step(world_size: int, env: Mapping[str, str]) -> int | None:
    """Return the nodes of a Slurm step. Slurm writes 8(x2),4 where two have 8 tasks, and one has 4."""
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    runs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run) for run in per_node.split(",")]
    counts = [(int(run[1]), int(run[2] or 1)) for run in runs if run]
    if len(counts) < len(runs) or sum(tasks * nodes for tasks, nodes in counts) != world_size:
        return None
    if len({tasks for tasks, _ in counts}) > 1:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={per_node}: srun has started more ranks on one node than on another, and every "
            f"node must have equally many. Use srun --ntasks-per-node=N."
        )
    return sum(nodes for _, nodes in counts)


def joined_node(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of the node on which the launcher has started this process; None where it does not say."""
    name = "GROUP_RANK" if "RANK" in env else "SLURM_NODEID"
    return _whole(name, env) if joined_world(env) is not None and name in env else None


def ranks_of_machine(cfg: Config) -> int:
    """Return how many of the ranks share a machine."""
    return -(-(cfg.parallel.world_size + cfg.rollout.sampling_ranks) // cfg.launch.nodes)


def divisors(number: int) -> list[int]:
    smaller = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*smaller, *(number // d for d in smaller)})


def nearest(wanted: int, candidates: list[int]) -> list[int]:
    """Return the largest candidate up to `wanted` and the smallest above it, if they exist."""
    below = [each for each in candidates if each <= wanted]
    above = [each for each in candidates if each > wanted]
    return [*sorted(below)[-1:], *sorted(above)[:1]]


def listed(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)


def require(key: str, value: int) -> None:
    """Refuse a number out of its bounds in the schema: sizes are derived before the configuration is checked."""
    group, _, leaf = key.partition(".")
    check_number(key, value, typing.get_type_hints(Config)[group].__dataclass_fields__[leaf])


def dp_size(world_size: int, ring_size: int, *, gpus: int = 0) -> int:
    """Return the number of replicas that train in parallel: world / ring, exactly. `gpus`: this machine's, if the run
    is to use them."""
    require("parallel.ring_size", ring_size)
    if world_size < 1:
        raise ConfigError(
            f"parallel.world_size={world_size}: must be at least 1. It is derived. Set launch.nproc instead."
        )
    if world_size % ring_size:
        fitting = nearest(ring_size, divisors(world_size))
        multiples = [ring_size * n for n in (world_size // ring_size, world_size // ring_size + 1) if n]
        on_cpu = f" Or give launch.device=cpu, and no launch.nproc: {ring_size} ranks then run on the CPU."
        raise ConfigError(
            f"parallel.ring_size={ring_size}: the world has {world_size} rank{'s' * (world_size > 1)}, which is "
            f"no multiple of it. Use parallel.ring_size={listed(fitting)}, or a world of {listed(multiples)} "
            f"ranks (launch.nproc × launch.nodes; on a GPU machine launch.nproc is the number of GPUs)."
            f"{on_cpu * (gpus > 0 and world_size < ring_size)}"
        )
    return world_size // ring_size


def elastic_ring(ranks: int, nproc: int, nodes: int, *, on_cpu: bool) -> int:
    """Return the size of a ring of all ranks that train. Between nodes with GPUs links are slow, so there a ring is the
    largest that lies within nodes. The last ranks may only sample."""
    return ranks if on_cpu or nodes == 1 else math.gcd(ranks, nproc)


def grad_acc(batch_size: int, micro_batch_size: int | str, dp_size: int) -> int | None:
    """Return a replica's forward passes per optimizer step: batch / (micro × dp), exactly. None if each step has its
    own number."""
    require("train.batch_size", batch_size)
    if isinstance(micro_batch_size, str):
        if batch_size < dp_size:  # some replicas would have nothing to do in any step
            raise ConfigError(
                f"train.batch_size={batch_size}: {dp_size} replicas need a sample each at least. Use train.batch_size="
                f"{dp_size} or more, a larger parallel.ring_size, which makes fewer replicas, or fewer ranks."
            )
        return None
    require("train.micro_batch_size", micro_batch_size)
    unit = micro_batch_size * dp_size
    if batch_size % unit:
        lower = batch_size // unit * unit
        sizes = ([lower] if lower else []) + [lower + unit]
        remedy = f"Use train.batch_size={listed(sizes)}."
        if batch_size % dp_size == 0:
            micros = nearest(micro_batch_size, divisors(batch_size // dp_size))
            remedy += f" To keep {batch_size}, use train.micro_batch_size={listed(micros)}."
        else:
            replicas = [d for d in divisors(batch_size) if batch_size % (d * micro_batch_size) == 0]
            if replicas:
                fewer = max(d for d in replicas if dp_size % d == 0)  # on the same ranks
                remedy += (
                    f" To keep {batch_size}, make parallel.ring_size {dp_size // fewer} times as large ({fewer} "
                    f"replica{'s' * (fewer > 1)}), or launch ranks for {listed(nearest(dp_size, replicas))} replicas."
                )
        raise ConfigError(
            f"train.batch_size={batch_size}: {dp_size} replica{'s' * (dp_size > 1)} × train.micro_batch_size="
            f"{micro_batch_size} need a multiple of {unit}. {remedy}"
        )
    return batch_size // unit


def training_ranks(ranks: int, sampling_ranks: int) -> int:
    """Return the number of ranks that train: all except those that only sample."""
    if sampling_ranks < 0 or sampling_ranks >= ranks:
        raise ConfigError(
            f"rollout.sampling_ranks={sampling_ranks}: there {'are' if ranks > 1 else 'is'} {ranks} "
            f"rank{'s' * (ranks > 1)} in all, and at least one must train. Use fewer (none with "
            f"rollout.mode=colocated), or more ranks in all (launch.nproc)."
        )
    return ranks - sampling_ranks


def minibatches(batch_size: int, n_samples: int, train_batch: int) -> int:
    """Return the train batches per rollout: prompts × samples / train batch, exactly."""
    require("rollout.batch_size", batch_size)
    require("rollout.n_samples", n_samples)
    require("train.batch_size", train_batch)
    samples = batch_size * n_samples
    if samples % train_batch:
        fitting = nearest(train_batch, divisors(samples))
        lower = samples // train_batch * train_batch
        totals = [total for total in (lower, lower + train_batch) if total and total % n_samples == 0]
        prompts = f", or rollout.batch_size={listed([total // n_samples for total in totals])}" if totals else ""
        raise ConfigError(
            f"train.batch_size={train_batch}: a rollout of rollout.batch_size={batch_size} prompts × "
            f"rollout.n_samples={n_samples} gives {samples} samples, which is no multiple of it. Use "
            f"train.batch_size={listed(fitting)}{prompts}."
        )
    return samples // train_batch
