"""The mode under which a program is rehearsed: the device is made up, the host computes as always.

An operator that touches the device works on fake tensors: shape, dtype and place are right, and there are no numbers.
Integers of the host steer the program (which tokens, how many), so they are real. Where the program asks the device
for a number, the host would wait for the device: that is counted with its place, and answered with 1 for floating-point
numbers, true, or 0.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from rlexp.preflight.communicators import RankGroup
from rlexp.preflight.rehearsal import operators
from rlexp.preflight.rehearsal.device import NAME
from rlexp.preflight.rehearsal.log import BUFFERS, REFERENCE, Log
from rlexp.preflight.rehearsal.memo import Cost, Memo
from rlexp.training.metrics.live_tensors import LiveTensors, wraps

aten = torch.ops.aten
PAGE = 512  # bytes: the allocator of CUDA rounds every block up to a multiple


class Counting(LiveTensors):
    """Count what a program does on real tensors."""

    def __init__(self, log: Log) -> None:
        super().__init__(log.changed)
        self.log = log
        self.watched: set[str] = set()  # groups of whose traffic the log is told

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch's guard against compiling what follows: nothing is compiled, and it costs a tenth."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        for each in types:
            if each is not FakeTensor and wraps(each):
                return NotImplemented
        made = self.counted(func, args, kwargs or {})
        across = func is aten.copy_.default and args[0].device.type != args[1].device.type
        if across and calling_line().startswith("rlexp/training/engine/streamed.py"):
            # A copy of weights of the host, which the reference has in the place of its own on the device.
            self.log.label(self.number_of(args[0]), REFERENCE)
        return made

    def counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        self.see(made)
        self.count(func, args, kwargs, made)
        return made

    def count(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        if func.namespace == "c10d":
            self.count_sent(func, args)
        elif operators.launches(func):
            self.log.computed(operators.flops(func, args), operators.moved_bytes(args, kwargs, made))

    def count_sent(self, func: Any, args: Any) -> None:
        """Note what a collective or a message of the device sends, and over which group."""
        if (called := operators.called(func, args)) is not None:
            group = operators.group_of(args)
            self.log.groups.setdefault(group.group_name, RankGroup(group.size())).note(*called)
        if (sending := operators.sent(func, args)) is not None:
            self.log.counts.sent[sending[0]] += sending[1]
            if operators.group_of(args).group_name not in self.watched:
                self.log.leaving(sending[1])
        if not (received := operators.received(func, args)):
            return
        of_the_model = not calling_line().startswith("deepspeed/")  # which gathers weights, and a layer ahead
        for tensor in received:
            number = self.number_of(tensor)
            self.log.label(number, BUFFERS)
            if of_the_model and number is not None:
                self.log.received.add(number)


class Rehearsing(Counting):
    """Count what a program would do on a GPU."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake.cache_enabled = False  # the memo's keys cost less
        self.memo = Memo(self.fake, log.device)
        self.paused = False

    def counts(self, tensor: Tensor) -> bool:
        return getattr(tensor, "fake_mode", self.fake) is self.fake

    def size_of(self, storage: Any, device: str) -> int:
        size: int = storage.nbytes()
        return -(-size // PAGE) * PAGE if device == NAME else size

    def __enter__(self) -> Rehearsing:
        self.fake.__enter__()
        super().__enter__()
        self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = self._unseen(self._propagate)  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate  # type: ignore[method-assign]
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Do not count in this function: DTensor tries operators on whole tensors, which are fake in a real run too."""

        @functools.wraps(function)
        def unseen(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return unseen

    def counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        at = None if self.paused else self.memo.place(func, args, kwargs)
        if at is not None and (again := self.memo.again(at, args)) is not None:
            made, cost = again
            self.see(made)
            self._pay(cost)
            return made
        given = [*operators.tensors(args), *operators.tensors(kwargs.values())]
        if not any(isinstance(each, FakeTensor) for each in given) and self._of_the_host(func, given, args, kwargs):
            with unset_fake_temporarily():
                made = func(*args, **kwargs)
            self.see(made)
            if self.log.device == "cpu":
                self.count(func, args, kwargs, made)
            return made
        if self.paused or any(isinstance(each, FakeTensor) and each.fake_mode is not self.fake for each in given):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._asked(given[0])
        if func is aten.equal.default:
            return self._asked(given[0], torch.bool)
        made = self._called(func, given, args, kwargs)
        for each in operators.tensors((made,)):
            # Fake tensors keep the numbers of an empty tensor that is copied to the device, and then compute with them.
            if isinstance(each, FakeTensor) and each.device.type == NAME:
                each.constant = None
        self.see(made)
        cost = self.cost(func, given, args, kwargs, made) if self._here(given, made) else Cost()
        self._pay(cost)
        if func.namespace == "c10d" and self._here(given, made):
            self.count_sent(func, args)
        if at is not None:
            self.memo.learn(at, args, made, cost)
        return made

    def _called(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        if func is aten.lift_fresh.default and given[0].device.type == NAME:  # fake tensors would keep its numbers
            return torch.empty_like(given[0])
        if func.namespace == "c10d":
            return self.memo.collective(func, args, kwargs)
        return func(*args, **kwargs)

    def _here(self, given: list[Tensor], made: Any) -> bool:
        return any(each.device.type == self.log.device for each in (*given, *operators.tensors((made,))))

    def cost(self, func: Any, given: list[Tensor], args: Any, kwargs: Any, made: Any) -> Cost:
        passing, waits = operators.workspace(func, args), _waits(func, given, args, kwargs, made)
        if func.namespace == "c10d" or not operators.launches(func):
            return Cost(passing=passing, waits=waits)
        return Cost(True, operators.flops(func, args), operators.moved_bytes(args, kwargs, made), passing, waits)

    def _pay(self, cost: Cost) -> None:
        if cost.waits:
            self.log.counts.syncs[f"{calling_line()}: {cost.waits}"] += 1
        if cost.computes:
            self.log.computed(cost.flops, cost.bytes)
        if cost.passing:
            self.log.passing(cost.passing)

    def _of_the_host(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Say whether an operator without fake arguments is the host's own: it makes integers, or works on some."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == NAME:
            return False
        if any(each.device.type == NAME for each in given):
            return False
        if given:
            return True
        dtype = kwargs.get("dtype")
        if dtype is None:
            return func._schema.name == "aten::arange" and all(isinstance(each, int) for each in args)
        return not dtype.is_floating_point

    def _asked(self, tensor: Tensor, dtype: torch.dtype | None = None) -> float | bool | int:
        if tensor.device.type == NAME:
            self.log.counts.syncs[f"{calling_line()}: a number of the device"] += 1
        dtype = dtype or tensor.dtype
        if dtype is torch.bool:
            return True
        return 1.0 if dtype.is_floating_point else 0


def _waits(func: Any, given: list[Tensor], args: Any, kwargs: Any, made: Any) -> str:
    """Return the copy between host and device for which the host waits; an empty text if there is none."""
    if func in (aten._to_copy.default, aten.copy_.default):
        across = {each.device.type for each in (*given, *operators.tensors((made,)))}
        goes_on = kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:3] == (True,))
        return "a copy" if len(across) > 1 and not goes_on else ""
    if func is aten.lift_fresh.default:
        return "a tensor made of Python's numbers"
    # A tensor of the host that is one number is an argument of such a kernel, and is not copied.
    takes_scalars = torch.Tag.pointwise in func.tags and func._schema.name != "aten::where"
    if func.namespace == "aten" and operators.launches(func) and not takes_scalars:
        return "a copy of an argument" if any(each.device.type == "cpu" for each in given) else ""
    return ""


_INNER = ("/torch/", "/typing_extensions.py", "/rlexp/preflight/", "/metrics/live_tensors.py")  # they are no place


def calling_line() -> str:
    """Return file and line of the innermost caller that is no part of torch, or of the rehearsal."""
    frame = sys._getframe(1)
    inner: Any = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _INNER):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"{_short(inner.f_code.co_filename)}:{inner.f_lineno}"


@functools.cache
def _short(file: str) -> str:
    """Return the file as its package names it: `rlexp/training/train/step.py`."""
    for start in ("/site-packages/", f"{Path(__file__).parents[3]}/"):
        if start in file:
            return file.rpartition(start)[2]
    return file
