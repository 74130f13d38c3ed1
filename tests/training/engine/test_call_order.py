"""Ring messages and reductions go over two communicators: all ranks begin them in orders that fit together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.launch.joining import RankSpec
from rlexp.launch.local import PRELOAD, run_ranks
from rlexp.training.engine import reducing
from rlexp.training.world.groups import build_world
from tests.helpers.call_order import disorder
from tests.helpers.delayed import JOURNAL, Call, delayed_rank
from tests.helpers.ranks import TIMEOUT, train_steps

# Two replicas of a ring of 2, and packs of unequal length; every layer is computed again in the backward pass.
BASE = ("launch.device=cpu", "logger=none", "parallel=ring2", "launch.nproc=4", "train.batch_size=8", "data.size=16",
        "train.micro_batch_size=2", "data.eval_size=0", "memory.checkpointing=full")  # fmt: skip
LORA = ("adapter=lora", "adapter.rank=2")
USUAL = [("engine=torch", *LORA), ("engine=zero2",)]
OTHERS = [("engine=fsdp2", "parallel.layout=allgather"),
          ("engine=torch", "parallel.layout=ulysses"), ("engine=zero0", "parallel.layout=allgather"), ("engine=zero1",),
          ("engine=zero2", "parallel.layout=contiguous", *LORA), ("engine=zero3",), ("engine=zero3", *LORA),
          ("engine=zero2", "engine.offload=optimizer"), ("engine=fsdp2", *LORA)]  # fmt: skip


def journals(world_size: int, function: Any, *args: Any) -> list[Any]:
    return run_ranks(delayed_rank, world_size, (function, *args), preload=(*PRELOAD, "deepspeed"), timeout=TIMEOUT)


def stepping(spec: RankSpec, cfgs: Sequence[Config]) -> list[list[Call]]:
    """Take two steps with each configuration, and return the calls of each."""
    reducing.BUCKET = 1 << 10  # several buckets, of a model this small
    reducing.IN_FLIGHT = 1 << 10  # a defect is to be told by its order; with few in flight the ranks would hang
    found = []
    for cfg in cfgs:
        JOURNAL.clear()
        train_steps(spec, cfg, 2)
        found.append(list(JOURNAL))
    return found


@pytest.mark.parametrize("cases", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["usual", "others"])
def test_ranks_begin_in_orders_that_fit_together(cases: Sequence[Sequence[str]]) -> None:
    """All collectives, and all messages of both rings."""
    by_rank = journals(4, stepping, [compose_config([*BASE, *case]) for case in cases])
    for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert disorder(of_ranks) is None, case
        ring = [call for call in of_ranks[0] if call.ranks == (0, 1)]
        assert len(ring) > 8, case
        assert between(of_ranks[0]) > 2, case


def between(journal: Sequence[Call]) -> int:
    """Count how often a rank goes from its ring's calls to those of the world."""
    return sum(one.ranks == (0, 1) != other.ranks for one, other in itertools.pairwise(journal))


class Talk(torch.autograd.Function):
    """The identity, whose backward pass speaks to the ring, as attention's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(grads[0].clone(), group=ctx.group)
        return grads[0], None


def without_a_gradient(spec: RankSpec, at_the_end: bool) -> list[Call]:
    """Let rank 0 lack the gradient that would be sent first."""
    reducing.BUCKET = 1
    world, ring = build_world(1), dist.new_group([0, 1])
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    mean = reducing.Reducing(parameters, world, at_the_end=at_the_end)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(mean.arrived)
    hidden = Talk.apply(Talk.apply(parameters[0] * 1, ring) * parameters[1], ring)
    JOURNAL.clear()
    with mean.during(last=True):
        (hidden * parameters[2] if spec.rank else hidden).sum().backward()
    assert [parameter.grad is not None for parameter in parameters] == [True] * 3
    return list(JOURNAL)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_gradient_that_one_rank_lacks_changes_no_order_at_the_end(at_the_end: bool) -> None:
    found = disorder(journals(2, without_a_gradient, at_the_end))
    assert found is None if at_the_end else found is not None
