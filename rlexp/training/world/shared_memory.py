"""Memory that the ranks of a machine share: one of them fills it, the others map it.

The memory has no name in any file system (`memfd_create`). The others open it by the process that made it, under
`/proc`. So nothing is left behind, however the ranks end, and it does not matter how large /dev/shm is. It lasts until
the last rank that mapped it lets it go.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlexp.base.errors import UserError
from rlexp.base.host_memory import host_memory
from rlexp.training.world.objects import BOOT, gather_objects

ALIGNED = 64  # bytes: where each tensor begins
GIB = 1 << 30


@dataclass(frozen=True)
class Neighbours:
    """The ranks that can map this rank's memory, and this rank. The first of them leads: it fills the memory."""

    rank: int
    ranks: tuple[int, ...]
    world_size: int

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]


class Mapped(mmap.mmap):
    """Memory that is mapped here. CUDA lets go of it before it is unmapped: a finalizer of `weakref` runs after."""

    pinned: int | None = None  # the address that CUDA knows

    def __del__(self) -> None:
        if self.pinned is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.pinned)


def meet(rank: int, world_size: int) -> Neighbours:
    """Find the ranks that can share memory with this one, by trying. A collective call.

    Ranks of other machines cannot, nor those in another container.
    """
    nonce = secrets.token_bytes(16)
    fd = os.memfd_create("rlexp-meeting")
    try:
        os.write(fd, nonce)
        cards = gather_objects((_kernel(), os.getpid(), fd, nonce), world_size)
        opened = [each for each, card in enumerate(cards[:rank]) if _opens(*card)]
        first = gather_objects(min([*opened, rank]), world_size)
    finally:
        os.close(fd)
    leaders = [leader if first[leader] == leader else each for each, leader in enumerate(first)]
    return Neighbours(rank, tuple(each for each in range(world_size) if leaders[each] == leaders[rank]), world_size)


def _kernel() -> str:
    """Name the kernel and the namespace of process numbers: only where both are the same does a number mean much."""
    with contextlib.suppress(OSError):
        return f"{BOOT.read_text(encoding='ascii')} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _opens(kernel: str, pid: int, fd: int, nonce: bytes) -> bool:
    if not kernel or kernel != _kernel():
        return False
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb", opener=_without_waiting) as file:
            return file.read(len(nonce)) == nonce
    except OSError:
        return False


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe of another process would wait for its other end


def share(tensors: Mapping[str, Tensor], among: Neighbours, *, what: str, pinned: bool) -> dict[str, Tensor]:
    """Return the leader's tensors in memory that all neighbours share. A collective call of the whole world.

    The others give tensors of the same shapes and dtypes, whose values are not read: they may be on `meta`. With
    `pinned`, copies to a GPU run beside its computation. `what` says in an error what the memory is for.
    """
    size = max(sum(map(_aligned, tensors.values())), ALIGNED)
    fd = memory = failed = None
    if among.leads:
        try:
            fd, memory = _filled(tensors, size, what)
        except UserError as error:
            failed = error
    answers = gather_objects((failed, os.getpid(), fd), among.world_size)
    if (refused := next((error for error, *_ in answers if error is not None), None)) is not None:
        raise refused
    if memory is None:
        _, pid, theirs = answers[among.ranks[0]]
        other = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR)
        memory = _mapped(other, size)
        os.close(other)
    gather_objects(None, among.world_size)  # all have opened it
    if fd is not None:
        os.close(fd)
    if pinned:
        _pin(memory, size, what)
    return _views(memory, tensors)


def _aligned(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes up in the memory."""
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _filled(tensors: Mapping[str, Tensor], size: int, what: str) -> tuple[int, Mapped]:
    """Make the memory and copy the tensors there, which lose their own one by one."""
    fd = os.memfd_create("rlexp-shared")
    try:
        os.truncate(fd, size)
        mapped = _mapped(fd, size)
        for name, view in _views(mapped, tensors).items():
            _refuse_more_than_is_free(view.nbytes, size, what)
            view.copy_(tensors[name].detach())
            tensors[name].data = view
    except BaseException:
        os.close(fd)
        raise
    return fd, mapped


def _refuse_more_than_is_free(more: int, size: int, what: str) -> None:
    """Refuse to write so many bytes more: the kernel would not refuse it, but kill a process. It is asked before each
    tensor, whose own memory is then free for the next."""
    memory = host_memory()
    if memory is not None and more > memory.available:
        raise UserError(
            f"{what}: shares {size / GIB:.1f} GiB of this machine's memory among its ranks, of which the next "
            f"{more / GIB:.1f} GiB are missing: {memory.available / GIB:.1f} GiB are free. Leave it out, or use a "
            f"machine with more memory."
        )


def _mapped(fd: int, size: int) -> Mapped:
    return Mapped(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _views(mapped: Mapped, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the memory's tensors, of the shapes and dtypes of these."""
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor)
    return views


def _pin(mapped: Mapped, size: int, what: str) -> None:
    """Let the GPU copy from this memory by itself. Where CUDA refuses, copies are as right, and the host waits."""
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, size, 0))
    if code == 0:
        mapped.pinned = address
        return
    with contextlib.suppress(RuntimeError):  # CUDA tells its last error to whoever asks next: here, and nowhere else
        torch.zeros(1, device="cuda")
    sys.stderr.write(
        f"rlexp: {what}: CUDA cannot pin {size / GIB:.1f} GiB of the host's memory (error {code}), so the GPU waits "
        f"for each copy. A limit of locked memory (`ulimit -l`) may be the reason.\n"
    )
