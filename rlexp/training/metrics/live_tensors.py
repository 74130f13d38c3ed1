"""The bytes of live tensors, counted as they are made and freed: what a program holds, and not its process.

On a CPU every run of a small model peaks at the size of its libraries, whatever its ring. Live tensors fall with the
ring there too. A rehearsal counts the same way on tensors that have no memory.

Counting costs a call of Python for each operator, 9 µs. For a small model that is as long as the operator itself, so
that counting all of a step doubles its time; leaving out operators that return views would not help, since the call is
what costs. But a micro-batch hardly holds more than another unless it has more tokens, or more is held beside it:
gradients from the second micro-batch on, the optimizer's state from the second step on. So a run counts there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

OF_MICRO_BATCHES = ("data", "forward", "reference", "backward")  # phases that are counted with their micro-batch
OF_STEPS = ("collect", "optimizer")  # phases that are counted in a step of which a micro-batch is counted


@dataclass
class HeldBytes:
    """Bytes on one kind of device."""

    live: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        """Add bytes, or take them away. Another thread cannot come between: no line here calls a function."""
        self.live += size
        if self.live > self.peak:
            self.peak = self.live


class LiveTensors(TorchDispatchMode):
    """Count storages from the operator that makes them until they are freed.

    Memory inside a kernel is not seen, and tensors that existed before are seen by `find` only. A mode is its thread's,
    and that of the backward passes begun there. `changed` is called with the number of the storage, its device and the
    bytes that it has gained or lost. A mode that is `lasting` goes on to count what is freed after it was left, and can
    be entered again.
    """

    def __init__(self, changed: Callable[[int, str, int], None] | None = None, *, lasting: bool = False) -> None:
        super().__init__()
        self._lasting = lasting
        self._held: dict[str, HeldBytes] = {}
        self._known: dict[int, tuple[Any, int, str, int]] = {}  # by address: a weak reference, number, device, bytes
        self._made = 0
        self._changed = changed or (lambda *_: None)
        self._resize: Any = None

    def held(self, device: str) -> HeldBytes:
        held = self._held.get(device)
        return self._held.setdefault(device, HeldBytes()) if held is None else held

    def reset_peaks(self) -> None:
        for held in self._held.values():
            held.peak = held.live

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the tensor's storage, or None if it is not counted."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def sizes_on(self, device: str) -> dict[int, int]:
        """Return the bytes of all storages on a device, by number."""
        return {number: size for _, number, where, size in self._known.values() if where == device}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(wraps(each) for each in types):
            return NotImplemented  # the operators inside it come here
        made = func(*args, **(kwargs or {}))
        self.see(made)
        return made

    def counts(self, tensor: Tensor) -> bool:
        """Say whether a tensor has memory: those on which DTensor tries shapes have none."""
        return tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)

    def size_of(self, storage: Any, device: str) -> int:  # noqa: ARG002
        """Return the bytes that a storage takes on its device."""
        return int(storage.nbytes())

    def see(self, made: Any) -> None:
        """Count the storages of an operator's results."""
        if isinstance(made, Tensor):
            if not self.counts(made):
                return
            storage = made.untyped_storage()
            address, device = storage._cdata, made.device.type
            size = self.size_of(storage, device)
            known = self._known.get(address)
            if known is None:
                self._add(storage, address, device, size)
            elif known[3] != size:
                self._resized(address, size)
        elif isinstance(made, list | tuple):
            for each in made:
                self.see(each)

    def find(self) -> None:
        """Count the tensors that exist already: all that Python holds."""
        kinds = set(_kinds(Tensor))
        self.see([each for each in gc.get_objects() if type(each) in kinds])

    def _add(self, storage: Any, address: int, device: str, size: int) -> None:
        self._made += 1
        gone = weakref.ref(storage, functools.partial(self._free, address))
        self._known[address] = (gone, self._made, device, size)
        self._move(self._made, device, size)

    def _free(self, address: int, _gone: Any) -> None:
        if (known := self._known.pop(address, None)) is not None:
            _, number, device, size = known
            self._move(number, device, -size)

    def _resized(self, address: int, size: int) -> None:
        gone, number, device, before = self._known[address]
        self._known[address] = (gone, number, device, size)
        self._move(number, device, size - before)

    def _move(self, number: int, device: str, size: int) -> None:
        if size:
            self.held(device).add(size)
            self._changed(number, device, size)

    def __enter__(self) -> LiveTensors:
        """Look at `resize_` too, by which FSDP frees and takes back a storage: it is no operator."""
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._known.get(storage._cdata)) is not None:
                self._resized(storage._cdata, self.size_of(storage, known[2]))
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        for address, (reference, _, device, _) in list(self._known.items()):  # what was resized in the meantime
            if (storage := reference()) is not None:
                self._resized(address, self.size_of(storage, device))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)
        if not self._lasting:
            self._known.clear()  # what is freed from now on is not told


