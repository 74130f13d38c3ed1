"""What operators make of tensors without memory, remembered by the shapes of their arguments.

torch remembers this too, but its keys cost more than the operator. A layer's operators come again and again, so most
results are put together from what is known: a new tensor, a view of an argument's storage, or an argument itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rlexp.rehearse import operators

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format)
_UNKNOWN = object()
Recipe = tuple[Any, ...]  # how to make one result
KNOWN: dict[Any, Recipe | None] = {}  # by the operator and its arguments' shapes; None: it cannot be told


class Memo:
    """The results of operators under one mode."""

    def __init__(self) -> None:
        self.learned: dict[Any, Recipe | None] = {}  # since the process was forked
        self.plain: dict[str, dict[str, Any]] = {}  # attributes of a new tensor, by device
        self.works: dict[Any, Any] = {}  # by collective: it is over when it is called, so any one of its works will do

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator, or make what it made before of arguments of these shapes."""
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if not (name := _name(func)):
            return func(*args, **kwargs)
        key: list[Any] = [name, torch.get_default_dtype()]
        if name.startswith("aten::as_strided"):  # others find their place in a storage from that of their argument
            key += (each.storage_offset() for each in operators.tensors(args))
        if not _describe(args, key) or not _describe_named(kwargs, key):
            return func(*args, **kwargs)
        place = tuple(key)
        recipe: Any = KNOWN.get(place, _UNKNOWN)
        if recipe is _UNKNOWN:
            made = func(*args, **kwargs)
            self.learned[place] = KNOWN[place] = self._learn(args, made)
            return made
        if recipe is None or not self._has_what_it_needs(recipe, args):
            made = func(*args, **kwargs)
            self._learn(args, made)
            return made
        with torch._C._DisableTorchDispatch():
            return self._make(recipe, args)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what every collective does: its first argument, which it has written to, and its work; or the work."""
        if func not in self.works:
            made = func(*args, **kwargs)
            self.works[func] = made[-1] if isinstance(made, tuple) else made
            return made
        alone = len(func._schema.returns) == 1
        return self.works[func] if alone else (args[0], self.works[func])

    def _has_what_it_needs(self, recipe: Recipe, args: Any) -> bool:
        match recipe[0]:
            case "several":
                return all(self._has_what_it_needs(each, args) for each in recipe[2])
            case "new":
                return recipe[-1] in self.plain
            case "view":  # a storage that FSDP has freed is no place for it
                arg, offset, end = args[recipe[1]], recipe[2], recipe[3]
                there = (arg.storage_offset() + offset) * arg.element_size() + end
                return recipe[-1] in self.plain and there <= arg.untyped_storage().nbytes()
        return True

    def _learn(self, args: Any, made: Any) -> Recipe | None:
        """Return how to make such results again; None if they cannot be made."""
        if isinstance(made, list | tuple):
            recipes = [self._recipe(args, each) for each in made]
            return None if any(each is None for each in recipes) else ("several", type(made), recipes)
        return self._recipe(args, made)

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
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=plain["_fake_device"]
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


def _describe(values: Any, key: list[Any]) -> bool:
    """Append what results depend on; say whether that is known."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.dtype.is_complex:
                return False
            key += (value.shape, value.stride(), value.dtype, _place(value._fake_device))
        elif kind is torch.device:
            key += (kind, _place(value))
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind in (list, tuple, torch.Size):
            key += (kind, len(value))
            if not _describe(value, key):
                return False
        else:
            return False
    return True


def _describe_named(kwargs: Any, key: list[Any]) -> bool:
    if any(isinstance(value, Tensor) for value in kwargs.values()):
        return False  # a result may be one of them
    key.extend(kwargs)
    return _describe(kwargs.values(), key)


def _extent(tensor: Tensor) -> int:
    """Return the bytes of the storage that a tensor of its own would have."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
