"""The arithmetic of sizes: pure, exact, and in one place. What does not divide is refused with what would."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlexp.errors import ConfigError


def joined_world(env: Mapping[str, str] | None = None) -> int | None:
    """The world of the launcher this process runs under (torchrun, srun), or None outside of one.

    A batch script or an interactive shell on Slurm is one task that may start its own ranks, so only a step of
    several tasks counts.
    """
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size, rank = _whole("WORLD_SIZE", env), _whole("RANK", env)
        if rank >= world_size:
            raise ConfigError(
                f"RANK={rank}: the environment says WORLD_SIZE={world_size}. Unset both, or use torchrun."
            )
        if "MASTER_ADDR" not in env:
            raise ConfigError(
                f"WORLD_SIZE={world_size}, RANK={rank}: stand in the environment without MASTER_ADDR and MASTER_PORT. "
                f"Unset them, or start with torchrun."
            )
        return world_size
    tasks = _whole("SLURM_STEP_NUM_TASKS", env) if "SLURM_STEP_NUM_TASKS" in env else 1
    return tasks if tasks > 1 and "SLURM_PROCID" in env else None


def _whole(name: str, env: Mapping[str, str]) -> int:
    if not env[name].isdecimal():
        raise ConfigError(f"{name}={env[name]}: stands in the environment and is no whole number. Unset it.")
    return int(env[name])


def joined_rank(env: Mapping[str, str] | None = None) -> int | None:
    env = os.environ if env is None else env
    if joined_world(env) is None:
        return None
    return int(env["RANK"]) if "RANK" in env else int(env["SLURM_PROCID"])


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(wanted: int, candidates: list[int]) -> list[int]:
    """The largest candidate below and the smallest above, as far as there are any."""
    below = [c for c in candidates if c <= wanted]
    above = [c for c in candidates if c > wanted]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def listed(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)


def positive(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key}={value}: must be at least 1.")


def dp_size(world_size: int, ring_size: int) -> int:
    """How many replicas of the model train side by side: world / ring, exactly."""
    positive("parallel.ring_size", ring_size)
    positive("world size", world_size)
    if world_size % ring_size:
        fitting = nearest(ring_size, divisors(world_size))
        multiples = nearest(world_size, [ring_size * n for n in range(1, world_size // ring_size + 2)])
        raise ConfigError(
            f"parallel.ring_size={ring_size}: the world has {world_size} rank{'s' * (world_size > 1)}, which is "
            f"no multiple of it. Use parallel.ring_size={listed(fitting)}, or a world of {listed(multiples)} "
            f"ranks (launch.nproc × launch.nodes; on a GPU machine launch.nproc is the number of GPUs)."
        )
    return world_size // ring_size


def grad_acc(batch_size: int, micro_batch_size: int, dp_size: int) -> int:
    """Forward passes of a replica per optimizer step: batch / (micro × dp), exactly."""
    positive("train.batch_size", batch_size)
    positive("train.micro_batch_size", micro_batch_size)
    unit = micro_batch_size * dp_size
    if batch_size % unit:
        lower = batch_size // unit * unit
        sizes = ([lower] if lower else []) + [lower + unit]
        remedies = [f"train.batch_size={listed(sizes)}"]
        if batch_size % dp_size == 0:
            micros = nearest(micro_batch_size, divisors(batch_size // dp_size))
            remedies.append(f"train.micro_batch_size={listed(micros)}")
        else:
            replicas = nearest(dp_size, [d for d in divisors(batch_size) if batch_size % (d * micro_batch_size) == 0])
            if replicas:
                remedies.append(f"{listed(replicas)} replicas (world size / parallel.ring_size)")
        raise ConfigError(
            f"train.batch_size={batch_size}: {dp_size} replica{'s' * (dp_size > 1)} × train.micro_batch_size="
            f"{micro_batch_size} need a multiple of {unit}. Use {', or '.join(remedies)}."
        )
    return batch_size // unit


def training_ranks(ranks: int, sampling_ranks: int) -> int:
    """All ranks but those that do nothing but sample."""
    if sampling_ranks < 0 or sampling_ranks >= ranks:
        raise ConfigError(
            f"rollout.sampling_ranks={sampling_ranks}: there {'are' if ranks > 1 else 'is'} {ranks} "
            f"rank{'s' * (ranks > 1)} in all, and at least one must train. Use fewer (none with "
            f"rollout.mode=colocated), or more ranks in all (launch.nproc)."
        )
    return ranks - sampling_ranks


def minibatches(batch_size: int, n_samples: int, train_batch: int) -> int:
    """Train batches of a rollout: prompts × samples / train batch, exactly."""
    positive("rollout.batch_size", batch_size)
    positive("rollout.n_samples", n_samples)
    positive("train.batch_size", train_batch)
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
