"""Streams of a GPU, played on CPU: which memory is given away while another stream may still use it.

torch's allocator gives freed memory to the stream on which it was allocated, and does not ask what other streams do
with it, unless `record_stream` was called. So a stream must not allocate between the end of a tensor of its own and its
waiting for the others that used it. Everything here runs at once and in order; what is noted is whether this rule was
kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.waits(self, other, self.streams.now)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.streams.waits(self, event.stream, event.at)

    def synchronize(self) -> None:
        for stream in self.streams.all:
            self.streams.waits(stream, self, self.streams.now)


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.at = streams, 0
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.at = stream or self.streams.current, self.streams.now

    def synchronize(self) -> None:
        for stream in self.streams.all:
            stream.wait_event(self)

    def query(self) -> bool:
        return False


class Streams(TorchDispatchMode):
    """All streams of a device, and which of them use which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = Stream(self, "computing")
        self.all, self.current = [self.computing], self.computing
        self.now = 0  # operators so far
        self.memory: dict[int, tuple[StorageWeakRef, Stream]] = {}  # and the stream of each, by its address
        self.used: dict[int, dict[Stream, tuple[int, str]]] = {}  # by others: when last, and by which operator
        self.recorded: set[tuple[int, Stream]] = set()
        self.freed: list[tuple[Stream, Stream, int, str]] = []  # memory of a stream, and when which other last used it
        self.lost: list[str] = []  # what was given away too early

    def made(self, *_args: Any, **_kwargs: Any) -> Stream:
        self.all.append(Stream(self, f"stream {len(self.all)}"))
        return self.all[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collect()
        self.now += 1
        result = operator(*args, **(kwargs or {}))
        given = [self._address(x, self.computing) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = len(self.memory)
        made = [self._address(x, self.current) for x in tree_leaves(result) if isinstance(x, Tensor)]
        if len(self.memory) > known:
            self.give_away()
        for address in {*given, *made}:
            if self.memory[address][1] is not self.current:
                self.used.setdefault(address, {})[self.current] = (self.now, str(operator))
        return result

    def _address(self, tensor: Tensor, home: Stream) -> int:
        storage = tensor.untyped_storage()
        self.memory.setdefault(storage._cdata, (StorageWeakRef(storage), home))
        return int(storage._cdata)

    def collect(self) -> None:
        """Take note of the memory that was let go of since."""
        for address in [each for each, (memory, _) in self.memory.items() if memory.expired()]:
            _, home = self.memory.pop(address)
            for user, (at, operator) in self.used.pop(address, {}).items():
                if (address, user) not in self.recorded:
                    self.freed.append((home, user, at, operator))
            self.recorded = {each for each in self.recorded if each[0] != address}

    def give_away(self) -> None:
        """Give what was freed of the current stream's memory to a new tensor."""
        for home, user, _, operator in self.freed:
            if home is self.current:
                self.lost.append(f"memory of {home.name}, used on {user.name} by {operator}")
        self.freed = [each for each in self.freed if each[0] is not self.current]

    def waits(self, waiting: Stream, other: Stream, until: int) -> None:
        self.collect()
        for address, users in self.used.items():
            if self.memory[address][1] is waiting and other in users and users[other][0] <= until:
                del users[other]
        self.freed = [each for each in self.freed if (each[0], each[1]) != (waiting, other) or each[2] > until]

    def synchronize(self, _device: Any = None) -> None:
        for stream in self.all:
            stream.synchronize()

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self.recorded.add((self._address(tensor, self.computing), stream))


@contextlib.contextmanager
def for_deepspeed() -> Iterator[Streams]:
    """Let DeepSpeed take this process's CPU for a device with streams."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    streams, before = Streams(), torch.Tensor.record_stream

    class WithStreams(CPU_Accelerator):
        Stream = staticmethod(streams.made)
        stream = staticmethod(streams.on)
        synchronize = staticmethod(streams.synchronize)

        @property
        def Event(self) -> Any:  # noqa: N802
            return lambda *_, **_how: Event(streams)

        def is_synchronized_device(self) -> bool:
            return False

        def current_stream(self, _device: Any = None) -> Stream:
            return streams.current

        def default_stream(self, _device: Any = None) -> Stream:
            return streams.computing

    real_accelerator.set_accelerator(WithStreams())
    torch.Tensor.record_stream = lambda self, stream: streams.record(self, stream)  # type: ignore[method-assign]
    try:
        with streams:
            yield streams
    finally:
        torch.Tensor.record_stream = before  # type: ignore[method-assign]
        real_accelerator.set_accelerator(CPU_Accelerator())
