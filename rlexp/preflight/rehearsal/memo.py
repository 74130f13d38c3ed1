"""What operators make of tensors without memory, and what they cost, remembered by the shapes of their arguments.

torch remembers this too, but its keys cost more than the operator. A layer's operators come again and again, so most
results are put together from what is known: a new tensor, a view of an argument's storage, or an argument itself.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlexp.preflight.rehearsal import operators

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)
# Where a tensor keeps its device: torch 2.11 has no property for it yet.
_DEVICE = "_fake_device" if "fake_device" in vars(FakeTensor) else "fake_device"
_device = operator.attrgetter(_DEVICE)
Recipe = tuple[Any, ...]  # how to make one result
Place = tuple[Any, ...]  # an operator and its arguments' shapes


class Cost(NamedTuple):
    """What an operator costs, which follows from the shapes of its arguments as well."""

    computes: bool = False
    flops: int = 0
    bytes: int = 0  # read and written
    passing: int = 0  # bytes that it takes while it runs
    waits: str = ""  # for which the host waits


class KnownCost(NamedTuple):
    recipe: Recipe | None  # None: its results cannot be told
    cost: Cost


KNOWN: dict[Place, KnownCost] = {}
_NAMES: dict[int, str] = {}  # by the address of an operator, of which torch keeps one: its hash costs more


class Memo:
    """The results of operators under one mode, and what they cost on one device."""

    def __init__(self, mode: FakeTensorMode, device: str) -> None:
        self.mode = mode
        self.device = device
        self.learned: dict[Place, KnownCost] = {}  # since the process was forked
        self.plain: dict[str, dict[str, Any]] = {}  # attributes of a new tensor, by device
        self.works: dict[Any, Any] = {}  # by collective: it is over when it is called, so any one of its works will do

    def place(self, func: Any, args: Any, kwargs: Any) -> Place | None:
        """Return where an operator is remembered, by the shapes of its arguments; None if they do not tell all."""
        if (name := _NAMES.get(id(func))) is None:
            name = _NAMES[id(func)] = _name(func)
        if not name or torch.is_inference_mode_enabled():
            return None
        key: list[Any] = [name, self.device, torch.get_default_dtype()]
        given: list[FakeTensor] = []
        if not self._describe(args, key, given):
            return None
        if kwargs:
            named = len(given)
            key += kwargs
            if not self._describe(kwargs.values(), key, given) or len(given) > named:
                return None  # a result may be one of the named ones
        if len(given) > 1 and len({id(each) for each in given}) < len(given):  # bytes of one tensor are read once
            key += (next(at for at, other in enumerate(given) if other is each) for each in given)
        if name.startswith("aten::as_strided"):  # others find their place in a storage from that of their argument
            key += (each.storage_offset() for each in given)
        return tuple(key)

    def again(self, place: Place, args: Any) -> tuple[Any, Cost] | None:
        """Make the results of an operator without calling it; None if they are not known, or fit no such arguments."""
        known = KNOWN.get(place)
        if known is None or known.recipe is None or not self._has_what_it_needs(known.recipe, args):
            return None
        with torch._C._DisableTorchDispatch():
            return self._make(known.recipe, args), known.cost

    def learn(self, place: Place, args: Any, made: Any, cost: Cost) -> None:
        several = isinstance(made, list | tuple)
        recipes = [self._recipe(args, each) for each in (made if several else [made])]
        recipe = None if None in recipes else ("several", type(made), recipes) if several else recipes[0]
        known = KnownCost(recipe, cost)
        if place not in KNOWN:
            self.learned[place] = KNOWN[place] = known

    def collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what every collective does: its first argument, which it has written to, and its work; or the work."""
        if func not in self.works:
            made = func(*args, **kwargs)
            self.works[func] = made[-1] if isinstance(made, tuple) else made
            return made
        alone = len(func._schema.returns) == 1
        return self.works[func] if alone else (args[0], self.works[func])

    def _describe(self, values: Any, key: list[Any], given: list[FakeTensor]) -> bool:
        """Append what results depend on, and the tensors; say whether that is known."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                dtype = value.dtype
                if value.constant is not None or dtype.is_complex or value.fake_mode is not self.mode:
                    return False
                given.append(value)
                key += (value.shape, value.stride(), dtype, _place(_device(value)))
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is torch.device:
                key += (kind, _place(value))
            elif kind in (list, tuple, torch.Size):
                key += (kind, len(value))
                if not self._describe(value, key, given):
                    return False
            else:
                return False
        return True

    def _has_what_it_needs(self, recipe: Recipe, args: Any) -> bool:
        match recipe[0]:
            case "several":
                return all(self._has_what_it_needs(each, args) for each in recipe[2])
            case "new":
                return recipe[-1] in self.plain
            case "view":  # torch says what becomes of one in a storage that FSDP has freed
                arg, offset, end = args[recipe[1]], recipe[2], recipe[3]
                needed = (arg.storage_offset() + offset) * arg.element_size() + end
                return recipe[-1] in self.plain and needed <= arg.untyped_storage().nbytes()
        return True

    def _recipe(self, args: Any, made: Any) -> Recipe | None:
        if made is None:
            return ("nothing", None)
        for place, arg in enumerate(args):
            if arg is made:
                return ("same", place)
        if type(made) is not FakeTensor or made.constant is not None or made.layout is not torch.strided:
            return None
        if made.requires_grad or made.is_conj() or made.is_neg() or made.is_inference():
            return None
        storage = made.untyped_storage()
        device = _place(made.fake_device)
        self.plain.setdefault(device, dict(vars(made)))
        form = (_extent(made), made.shape, made.stride(), made.dtype, device)
        for place, arg in enumerate(args):
            if isinstance(arg, FakeTensor) and arg.untyped_storage()._cdata == storage._cdata:
                return ("view", place, made.storage_offset() - arg.storage_offset(), *form)
        if any(each.untyped_storage()._cdata == storage._cdata for each in operators.tensors(args)):
            return None
        return ("new", None, 0, *form) if storage.nbytes() == _extent(made) else None

    def _make(self, recipe: Recipe, args: Any) -> Any:
        what, place = recipe[:2]
        if what == "several":
            return place(self._make(each, args) for each in recipe[2])
        if what == "nothing":
            return None
        if what == "same":
            return args[place]
        offset, _, shape, stride, dtype, device = recipe[2:]
        if what == "new":
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=dtype, device="meta")
            arg = args[place]
            bare.set_(arg.untyped_storage(), arg.storage_offset() + offset, shape, stride)
        plain = self.plain[device]
        made = Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=plain[_DEVICE]
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        vars(made).update(plain)
        return made


@functools.cache
def _name(func: Any) -> str:
    """Return an operator's name if its results follow from its arguments' shapes, and it changes no shape."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    if func.namespace not in ("aten", "rlexp") or any(tag in func.tags for tag in tags):
        return ""
    plain = func._schema.name.partition("::")[2]
    special = ("lift", "set_", "resize_", "_local_scalar", "is_", "sym_", "record_stream", "_resize")
    name = str(func.name())
    return "" if plain.startswith(special) or name == "aten::view.dtype" else name  # its offset is in other elements


@functools.cache
def _place(device: torch.device) -> str:
    """Return a device's name, which a process that does not know the device can read too."""
    return str(device)


def _extent(tensor: Tensor) -> int:
    """Return the bytes of the storage that a tensor of its own would have."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
