"""The groups of ranks that a run talks over, each of which is a communicator of NCCL with buffers on the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlexp.config.load import compose_config
from rlexp.config.schema import Config, HardwareConfig
from rlexp.launch.joining import RankSpec
from rlexp.preflight.communicators import CONTEXT, CUBLAS, MIB, RankGroup, beside
from rlexp.preflight.rehearsal.rehearse import preload, rehearse
from rlexp.training.train.build import build
from rlexp.training.train.step import train_step
from rlexp.training.train.surroundings import UNPROBED
from tests.helpers.ranks import on_ranks
from tests.helpers.rehearsals import alone, elsewhere, plan

BASE = ("logger=none", "data.max_length=256", "data.eval_size=0", "train.batch_size=4", "train.max_steps=1",
        "model.heads=4", "model.kv_heads=4", "launch.nproc=4")  # fmt: skip
NEIGHBOURS = 1  # the rank before sends keys on, and gradients home, where every rank needs all keys
# Layout and engine; of each group how many ranks it has, whether all call together, and how many send to this one.
CASES: dict[str, tuple[tuple[str, ...], list[tuple[int, bool, int]]]] = {
    "one rank": (("launch.nproc=1", "parallel.ring_size=1", "engine=torch"), []),
    "replicas": (("parallel.ring_size=1", "engine=torch"), [(4, True, 0)]),
    "replicas of fsdp2": (("parallel.ring_size=1", "engine=fsdp2"), [(4, True, 0)]),
    "replicas of zero1": (("parallel.ring_size=1", "engine=zero1"), [(4, True, 0), (4, True, 0)]),
    "replicas of zero0": (("parallel.ring_size=1", "engine=zero0"), [(4, True, 0), (4, True, 0)]),
    "a ring, direct": (
        ("parallel.ring_size=4", "engine=torch", "parallel.transport=direct"),
        [(4, True, 0), (4, True, 3)],
    ),
    "a ring, by neighbours": (
        ("parallel.ring_size=4", "engine=fsdp2", "parallel.transport=neighbour"),
        [(4, True, 0), (4, True, NEIGHBOURS)],
    ),
    # ZeRO-3 gathers and reduces over the world's group, and does not use the one that DeepSpeed makes.
    "two rings": (("parallel.ring_size=2", "engine=zero3", "parallel.transport=direct"), [(2, True, 1), (4, True, 0)]),
    "ulysses": (("parallel.ring_size=4", "engine=torch", "parallel.layout=ulysses"), [(4, True, 0), (4, True, 3)]),
    "hybrid": (
        ("parallel.ring_size=4", "engine=zero2", "parallel.layout=hybrid", "parallel.ulysses_size=2",
         "parallel.transport=direct"),
        [(2, False, 1), (2, False, 1), (4, True, 0), (4, True, 0), (4, True, 0)],
    ),
}  # fmt: skip


def groups_of(cfg: Config) -> list[tuple[int, bool, int]]:
    preload()
    groups = rehearse(plan(cfg, 0, gpu=True)).groups.values()
    return sorted((each.ranks, each.collective, len(each.senders)) for each in groups if each.ranks > 1)


FAST = ("two rings", "hybrid", "a ring, by neighbours")


@pytest.mark.parametrize("case", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in CASES])
def test_the_groups_of_a_step(case: str) -> None:
    words, expected = CASES[case]
    assert alone(groups_of, elsewhere(*BASE, *words)) == sorted(expected)


def really_there(spec: RankSpec, cfg: Config) -> int:
    """Return how many groups of several ranks this rank is a member of, the world's included, after a step."""
    import torch.distributed as dist

    train_step(build(cfg, around=UNPROBED), 1)
    groups: Any = dist.distributed_c10d._world.pg_map
    return sum(spec.rank in dist.get_process_group_ranks(each) and each.size() > 1 for each in groups)


@pytest.mark.parametrize(
    ("case", "unused"), [pytest.param("a ring, direct", 0, marks=pytest.mark.slow), ("hybrid", 0), ("two rings", 1)]
)
def test_no_group_of_ours_is_made_that_nothing_uses(case: str, unused: int) -> None:
    """NCCL connects a group when it is first used, so one that DeepSpeed makes and does not use takes nothing."""
    words, expected = CASES[case]
    made = on_ranks(4, really_there, compose_config([*BASE, *words, "launch.device=cpu"]))
    assert made == [len(expected) + unused] * 4


def test_what_is_assumed_for_each() -> None:
    sheet = elsewhere(*BASE).hardware
    with_nvlink, without = (dataclasses.replace(sheet, link_gb_s=rate) for rate in (450, 20))
    ring = RankGroup(8, collective=True, senders={1, 2, 3, 4, 5, 6, 7})
    assert ring.bytes(with_nvlink) == (24 * 2 + 7 * 32) * 10 * MIB
    assert ring.bytes(without) == (2 * 2 + 7 * 2) * 10 * MIB
    assert RankGroup(8, collective=True).bytes(with_nvlink) == 480 * MIB


@pytest.mark.parametrize(("groups", "exceeds"), [({}, False), ({"ring": RankGroup(8, True, set(range(1, 8)))}, True)])
def test_the_sum_is_compared_with_the_reserve(groups: dict[str, RankGroup], exceeds: bool) -> None:
    cfg = elsewhere(*BASE)
    found = beside(cfg, groups)
    assert isinstance(cfg.hardware, HardwareConfig)
    assert found.reserve == int(2.5 * 1024 * MIB)
    assert found.bytes == CONTEXT + CUBLAS + sum(each.bytes(cfg.hardware) for each in groups.values())
    assert found.exceeds == exceeds
