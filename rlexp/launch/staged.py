"""Collectives and messages through the host's memory, for ranks that share a GPU: NCCL refuses two ranks on one.

A process group of torch's, of which every tensor is copied to the host, travels by gloo, and is copied back where its
receiver waits for it. So a tensor that is read before anyone waited for it is a tensor that has not arrived, as over
NCCL. It is slow: what two ranks of one GPU tell each other leaves the GPU, and comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"  # of the backend, as torch knows it
Landing = Callable[[], None]


def register() -> str:
    """Make the backend known to torch, and return its name."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])
    return NAME


_Group: Any = dist.ProcessGroup  # its methods are overloaded in torch's types, under the names of one version


class Staged(_Group):
    """What we, DeepSpeed and FSDP2 call of a process group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        for kind in ("cpu", "cuda"):  # torch keeps a group's name and devices in its backends
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._ranks = size
        self._together: list[dist.Work] | None = None  # what was begun since `_start_coalescing`

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def shutdown(self) -> None:
        self._gloo = None

    # ---- sums ----

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        op, land = self._summing(tensors, opts)
        asked = dist.AllreduceOptions()
        asked.reduceOp = op
        held = [_copy(x) for x in tensors]
        return self._begin(self._gloo.allreduce(held, asked), lambda: land(held))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return _All([self.allreduce([x], opts) for x in tensors])

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        op, land = self._summing(tensors, opts)
        asked = dist.ReduceOptions()
        asked.reduceOp, asked.rootRank, asked.rootTensor = op, opts.rootRank, opts.rootTensor
        held, is_root = [_copy(x) for x in tensors], opts.rootRank == self.rank()
        return self._begin(self._gloo.reduce(held, asked), lambda: land(held) if is_root else None)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        op, land = self._summing([output], opts)
        asked = dist.ReduceScatterOptions()
        asked.reduceOp = op
        held, going = _like(output), _copy(given)
        begun = _named(self._gloo, "reduce_scatter_single", "_reduce_scatter_base")(held, going, asked)
        return self._begin(begun, lambda: land([held]), going)

    def reduce_scatter(self, outputs: Sequence[Tensor], given: Any, opts: Any = None) -> dist.Work:
        works = []
        for output, parts in zip(outputs, given, strict=True):
            flat = torch.cat([part.reshape(-1) for part in parts])
            works.append(self.reduce_scatter_single(output, flat, opts))
        return _All(works)

    def reduce_scatter_single_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        return _All([self.reduce_scatter_single(*each, opts) for each in zip(outputs, given, strict=True)])

    def _summing(self, into: Sequence[Tensor], opts: Any) -> tuple[Any, Callable[[Sequence[Tensor]], None]]:
        """Return gloo's operation, and what writes its results. gloo has no mean."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        mean = op == dist.ReduceOp.AVG

        def land(held: Sequence[Tensor]) -> None:
            for x, arrived in zip(into, held, strict=True):
                _land(x, arrived / self._ranks if mean else arrived)

        return dist.ReduceOp.SUM if mean else op, land

    # ---- copies ----

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        asked = dist.BroadcastOptions()
        asked.rootRank, asked.rootTensor = opts.rootRank, opts.rootTensor
        held = [_copy(x) for x in tensors]
        is_root = opts.rootRank == self.rank()
        return self._begin(self._gloo.broadcast(held, asked), lambda: None if is_root else _land_all(tensors, held))

    def allgather(self, outputs: Any, given: Sequence[Tensor], _opts: Any = None) -> dist.Work:
        held, going = [[_like(x) for x in each] for each in outputs], [_copy(x) for x in given]

        def land() -> None:
            for into, arrived in zip(outputs, held, strict=True):
                _land_all(into, arrived)

        return self._begin(self._gloo.allgather(held, going), land, going)

    def all_gather_single(self, output: Tensor, given: Tensor, _opts: Any = None) -> dist.Work:
        held, going = _like(output), _copy(given)
        begun = _named(self._gloo, "all_gather_single", "_allgather_base")(held, going)
        return self._begin(begun, lambda: _land(output, held), going)

    def all_gather_single_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> dist.Work:
        return _All([self.all_gather_single(*each, opts) for each in zip(outputs, given, strict=True)])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, sizes: list[int], given_sizes: list[int], _opts: Any = None
    ) -> dist.Work:
        held, going = _like(output), _copy(given)
        begun = _named(self._gloo, "all_to_all_single", "alltoall_base")(held, going, sizes, given_sizes)
        return self._begin(begun, lambda: _land(output, held), going)

    # ---- messages ----

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        going = [_copy(x) for x in tensors]
        return self._begin(self._gloo.send(going, to, tag), lambda: None, going)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        held = [_like(x) for x in tensors]
        return self._begin(self._gloo.recv(held, source, tag), lambda: _land_all(tensors, held))

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return self._begin(self._gloo.barrier(), lambda: None)

    # ---- several as one ----

    def _start_coalescing(self, _device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, _device: torch.device) -> dist.Work:
        works, self._together = self._together or [], None
        return _All(works)

    def _begin(self, begun: Any, land: Landing, *kept: Any) -> dist.Work:
        work = _Arriving(begun, land, kept)
        if self._together is not None:
            self._together.append(work)
        return work

    # The names that torch used before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class _Arriving(dist.Work):
    """Bytes on their way. Whoever waits for them copies them to where they belong, on the stream that waits."""

    def __init__(self, begun: Any, land: Landing, kept: Any) -> None:
        super().__init__()
        self._begun, self._land, self._kept = begun, land, kept

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002 - gloo waits as long as its group does
        if self._begun is not None:
            self._begun.wait()
            self._land()
            del self._land, self._kept
            self._begun = None
        return True

    def is_completed(self) -> bool:
        return self._begun is None  # what gloo has received has not landed yet


class _All(dist.Work):
    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _named(group: Any, *names: str) -> Any:
    """Return the first method that there is: torch 2.13 has renamed some."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _copy(x: Tensor) -> Tensor:
    """Copy to the host what the current stream has computed."""
    return x.detach().to("cpu", copy=True).contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _land(x: Tensor, arrived: Tensor) -> None:
    x.detach().copy_(arrived)


def _land_all(tensors: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
    for x, held in zip(tensors, arrived, strict=True):
        _land(x, held)
