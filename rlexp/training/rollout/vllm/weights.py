"""Hand the policy's weights over to vLLM's model, which has them in its own way: three matrices as one, and so on.

Where vLLM computes with the parameters that its loader writes, the loader is watched once: it copies each weight, as a
whole or in parts, to places in these parameters. From then on the same copies are made without it, many in one kernel.
A weight that it does not simply copy goes through it each time. On a CPU, vLLM packs the weights when they are loaded,
so they all go through its own reloading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlexp.launch import watch
from rlexp.training.rollout.draws import Weights

BUCKET = 1 << 28  # bytes of weights that are held until they are copied together


class Copy(NamedTuple):
    """A copy that vLLM's loader made: to a place in a parameter, from a part of a weight."""

    to: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the weight's first element


class _Copies(TorchDispatchMode):
    """Notes what is copied from one tensor's memory."""

    def __init__(self, of: Tensor) -> None:
        super().__init__()
        self._of, self.made = of, list[Copy]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, source = args[:2]
            if source.untyped_storage().data_ptr() == self._of.untyped_storage().data_ptr():
                offset = source.storage_offset() - self._of.storage_offset()
                self.made.append(Copy(to, tuple(source.size()), tuple(source.stride()), offset))
        return func(*args, **(kwargs or {}))


@dataclass
class HandOver:
    """Of one model. It is called before each rollout; the first call loads the model."""

    packed: bool  # vLLM computes with other copies of the weights than its loader writes
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    _to: list[Tensor] = field(default_factory=list)
    _of: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, worker: Any, weights: Weights) -> None:
        if self.packed:
            worker.model_runner.reload_weights(weights_iterator=_noted(weights))
            _pack_shared(worker.model_runner.model)
            return
        for name, weight in _noted(weights):
            made = self.copies.get(name)
            if made is None:
                self._load(worker.model_runner.model, name, weight)
                continue
            self._to += [each.to for each in made]
            self._of += [weight.as_strided(c.size, c.stride, weight.storage_offset() + c.offset) for c in made]
            if sum(each.nbytes for each in self._of) >= BUCKET:
                self._copy()
        self._copy()

    def _load(self, model: Any, name: str, weight: Tensor) -> None:
        """Let vLLM load a weight, and watch how it does."""
        with _Copies(weight) as copies:
            model.load_weights([(name, weight)])
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        into_own = all(made.to.untyped_storage().data_ptr() in own for made in copies.made)
        if into_own and sum(made.to.numel() for made in copies.made) == weight.numel():
            self.copies[name] = copies.made

    def _copy(self) -> None:
        if self._to:
            torch._foreach_copy_(self._to, self._of)
        self._to.clear()
        self._of.clear()


def _pack_shared(model: Any) -> None:
    """Pack again what several modules share: vLLM reloads it in the first of them alone. With tied embeddings the head
    would keep the packed weights that it began with."""
    seen = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and id(weight) in seen:
            module.quant_method.process_weights_after_loading(module)
        seen.add(id(weight))


def _noted(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for each in weights():
        watch.note()
        yield each
