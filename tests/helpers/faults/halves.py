"""Defects in two halves: each of two settings is right by itself, and together they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlexp.config.schema import AUTO, Checkpointing, Config, LayoutName, TransportName
from rlexp.config.schema.models import FusedName, ReferenceName
from rlexp.training.reference.models import Reference
from tests.helpers.faults.base import Fault, one
from tests.helpers.faults.plant import Change

RING4 = ("parallel=ring4", "launch.nproc=8")


def where(both: Callable[[Config], bool], wrong: Callable[[Any], None]) -> Change:
    """Build a run that is wrong where both settings are there."""

    def change(original: Any, cfg: Config, *args: Any, **kwargs: Any) -> Any:
        task = original(cfg, *args, **kwargs)
        if both(cfg):
            wrong(task)
        return task

    return change


def backward_of_more(task: Any) -> None:
    """Let each backward pass begin with a little more than the loss."""
    before = task.run.engine.backward
    task.run.engine.backward = lambda loss, **how: before(loss * 1.001, **how)


def other_outputs(task: Any) -> None:
    """Let the policy's log-probabilities be off by a little."""
    before = task.run.engine.forward
    task.run.engine.forward = lambda shard: (outputs := before(shard))._replace(logps_n=outputs.logps_n * (1 + 1e-6))


def other_reference(task: Any) -> None:
    class Off(Reference):
        def known(self, pack: Any, shard: Any) -> Any:
            return reference.known(pack, shard)

        def logps(self, shard: Any) -> Any:
            return reference.logps(shard) * (1 + 1e-6)

    reference, task.reference = task.reference, Off()


def two(name: str, both: Callable[[Config], bool], wrong: Callable[[Any], None], *words: str) -> Fault:
    return one(f"in two halves: {name}", "train.build:build", where(both, wrong), "", "", *words)


def counted(cfg: Config) -> bool:
    return cfg.train.micro_batch_size != 1


HALVES = (
    two("checkpointing and transport",
        lambda cfg: cfg.memory.recomputed is Checkpointing.full and cfg.parallel.transport is TransportName.neighbour,
        backward_of_more, "memory.checkpointing=true", "parallel.transport=neighbour", *RING4),
    two("sharing and a budget of tokens",
        lambda cfg: cfg.data.share_prefix is not False and cfg.data.packing and cfg.train.micro_batch_size == AUTO,
        other_outputs, "train.micro_batch_size=auto", "train.max_tokens_per_micro_batch=500"),
    two("an offloaded reference and micro-batches", lambda cfg: cfg.reference.offload and counted(cfg), other_reference,
        "reference.offload=true"),
    two("fused pieces and replicas",
        lambda cfg: cfg.model.fused is FusedName.always and cfg.parallel.dp_size > 1, backward_of_more,
        "model.fused=always"),
    two("a stored reference and sharing",
        lambda cfg: cfg.reference.name is ReferenceName.precompute and cfg.data.share_prefix is not False
        and cfg.data.packing, other_reference, "reference=precompute"),
    two("ulysses and packing", lambda cfg: cfg.parallel.layout is LayoutName.ulysses and cfg.data.packing,
        other_outputs, "parallel.layout=ulysses"),
)  # fmt: skip
