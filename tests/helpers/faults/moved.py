"""The defects that a layout moves, each with the settings that `verify` must name: alone, or two together."""

from __future__ import annotations

from tests.helpers.faults.losses import LOSSES

GROUPS: dict[str, tuple[str, ...]] = {
    "replicas": (
        "every replica has the same",
        "a replica takes the other's pairs",
        "an empty replica adds",
        "bco: the whole batch is the replica's",
    ),
    "ring": (
        "targets shifted after sharding",
        "rank 0's real tokens everywhere",
        "another rank's chunks",
        "later keys seen",
        "merged by the maximum",
        "not a number in the merge",
        "merged without weights",
        "a row that another rank should get",
        "a row that nobody sent",
        "a row that nobody sent around",
        "dk added at the wrong place",
        "dk and dv do not come home",
        "the merge rounds like float32",
        "the ring is not summed",
        "a row that the outer ring's neighbour should get",
        "the world is not in the scale",
        "tokens counted by each rank of the ring",
        "shared tokens of one rank",
        "loss of rank 0",
        "summed, not averaged",
        "not reduced",
        "a parameter is left out of the reduction",
        "reduced in float32",
        "replicated sums counted on every rank",
        "mean over the ranks",
        "rank 0's values",
    ),
    "layout": (
        "a block forgotten",
        "the late queries' blocks are not merged in",
        "gathered keys in another order",
        "gradients of gathered keys",
        "heads in another order",
        "a head of keys that went to two",
    ),
    "transport": ("a sum begins anew on its way",),
    "kernel": (
        "the kernel's scale",
        "dk for dv",
    ),
    "ring+replicas": (
        "summed over the replicas too",
        "reduced over the ring only",
    ),
    "ring+engine": ("the norm of one rank's pieces",),
    "engine": ("FSDP2 does not accumulate",),
    "transport+checkpointing": ("in two halves: checkpointing and transport",),
    "micro-batches+sharing": ("in two halves: sharing and a budget of tokens",),
    "micro-batches+offloaded reference": ("in two halves: an offloaded reference and micro-batches",),
    "replicas+fused": ("in two halves: fused pieces and replicas",),
    "sharing+reference": ("in two halves: a stored reference and sharing",),
    "packing+layout": ("in two halves: ulysses and packing",),
}
# A batch of micro-batches, or of replicas, is divided by what one of them has.
GROUPS["micro-batches"] = (*GROUPS.get("micro-batches", ()), *(f"{name}: mean of means" for name in LOSSES))
GROUPS["replicas"] += tuple(f"{name}: divided by the replica's pairs" for name in LOSSES)
MOVED = {name: settings for settings, names in GROUPS.items() for name in names}
