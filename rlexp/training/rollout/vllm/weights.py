"""Hand the policy's weights over to vLLM's model, which has them in its own way: three matrices as one, and so on.

vLLM's loader is watched once: it copies each weight, as a whole or in parts, to places in the model's parameters. From
then on the same copies are made without it, many in one kernel. A weight that it does not simply copy goes through it
each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlexp.base.errors import ModelError
from rlexp.launch import watch
from rlexp.training.rollout.deal import Weights

BUCKET = 1 << 28  # bytes of weights that are held until they are copied together


class Copy(NamedTuple):
    """A copy that vLLM's loader made: to a place in a parameter, from a part of a weight."""

    to: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the weight's first element


class _Copies(TorchDispatchMode):
    """Notes what is copied from one tensor's memory, and where anything is copied to."""

    def __init__(self, of: Tensor) -> None:
        super().__init__()
        self._of = of
        self.made: list[Copy] = []
        self.written: set[int] = set()  # memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, source = args[:2]
            self.written.add(memory_of(to))
            if memory_of(source) == memory_of(self._of):
                offset = source.storage_offset() - self._of.storage_offset()
                self.made.append(Copy(to, tuple(source.size()), tuple(source.stride()), offset))
        return func(*args, **(kwargs or {}))


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class HandOver:
    """Of one model. It is called before each rollout; the first call watches how the model is loaded."""

    copies: dict[str, list[Copy]] | None = None
    _to: list[Tensor] = field(default_factory=list)
    _of: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, worker: Any, weights: Weights) -> None:
        model = worker.model_runner.model
        if self.copies is None:
            self.copies = watched(model, _noted(weights))
            return
        held = 0
        for name, weight in _noted(weights):
            made = self.copies.get(name)
            if made is None:
                model.load_weights([(name, weight)])
                continue
            self._to += [each.to for each in made]
            self._of += [weight.as_strided(c.size, c.stride, weight.storage_offset() + c.offset) for c in made]
            held += weight.nbytes
            if held >= BUCKET:
                self._copy()
                held = 0
        self._copy()

    def _copy(self) -> None:
        if self._to:
            torch._foreach_copy_(self._to, self._of)
        self._to.clear()
        self._of.clear()


def watched(model: Any, weights: Iterator[tuple[str, Tensor]]) -> dict[str, list[Copy]]:
    """Let vLLM load all weights, and return the copies it makes of those that it simply copies."""
    parameters = {memory_of(parameter): name for name, parameter in model.named_parameters()}
    copies, written = {}, set()
    for name, weight in weights:
        with _Copies(weight) as seen:
            model.load_weights([(name, weight)])
        written |= seen.written
        into_own = all(memory_of(made.to) in parameters for made in seen.made)
        if into_own and sum(made.to.numel() for made in seen.made) == weight.numel():
            copies[name] = seen.made
    without = [name for memory, name in parameters.items() if memory not in written]
    if without:
        raise ModelError(
            f"rollout.engine=vllm: vLLM's model has parameters for which the policy has no weights ({without[0]}, "
            f"{len(without)} of {len(parameters)}). Use rollout.engine=native."
        )
    return copies


def _noted(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for each in weights():
        watch.note()
        yield each
