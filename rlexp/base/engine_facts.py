"""What each engine can do and needs: asked before a process starts, without torch, and by the engines themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    precisions: tuple[str, ...] = ("fp32", "bf16")  # DeepSpeed keeps float32 masters, so it has no fp64
    stage: int | None = None  # of DeepSpeed's ZeRO; None for engines that are not DeepSpeed
    offload: tuple[str, ...] = ("none",)
    # Every rank holds all of the training state. Such an engine fills in gradients that a rank does not have; with the
    # others every rank must have a gradient of every parameter, since they reduce it when it comes.
    replicated: bool = False
    # Every rank holds a piece of each weight and gathers the others during a pass. The reference model is held alike.
    sharded: bool = False
    loads_pieces: bool = False  # a pretrained model is read piece by piece, never whole on a rank


ANY_PRECISION = ("fp32", "bf16", "fp64")
ENGINES = {
    "torch": Traits(ANY_PRECISION, replicated=True),
    "zero0": Traits(stage=0, replicated=True),
    "zero1": Traits(stage=1, offload=("none", "optimizer")),
    "zero2": Traits(stage=2, offload=("none", "optimizer")),
    "zero3": Traits(stage=3, offload=("none", "optimizer", "all"), sharded=True, loads_pieces=True),
    "fsdp2": Traits(ANY_PRECISION, sharded=True),
}
DEFAULTS = ("zero1", "torch")  # `engine=auto` is the first of them that has the precision


def default(precision: str) -> str:
    return next(name for name in DEFAULTS if precision in ENGINES[name].precisions)


def able(fits: Callable[[Traits], bool]) -> str:
    """The engines that fit, as a message names them: `engine=torch or engine=zero0`."""
    return " or ".join(f"engine={name}" for name, traits in ENGINES.items() if fits(traits))
