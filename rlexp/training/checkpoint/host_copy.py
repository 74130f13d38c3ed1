"""A copy of the state in the host's memory, on its way to a file: taken at one moment, while training goes on.

The copy is cut into pieces of one size. Training copies them in turn, and a thread writes them. A piece's memory is
used again when it is written. Where there is memory for the whole state, training waits for the copy alone. With less,
it also waits for the disk, until the last piece is copied.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from rlexp.launch import watch

# Bytes of a piece: many, so that copies are as fast as one; and a power of two, to which torch rounds pinned memory up.
PIECE = 1 << 26
LEAST = 1 << 12
WIDEST = 8  # bytes of the widest element: pieces begin at a multiple
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Parts = Sequence[tuple[int, Tensor]]  # of a piece: the byte at which each begins, and flat elements


@dataclass(frozen=True)
class Laid:
    """Flat tensors, in the order in which they lie in a safetensors file: the widest elements first. So each begins
    at a multiple of its size."""

    tensors: tuple[tuple[str, Tensor], ...]
    starts: Mapping[str, int]  # the element of its parameter at which each begins

    @staticmethod
    def of(tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> Laid:
        flat = {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}
        return Laid(tuple(sorted(flat.items(), key=lambda each: (-each[1].element_size(), each[0]))), starts)

    @property
    def size(self) -> int:  # bytes
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @property
    def device(self) -> torch.device | None:
        """The accelerator from which something is copied; None if all is in the host's memory."""
        return next((tensor.device for _, tensor in self.tensors if tensor.device.type != "cpu"), None)

    def header(self) -> bytes:
        """Return what stands before the elements in the file."""
        entries: dict[str, Any] = {"__metadata__": {"starts": json.dumps(dict(self.starts))}}
        at = 0
        for name, tensor in self.tensors:
            reach = at + tensor.nbytes
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [at, reach]}
            at = reach
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % WIDEST)
        return len(text).to_bytes(8, "little") + text

    def pieces(self, size: int) -> Iterator[Parts]:
        """Cut all elements into pieces of so many bytes; the last one may be shorter."""
        parts: list[tuple[int, Tensor]] = []
        filled = 0
        for _, tensor in self.tensors:
            taken = 0
            while taken < tensor.numel():
                count = min(tensor.numel() - taken, (size - filled) // tensor.element_size())
                parts.append((filled, tensor[taken : taken + count]))
                taken, filled = taken + count, filled + count * tensor.element_size()
                if filled == size:
                    yield parts
                    parts, filled = [], 0
        if parts:
            yield parts


@dataclass(frozen=True)
class _Piece:
    memory: Tensor  # bytes
    filled: int
    copied: Any  # an event of the device, or None

    def content(self) -> memoryview:
        if self.copied is not None:
            self.copied.synchronize()
        return self.memory[: self.filled].numpy().data


class HostCopy:
    """The memory for the copies, and their way to whoever writes them. It takes at most so many bytes.

    The memory is kept from save to save: allocating 12 bytes per parameter takes many times as long as copying them.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._size, self._made = 0, 0  # bytes of a piece, and pieces with memory
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._full: SimpleQueue[_Piece | None] = SimpleQueue()
        self._open = False  # whether pieces may still come

    def prepare(self, laid: Laid) -> None:
        """Allocate the memory and touch it. It may run in a thread, since training does not need it."""
        size, count = sizes(laid.size, self._most)
        if size != self._size:
            self._free, self._size, self._made = SimpleQueue(), size, 0
        pinned = laid.device is not None and laid.device.type == "cuda"
        while self._made < count:
            self._free.put(torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_())
            self._made += 1

    def begin(self) -> None:
        """Expect one state. Call it before `copy`, and before a thread calls `drain`."""
        self._full, self._open = SimpleQueue(), True

    def copy(self, laid: Laid | None) -> None:
        """Copy the state, or nothing. It may change again when this returns."""
        try:
            if laid is not None:
                self._copy(laid)
        finally:
            self._full.put(None)

    def _copy(self, laid: Laid) -> None:
        with watch.elsewhere():  # until the memory of a machine is pinned
            self.prepare(laid)
        device = laid.device
        kind = None if device is None else torch.get_device_module(device)
        waiting: list[_Piece] = []  # where all have memory: writing would only slow the copying down
        whole = self._made * self._size >= laid.size
        for parts in laid.pieces(self._size):
            with watch.elsewhere():  # until the disk has taken a piece
                memory = self._free.get()
            piece = _filled(memory, parts, kind)
            waiting.append(piece) if whole else self._full.put(piece)
        if kind is not None:
            kind.synchronize()
        for piece in waiting:
            self._full.put(piece)

    def drain(self, write: Callable[[memoryview], object]) -> None:
        """Write each piece and use its memory again, until `copy` ends. An error is raised when all have come: `copy`
        must not wait for ever."""
        failed: Exception | None = None
        while self._open:
            piece = self._full.get()
            if piece is None:
                self._open = False
                break
            if failed is None:
                try:
                    write(piece.content())
                except Exception as error:
                    failed = error
            self._free.put(piece.memory)
        if failed is not None:
            raise failed

    def let_go(self) -> None:
        """Drop the pieces that nobody has written."""
        with contextlib.suppress(Exception):
            self.drain(lambda _: None)


def sizes(held: int, most: int | None) -> tuple[int, int]:
    """Return the bytes of a piece and how many pieces have memory, for a state of so many bytes.

    There are at least two if one is not enough: one is copied while the other is written.
    """
    size = PIECE if most is None else max(min(PIECE, 1 << max((most // 2).bit_length() - 1, 0)), LEAST)
    size = max(min(size, -(-held // WIDEST) * WIDEST), WIDEST)
    needed = -(-held // size)
    return size, needed if most is None else min(needed, max(most // size, 2))


def _filled(memory: Tensor, parts: Parts, kind: Any) -> _Piece:
    filled = 0
    for start, flat in parts:
        filled = start + flat.nbytes
        memory[start:filled].view(flat.dtype).copy_(flat, non_blocking=True)
    if kind is None:
        return _Piece(memory, filled, None)
    copied = kind.Event()
    copied.record()
    return _Piece(memory, filled, copied)
