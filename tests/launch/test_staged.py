"""The process group for ranks that share a GPU, over tensors of the CPU: what it carries, and when it arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from rlexp.config.schema import Collectives
from rlexp.launch import staged
from rlexp.launch.joining import RankSpec, join, launch_on
from rlexp.launch.local import PRELOAD, run_ranks
from tests.helpers.ranks import COLLECTIVE_TIMEOUT, TIMEOUT

RANKS = 4


def on_staged_ranks(function: Any, *args: Any) -> list[Any]:
    return run_ranks(_joined, RANKS, (function, args), preload=(*PRELOAD, "deepspeed"), timeout=TIMEOUT)


def _joined(spec: RankSpec, function: Any, args: Any) -> Any:
    join(spec, launch_on("cpu", COLLECTIVE_TIMEOUT, collectives=Collectives.staged))
    assert dist.get_backend() == staged.NAME
    return function(spec, *args)


def carried(spec: RankSpec) -> dict[str, Any]:
    """Return what each kind of collective gives, beside what it must give."""
    rank, ranks = spec.rank, spec.world_size
    others = [float(each) for each in range(ranks)]
    mine = torch.tensor([float(rank)])
    found: dict[str, Any] = {}

    def keep(name: str, got: torch.Tensor, wanted: list[float]) -> None:
        found[name] = (got.flatten().tolist(), wanted)

    for op, wanted in ((dist.ReduceOp.SUM, sum(others)), (dist.ReduceOp.AVG, sum(others) / ranks),
                       (dist.ReduceOp.MAX, ranks - 1.0)):  # fmt: skip
        dist.all_reduce(x := mine.clone(), op=op)
        keep(f"all_reduce {op}", x, [wanted])
    dist.reduce(x := mine.clone(), 1)
    keep("reduce", x, [sum(others) if rank == 1 else float(rank)])
    dist.broadcast(x := mine.clone(), 2)
    keep("broadcast", x, [2.0])
    dist.all_gather(parts := [torch.empty(1) for _ in others], mine)
    keep("all_gather", torch.stack(parts), others)
    dist.all_gather_into_tensor(x := torch.empty(ranks), mine)
    keep("all_gather_into_tensor", x, others)
    dist.reduce_scatter_tensor(x := torch.empty(2), torch.arange(2.0 * ranks), op=dist.ReduceOp.AVG)
    keep("reduce_scatter_tensor", x, [2.0 * rank, 2.0 * rank + 1])
    dist.reduce_scatter(x := torch.empty(1), [mine + each for each in others])
    keep("reduce_scatter", x, [sum(others) + ranks * rank])
    dist.all_to_all_single(x := torch.empty(ranks), 10 * mine + torch.tensor(others))
    keep("all_to_all_single", x, [10 * each + rank for each in others])
    turned = torch.arange(6.0).view(2, 3).T  # no tensor of a collective need be contiguous
    dist.all_reduce(turned)
    keep("all_reduce of a view", turned, [ranks * each for each in (0.0, 3.0, 1.0, 4.0, 2.0, 5.0)])
    keep("functional", functional.all_reduce(mine, "sum", dist.group.WORLD), [sum(others)])
    device = torch.device("cpu")
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as together:
        gathered = [torch.empty(ranks) for _ in range(2)]
        for number, into in enumerate(gathered):
            dist.all_gather_into_tensor(into, mine + number, async_op=True)
    together.wait()
    keep("together", torch.stack(gathered), others + [each + 1 for each in others])
    pair = dist.new_group([0, 3])
    if rank in (0, 3):
        dist.all_reduce(x := mine.clone(), group=pair)
        keep("a group of two", x, [3.0])
    dist.barrier()
    return found


def messages(spec: RankSpec) -> tuple[int, bool, int]:
    """Send to the right; return what the buffer held before and after this rank waited, and whether it was sent as it
    was when the message began."""
    right, left = (spec.rank + 1) % spec.world_size, (spec.rank - 1) % spec.world_size
    going, coming = torch.tensor([spec.rank]), torch.tensor([-1])
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, going, right), dist.P2POp(dist.irecv, coming, left)])
    going.fill_(77)  # what is copied at once cannot be written too early
    dist.barrier()  # time for the bytes to come, and nobody has waited for them
    before = int(coming)
    for work in works:
        work.wait()
    return before, all(work.is_completed() for work in works), int(coming)


def test_every_collective_gives_what_gloo_gives() -> None:
    for rank, found in enumerate(on_staged_ranks(carried)):
        assert len(found) == (14 if rank in (0, 3) else 13)
        for name, (got, wanted) in found.items():
            assert got == pytest.approx(wanted), (rank, name)


def test_nothing_arrives_before_it_is_waited_for() -> None:
    """As over NCCL, where what a stream has not waited for may not be there."""
    assert on_staged_ranks(messages) == [(-1, True, 3), (-1, True, 0), (-1, True, 1), (-1, True, 2)]
