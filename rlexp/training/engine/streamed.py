"""A frozen model in the host's memory: the weights of one part of it are on the device while that part computes.

A reference is asked while the policy's activations are held, so a model that were moved as a whole would not lower the
peak. A part is a layer, or any other module with weights of its own: the embedding, the head. While a part computes,
the next one's weights are copied. Norms outside the layers, and other vectors there, stay on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlexp.training.engine.frozen import Frozen
from rlexp.training.model.decoding import Decoding
from rlexp.training.model.placing import put_buffers
from rlexp.training.model.policy import Policy
from rlexp.training.types import Shard, TokenLogps
from rlexp.training.world.shared_memory import Neighbours, share


class Streamed(Frozen):
    """Whole weights in the host's memory, of which at most two parts are on the device.

    The ranks of a machine share one copy. Without `among` the weights stay where they are: a rehearsal has no others.
    """

    def __init__(self, name: str, policy: Policy, device: torch.device, among: Neighbours | None) -> None:
        super().__init__(name, policy)
        if among is not None:
            _share(policy, among, pinned=device.type == "cuda")
        parts = [(module, Part(held)) for module, held in _modules(policy)]
        last = Part([policy.head])
        order = [*(part for _, part in parts), last]
        _put_rest(policy, order, device)
        self.parameters = {name: each for name, each in policy.named() if name in self.parameters}
        self.copies = Copies(device, order)
        for module, part in parts:
            module.register_forward_pre_hook(self._entering(part))
            module.register_forward_hook(part.take_back)
        policy.outlet.register_forward_pre_hook(self._entering(last, policy.head))
        policy.outlet.register_forward_hook(last.take_back)

    def _entering(self, part: Part, head: nn.Linear | None = None) -> Any:
        """Return a hook; that of the outlet gives it the head's weights, which were named before they came."""

        def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            self.copies.enter(part)
            return None if head is None else (head.weight, head.bias, *args[2:])

        return enter

    @torch.no_grad()
    def forward(self, shard: Shard) -> TokenLogps:
        with self.copies:
            return super().forward(shard)

    def decode(self, batch: Decoding) -> Tensor:
        with self.copies:
            return super().decode(batch)


class Part:
    """Weights that are used together. A weight that is tied has one copy, at all of its places."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.places = [
            (module, name, weight) for module in modules for name, weight in module.named_parameters(recurse=False)
        ]
        self.hosts = {id(weight): weight for _, _, weight in self.places}
        self.copied: dict[int, Tensor] | None = None
        self.arrived: Any = None  # the event

    def put(self) -> None:
        assert self.copied is not None
        made = {key: nn.Parameter(copy, requires_grad=False) for key, copy in self.copied.items()}
        for module, name, weight in self.places:
            module.register_parameter(name, made[id(weight)])

    def take_back(self, *_: Any) -> None:  # a hook, too
        for module, name, weight in self.places:
            module.register_parameter(name, weight)
        self.copied = None


class Copies:
    """Copies of parts on a device, made by a stream of their own.

    The memory of a copy is taken on the stream that computes, and the copying waits for all that this stream had to do
    until then. So a part's memory is free for the next copy once it has computed, however far ahead the host is, and no
    third part is ever there. In turn, a part waits for its own copy alone.
    """

    def __init__(self, device: torch.device, parts: Sequence[Part]) -> None:
        self.device, self.kind = device, torch.get_device_module(device)
        self.stream = self.kind.Stream()
        self.next = dict(itertools.pairwise(parts))  # until they come in another order
        self.entered: Part | None = None  # in this pass
        self.ahead: Part | None = None

    def __enter__(self) -> None:
        self.entered = None

    def __exit__(self, *_: object) -> None:
        self._drop()
        if self.entered is not None:
            self.next.pop(self.entered, None)  # the first part waits: between two passes nothing is on the device

    def enter(self, part: Part) -> None:
        if self.ahead is not part:
            self._drop()
            self._fetch(part)
        self.ahead = None
        self.kind.current_stream().wait_event(part.arrived)
        part.put()
        if self.entered is not None:
            self.next[self.entered] = part
        self.entered = part
        following = self.next.get(part)
        if following is not None and following.copied is None:
            self._fetch(following)
            self.ahead = following

    def _fetch(self, part: Part) -> None:
        part.copied = {key: torch.empty_like(host, device=self.device) for key, host in part.hosts.items()}
        self.stream.wait_stream(self.kind.current_stream())
        with self.kind.stream(self.stream):
            for key, copy in part.copied.items():
                copy.copy_(part.hosts[key], non_blocking=True)
        part.arrived = self.kind.Event()
        part.arrived.record(self.stream)

    def _drop(self) -> None:
        """Give up a part that was copied and is not used."""
        if self.ahead is not None:
            self.kind.current_stream().wait_event(self.ahead.arrived)  # before its memory is another's
            self.ahead.copied = None
            self.ahead = None


def _modules(policy: Policy) -> Iterator[tuple[nn.Module, Sequence[nn.Module]]]:
    """Yield the layers, each with all that is in it, and the other modules with matrices, in the model's order."""
    names = set(policy.model._no_split_modules or ())
    inside: set[nn.Module] = set()
    for module in policy.model.modules():
        if module in inside or module is policy.head:
            continue
        if type(module).__name__ in names:
            inside |= set(module.modules())
            yield module, list(module.modules())
        elif any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            yield module, [module]


def _share(policy: Policy, among: Neighbours, *, pinned: bool) -> None:
    """Replace the weights by those in the memory that the ranks of the machine share. Tied ones stay tied. Only copies
    from pinned memory run beside the computation."""
    own = dict(policy.named_parameters())
    names = {id(weight): name for name, weight in own.items()}
    shared = {
        name: nn.Parameter(tensor, requires_grad=False)
        for name, tensor in share(own, among, what="reference.offload=true", pinned=pinned).items()
    }
    for module in policy.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, shared[names[id(weight)]])


def _put_rest(policy: Policy, parts: Sequence[Part], device: torch.device) -> None:
    """Put on the device what is in no part."""
    streamed = {key for part in parts for key in part.hosts}
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in streamed:
                module.register_parameter(name, nn.Parameter(parameter.to(device), requires_grad=False))
    put_buffers(policy, device)
