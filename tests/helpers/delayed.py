"""The delayed group: a process group that starts late what it is asked for, and gives results only to who waits.

NCCL returns before it has read anything, and torch's ranks on CPU mostly read at once. So on CPU two defects stay
unseen: a message whose buffer is written again too early, and a result that is read before it is there. This group
shows both, on either device, and keeps a journal of all calls. It reads an input when its rank waits for the first time
after the call, for whatever it be. An output changes only when its own call is waited for.

On a GPU the group has a stream of its own, and reads after a sleep on it. To wait is then an order to the current
stream, as with NCCL.

    begin(rank, size, played=True)    one process plays a world: all other ranks have the same values
    delayed_rank(spec, function, …)   a rank of a real world, over gloo, all of whose groups are delayed
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlexp.launch.joining import RankSpec, join, launch_on

NAME, PLAYED = "delayed", "delayed_played"
PATIENCE = timedelta(seconds=240)
SLEEP = 20_000_000  # a GPU's cycles: 10 ms
Start = Callable[[list[Tensor], list[Tensor]], Any]  # inputs and outputs of its own; returns what to wait for, if any


class Played:
    """The other ranks, played: they hold what this rank holds. All groups of a process note what they read of sums."""

    summed: ClassVar[list[Tensor]] = []

    def __init__(self, rank: int, size: int) -> None:
        self.place, self.ranks = rank, size

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None:
        (tensor,) = tensors
        if opts.reduceOp == dist.ReduceOp.SUM:
            self.summed.append(tensor.clone())
            tensor.mul_(self.ranks)

    def broadcast(self, _tensors: list[Tensor], _opts: Any) -> None: ...

    def barrier(self, _opts: Any) -> None: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _opts: Any) -> None:
        for output in outputs[0]:
            output.copy_(inputs[0])

    def _allgather_base(self, output: Tensor, mine: Tensor, _opts: Any) -> None:
        output.view(self.ranks, -1).copy_(mine.view(1, -1))

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, _opts: Any) -> None:
        self.summed.append(given.clone())
        output.view(-1).copy_(given.view(self.ranks, -1)[self.place]).mul_(self.ranks)

    def alltoall_base(self, output: Tensor, given: Tensor, *_how: Any) -> None:
        output.view(self.ranks, -1).copy_(given.view(self.ranks, -1)[self.place])


@dataclass(frozen=True)
class Call:
    """One call of a group, in the journal of a rank. Messages that are posted together have the same batch."""

    kind: str
    group: str
    ranks: tuple[int, ...]  # of the group
    size: int  # bytes that this rank reads, or of a message that it receives
    peer: int | None  # of a message
    batch: int | None


JOURNAL: list[Call] = []  # all calls of this process, over all groups, in their order
BATCHES: list[int | None] = [None]  # the batch of the messages that are posted now, last


@contextlib.contextmanager
def batches() -> Iterator[None]:
    """Note which messages torch is given together: NCCL begins them as one."""
    post, numbers = dist.batch_isend_irecv, itertools.count()

    def posted(operations: list[Any]) -> list[Any]:
        BATCHES.append(next(numbers))
        try:
            return post(operations)
        finally:
            BATCHES.pop()

    dist.batch_isend_irecv = posted  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = post


class Later(dist.Work):
    """One call of a group, from the moment at which it is posted."""

    def __init__(self, reads: Sequence[Tensor], writes: Sequence[Tensor], start: Start) -> None:
        super().__init__()
        self.reads, self.writes, self.start = list(reads), list(writes), start
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.under_way: Any = None
        self.done = False
        device = (*self.reads, *self.writes)[0].device if self.reads or self.writes else torch.device("cpu")
        self.stream = stream_of(device)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(SLEEP)
                self.read()

    def read(self) -> None:
        self.inputs = [tensor.clone() for tensor in self.reads]
        self.outputs = [torch.zeros_like(tensor) for tensor in self.writes]

    def begin(self) -> None:
        if self.stream is None:
            self.read()
            self.under_way = self.start(self.inputs, self.outputs)
        else:
            with torch.cuda.stream(self.stream):
                self.under_way = self.start(self.inputs, self.outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        if self.done:
            return True
        begin_all()
        if self.under_way is not None:
            self.under_way.wait()
        if self.stream is None:
            self.hand_over()
        else:
            with torch.cuda.stream(self.stream):
                self.hand_over()
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self.done = True
        return True

    def hand_over(self) -> None:
        for given, made in zip(self.writes, self.outputs, strict=True):
            given.copy_(made)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done

    def result(self) -> list[Tensor]:
        return self.writes


POSTED: list[Later] = []  # what has not begun, in the order of the calls, over all groups
STREAMS: dict[torch.device, Any] = {}


def stream_of(device: torch.device) -> Any:
    """Return the groups' own stream on a GPU; None on CPU."""
    if device.type != "cuda":
        return None
    if device not in STREAMS:
        STREAMS[device] = torch.cuda.Stream(device)
    return STREAMS[device]


def begin_all() -> None:
    """Begin what was posted, in this order. A rank that waits could else keep another from what it has posted."""
    while POSTED:
        POSTED.pop(0).begin()


