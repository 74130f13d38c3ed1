"""Compare what a job asks with what the cluster has, and refuse a job that can never start."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.launch.slurm.queue import ask, seconds_of


@dataclass(frozen=True)
class Partition:
    """A partition, or one of its kinds of node."""

    name: str
    default: bool
    seconds: float | None  # its time limit
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int


def partitions() -> list[Partition]:
    """Return one entry for each kind of node in each partition."""
    text = ask("sinfo", "--noheader", "--exact", "--format=%P|%l|%D|%c|%m|%G")
    return [_read(line) for line in text.splitlines() if line.count("|") >= 5]


def _read(line: str) -> Partition:
    name, limit, nodes, cpus, memory, gres = line.split("|")[:6]
    gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)*:(\d+)", gres))
    count, cores, mb = (int(re.sub(r"\D.*", "", number) or 0) for number in (nodes, cpus, memory))
    return Partition(name.rstrip("*"), name.endswith("*"), seconds_of(limit), count, cores, mb, gpus)


def kinds(all_partitions: Sequence[Partition], wanted: str | None) -> list[Partition]:
    """Return the kinds of node in the wanted partitions, or in the cluster's default partition."""
    names = names_of(wanted)
    return [each for each in all_partitions if (each.name in names if names else each.default)]


def names_of(wanted: str | None) -> list[str]:
    return [name.strip() for name in wanted.split(",")] if wanted else []


def exceeded(params: Mapping[str, Any], all_partitions: Sequence[Partition]) -> str | None:
    """Return why a job of this size would wait for ever, with the key to change; None if it fits."""
    wanted = params.get("partition")
    for name in names_of(wanted):
        if not any(each.name == name for each in all_partitions):
            return (
                f"hydra.launcher.partition={wanted}: this cluster has no partition {name}. It has "
                f"{', '.join(sorted({each.name for each in all_partitions}))}."
            )
    ours = kinds(all_partitions, wanted)
    if not ours:  # no default partition: sbatch will say so
        return None
    nodes: Counter[str] = Counter()  # of each partition, since a job runs in one
    for each in ours:
        nodes[each.name] += each.nodes
    where = f"partition {'/'.join(sorted(nodes))}"
    tasks = int(params["tasks_per_node"])
    gpus = params.get("gpus_per_node") or 0
    on_gpus = "launch.nproc={asked}" if gpus >= tasks else f"launch.nproc={tasks} on {{asked}} GPUs"  # ranks share them
    for asked, has, template in (
        (gpus, max(each.gpus for each in ours), on_gpus +
         ": no node of {where} has so many GPUs; the largest has {has}. Take fewer on more nodes "
         "(launch.nodes), another partition, or launch.device=cpu."),
        (tasks * int(params["cpus_per_task"]), max(each.cpus for each in ours),
         "launch.nproc × launch.rank_cpus={asked}: no node of {where} has so many processors; the largest has {has}. "
         "Take more nodes, or a smaller launch.rank_cpus."),
        (int((params.get("mem_gb") or 0) * 1024), max(each.memory_mb for each in ours),
         "launch.nproc × launch.rank_memory_gb: {asked} MB are more than a node of {where} has ({has} MB)."),
        (int(params["nodes"]), max(nodes.values()), "launch.nodes={asked}: {where} has {has} nodes."),
        (float(params["timeout_min"]) * 60, max(each.seconds or float("inf") for each in ours),
         "launch.time_limit: {asked:g} s are more than {where} allows ({has:g} s). Give less: a run that is not done "
         "then continues in the same job, started again."),
    ):  # fmt: skip
        if asked > has:
            return template.format(asked=asked, has=has, where=where)
    return None