@functools.cache
def wraps(kind: type) -> bool:
    """Say whether a kind of tensor holds others, as a DTensor holds its local one, and has no memory of its own."""
    return hasattr(kind, "__tensor_flatten__")


def _kinds(kind: type) -> Iterator[type]:
    """Yield the kinds of tensors that have memory of their own."""
    if not wraps(kind) and not issubclass(kind, FakeTensor):
        yield kind
    inner: list[type] = type.__subclasses__(kind)
    for each in inner:
        yield from _kinds(each)


# ---- where a run counts ----


class TensorCount:
    """The live tensors of this rank, counted `always`, or in chosen parts of a run.

    These parts are: in each step with more tokens in a micro-batch than any step counted before, its first, largest and
    last micro-batch, the optimizer, and the pass that collects values for a loss of the whole batch; and the first time
    of each other phase, such as a rollout. From the second step on they are chosen anew, since the optimizer then has
    its state.
    """

    def __init__(self, device: torch.device, *, always: bool) -> None:
        self.always = always
        self.on = False
        self._live = LiveTensors(lasting=True)
        self._held = self._live.held(device.type)
        self._steps = 0
        self._missed = False  # a step was not counted
        self._largest = -1  # tokens of a micro-batch, over the steps that were counted
        self._chosen: set[int] = set()  # micro-batches of this step, by place
        self._once: set[str] = set()  # phases that have been counted

    @property
    def peak(self) -> int:
        return self._held.peak

    def reset_peak(self) -> None:
        self._live.reset_peaks()

    def begin(self) -> None:
        self._missed |= self._steps > 0 and not self._chosen
        self._steps += 1
        self._chosen = set()
        if self._steps == 1:
            self._live.find()
        if self._steps == 2:
            self._largest = -1
            self._once.clear()

    def choose(self, sizes: Sequence[int]) -> None:
        """Choose from the step's micro-batches, whose tokens are given.

        What was made in an uncounted step is found first: ZeRO-3 gathers its small weights anew in every step, and
        would hold them uncounted.
        """
        largest = max(sizes, default=-1)
        if largest > self._largest:
            if self._missed:
                self._live.find()
            self._missed = False
            self._largest = largest
            self._chosen = {0, sizes.index(largest), len(sizes) - 1}

    def throughout(self) -> contextlib.AbstractContextManager[None]:
        return self._here(self.always)

    def micro_batch(self, place: int) -> contextlib.AbstractContextManager[None]:
        return self._here(place in self._chosen)

    def phase(self, phase: str) -> contextlib.AbstractContextManager[None]:
        if phase in OF_STEPS:
            counted = bool(self._chosen)
        elif phase in OF_MICRO_BATCHES:
            counted = False
        else:
            counted = self._steps > 0 and phase not in self._once
            self._once.add(phase)
        return self._here(counted)

    @contextlib.contextmanager
    def _here(self, counted: bool) -> Iterator[None]:
        if self.on or not counted:
            yield
            return
        self.on = True
        try:
            with self._live:
                yield
        finally:
            self.on = False