class Delayed(dist.ProcessGroup):
    """A group whose calls are carried out later, by gloo or by played ranks."""

    def __init__(self, rank: int, size: int, carrier: Any) -> None:
        super().__init__(rank, size)
        self.carrier = carrier
        self.together: list[Later] | None = None  # the calls since torch said that some are waited for together

    def _start_coalescing(self, _device: Any) -> None:
        self.together = []

    def _end_coalescing(self, _device: Any) -> Later:
        works, self.together = self.together, None
        return Several(works or [])

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _post(
        self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], start: Start, peer: int | None = None
    ) -> Later:
        other = None if peer is None else dist.get_global_rank(self, peer)
        size = sum(each.nbytes for each in reads or writes)
        ranks = tuple(dist.get_process_group_ranks(self))
        JOURNAL.append(Call(kind, self.group_name, ranks, size, other, BATCHES[-1]))
        work = Later(reads, writes, start)
        if self.together is not None:
            self.together.append(work)
        if isinstance(self.carrier, Played) and work.stream is not None:
            work.begin()  # nothing that the host must wait for
        else:
            POSTED.append(work)
        return work

    # ---- sums ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Later:
        how = opts or dist.AllreduceOptions()

        def start(inputs: list[Tensor], outputs: list[Tensor]) -> Any:
            for output, given in zip(outputs, inputs, strict=True):
                output.copy_(given)
            return self.carrier.allreduce(outputs, how)

        return self._post("all-reduce", tensors, tensors, start)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Later:
        return Several([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Later:
        def start(inputs: list[Tensor], outputs: list[Tensor]) -> Any:
            outputs[0].copy_(inputs[0])
            return self.carrier.reduce(outputs, opts or dist.ReduceOptions())

        return self._post("reduce", tensors, tensors, start)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Later:
        how = opts or dist.ReduceScatterOptions()
        return self._post(
            "reduce-scatter", [given], [output], lambda i, o: self.carrier._reduce_scatter_base(o[0], i[0], how)
        )

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Later:
        works = [self._reduce_scatter_base(out, x, opts) for out, x in zip(outputs, given, strict=True)]
        return works[-1] if len(works) == 1 else Several(works)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # ---- copies ----

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Later:
        def start(inputs: list[Tensor], outputs: list[Tensor]) -> Any:
            outputs[0].copy_(inputs[0])
            return self.carrier.broadcast(outputs, opts or dist.BroadcastOptions())

        return self._post("broadcast", tensors, tensors, start)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Later:
        how = opts or dist.AllgatherOptions()
        return self._post("all-gather", inputs, outputs[0], lambda i, o: self.carrier.allgather([o], i, how))

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Later:
        how = opts or dist.AllgatherOptions()
        return self._post("all-gather", [mine], [output], lambda i, o: self.carrier._allgather_base(o[0], i[0], how))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], given: list[Tensor], opts: Any = None) -> Later:
        works = [self._allgather_base(out, x, opts) for out, x in zip(outputs, given, strict=True)]
        return works[-1] if len(works) == 1 else Several(works)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def alltoall_base(self, output: Tensor, given: Tensor, to: Any, of: Any, opts: Any = None) -> Later:
        how = opts or dist.AllToAllOptions()
        return self._post(
            "all-to-all", [given], [output], lambda i, o: self.carrier.alltoall_base(o[0], i[0], to, of, how)
        )

    all_to_all_single = alltoall_base

    # ---- messages ----

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Later:
        return self._post("send", tensors, [], lambda i, _: self.carrier.send(i, to, tag), to)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Later:
        return self._post("recv", [], tensors, lambda _, o: self.carrier.recv(o, source, tag), source)

    def barrier(self, opts: Any = None) -> Later:
        return self._post("barrier", [], [], lambda *_: self.carrier.barrier(opts or dist.BarrierOptions()))


class Several(Later):
    """Calls that are waited for together."""

    def __init__(self, works: Sequence[Later]) -> None:
        dist.Work.__init__(self)
        self.works, self.writes = works, [each for work in works for each in work.writes]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    is_success = is_completed


def over_gloo(options: Any, _more: Any) -> Delayed:
    rank, size = options.group_rank, options.group_size
    return Delayed(rank, size, dist.ProcessGroupGloo(options.store, rank, size, PATIENCE))


def among_played(options: Any, _more: Any) -> Delayed:
    rank, size = options.group_rank, options.group_size
    return Delayed(rank, size, Played(rank, size))


def register() -> None:
    for name, create in ((NAME, over_gloo), (PLAYED, among_played)):
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])


def begin_played(rank: int, size: int) -> Played:
    """Make this process a rank of a world whose other ranks are played."""
    register()
    dist.init_process_group(PLAYED, store=dist.HashStore(), rank=rank, world_size=size)
    group: Any = dist.group.WORLD
    played: Played = group.carrier
    return played


def delayed_rank(spec: RankSpec, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank of a real world on CPU whose groups are all delayed: `run_ranks(delayed_rank, size, (function, …))`.

    A rank that has joined already leaves its group, and joins anew."""
    register()
    begin, new_group = dist.init_process_group, dist.new_group

    def begin_delayed(_backend: str, **how: Any) -> None:
        begin(NAME, **how)

    def new_delayed(ranks: Any = None, timeout: Any = None, **_how: Any) -> Any:
        return new_group(ranks, timeout=timeout, backend=NAME)

    dist.init_process_group, dist.new_group = begin_delayed, new_delayed  # type: ignore[assignment]
    try:
        join(spec, launch_on("cpu", PATIENCE.total_seconds()))
        with batches():
            return function(spec, *args)
    finally:
        dist.init_process_group, dist.new_group = begin, new_group
