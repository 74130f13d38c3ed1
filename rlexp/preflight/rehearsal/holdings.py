"""What the tensors of a run are for, and in which module they are made: labels for the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlexp.preflight.rehearsal.log import GRADIENTS, OPTIMIZER, REFERENCE, WEIGHTS, Log
from rlexp.training.metrics.live_tensors import LiveTensors

FORWARD = ("forward", "reference", "rollout", "score")


def label(log: Log, live: LiveTensors, engine: Any, frozen: Iterable[nn.Module]) -> None:
    """Say what the tensors are for that a run has after its build. Others are told by when they are made and freed."""
    for kind, tensors in (
        (WEIGHTS, _of_module(engine.policy)),
        (REFERENCE, (tensor for module in frozen for tensor in _of_module(module))),
        (GRADIENTS, _gradients(engine)),
        (OPTIMIZER, _states(engine)),
    ):
        for tensor in tensors:
            log.label(live.number_of(tensor), kind)


def _of_module(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield from _local(parameter)
        yield from _local(getattr(parameter, "ds_tensor", None))  # this rank's piece under ZeRO-3
    for buffer in module.buffers():
        yield from _local(buffer)


def _gradients(engine: Any) -> Iterator[Tensor]:
    """Yield the buffers in which DeepSpeed adds gradients up, which it makes at its start."""
    for name, value in vars(getattr(getattr(engine, "module", None), "optimizer", None) or object).items():
        if "grad" in name:
            yield from _within(value)


def _states(engine: Any) -> Iterator[Tensor]:
    optimizer = getattr(engine, "optimizer", None) or engine.module.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from _local(parameter)
    yield from _within(list(optimizer.state.values()))


def _within(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from _local(value)
    elif isinstance(value, dict):
        yield from _within(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _within(each)


def _local(tensor: Any) -> Iterator[Tensor]:
    if isinstance(tensor, DTensor):
        yield tensor.to_local()
    elif isinstance(tensor, Tensor):
        yield tensor


def mark_trunk(log: Log, trunk: nn.Module) -> None:
    """Begin a phase anew at each forward and backward pass of a trunk: several may run in one phase, or one of them
    several times, and only a trunk's own layers are alike."""

    def backward(grad: Tensor) -> Tensor:
        log.again()
        return grad

    def before(*_: Any) -> None:
        if log.phase in FORWARD:
            log.again()

    def after(_module: Any, _args: Any, output: Any) -> None:
        if log.phase in FORWARD and output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(backward)

    trunk.register_forward_pre_hook(before)
    trunk.register_forward_hook(after)


def mark_modules(log: Log, live: LiveTensors, policy: nn.Module, settle: Callable[[], None] = lambda: None) -> None:
    """Tell the log in whose forward pass a storage is made: the innermost module's, by the model's own names.

    So too where activation checkpointing computes a layer again in the backward pass. Weights that an engine has
    gathered, and still holds when the pass ends, are no activations. `settle` is called before a recomputation's
    holdings are noted.
    """

    def entering(name: str) -> Any:
        def enter(*_: Any) -> None:
            if log.phase in ("forward", "backward"):
                if log.phase == "backward" and not outer:
                    began.append(len(log.sizes))
                outer.append(log.module)
                log.module = name

        return enter

    def leave(module: nn.Module, *_: Any) -> None:
        if log.phase not in ("forward", "backward"):
            return
        log.module = outer.pop()
        if not outer:
            log.kinds |= {
                number: WEIGHTS for each in _of_module(module) if (number := live.number_of(each)) is not None
            }
            if log.phase == "backward":
                settle()
                log.recomputed.append((began.pop(), len(log.sizes)))

    outer: list[str] = []
    began: list[int] = []
    for name, module in policy.named_modules():
        module.register_forward_pre_hook(entering(name.removeprefix("model.") or type(module).__name__))
        module.register_forward_hook(leave, always_call=True)  # a recomputation ends by an exception
