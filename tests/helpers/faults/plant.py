"""Plant a defect into this process: put other code behind a function that is named, whatever its text.

A target is `module:Class.method`, or any other function, property or constant of a module. The function keeps its
identity and gets other code, so every reference to it is reached: imports under other names, registries, decorators.
Nothing on disk changes, and the product has no hook for it. Undoing it gives the function its own code back.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType
from typing import Any

Change = Callable[..., Any]  # called with the original, then with the arguments of the call
Mark = Callable[[], None]


class CannotPlant(Exception):
    """The target is gone, or the change would change nothing."""


def plant(target: str, change: Change, mark: Mark) -> Callable[[], None]:
    """Put `change` behind the target, and return what undoes it. `mark` is called as soon as the change is at work."""
    holder, name, found = _resolve(target)
    function = _function_behind(found)
    if function is None:
        return _replace(target, holder, name, found, change, mark)
    original = _copy(function)
    if isinstance(change, Seeing):
        planted: Callable[..., Any] = change.of(original, mark)
    else:

        def planted(*args: Any, **kwargs: Any) -> Any:
            mark()
            return change(original, *args, **kwargs)

    before = (function.__code__, function.__defaults__, function.__kwdefaults__)
    own = function.__code__
    # Errors are to name the place of the function, since `verify` reads the module from a traceback.
    function.__code__ = _trampoline.__code__.replace(
        co_freevars=own.co_freevars, co_filename=own.co_filename, co_name=own.co_name, co_firstlineno=own.co_firstlineno
    )
    function.__defaults__, function.__kwdefaults__ = None, {"planted": planted}

    def undo() -> None:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before

    return undo


def _trampoline(*args: Any, planted: Callable[..., Any], **kwargs: Any) -> Any:
    return planted(*args, **kwargs)


def _resolve(target: str) -> tuple[Any, str, Any]:
    """Find what the target names: who holds it, under which name, and the thing itself, not bound to anything."""
    module, _, path = target.partition(":")
    try:
        holder: Any = None
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            holder, found = found, inspect.getattr_static(found, name)
    except (ImportError, AttributeError) as error:
        raise CannotPlant(f"{target}: there is no such thing to plant into: {error}") from error
    return holder, name, found


def _function_behind(found: Any) -> FunctionType | None:
    """Look through properties, static and class methods and decorators."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if callable(found):
        found = inspect.unwrap(found)
    return found if isinstance(found, FunctionType) else None


def _copy(function: FunctionType, known: dict[str, Any] | None = None) -> FunctionType:
    """The same function again, by default with the same globals."""
    known = function.__globals__ if known is None else known
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy


def _replace(target: str, holder: Any, name: str, old: Any, change: Change, mark: Mark) -> Callable[[], None]:
    """Replace a constant or a class attribute, also where modules of the product have imported it under its name."""
    new = change(old)
    if new is old or new == old:
        raise CannotPlant(f"{target}: the change leaves it as it is, {old!r}")
    package = target.partition(".")[0]
    others = [module for key, module in sys.modules.items()
              if key.partition(".")[0] == package and vars(module).get(name) is old]  # fmt: skip
    holders = [holder, *(module for module in others if module is not holder)]
    for each in holders:
        setattr(each, name, new)
    mark()

    def undo() -> None:
        for each in holders:
            setattr(each, name, old)

    return undo


# ---- what a change may be made of ----


@dataclass(frozen=True)
class Given:
    """A change of a name that depends on the call: a function of what stands behind it and of the call's arguments."""

    change: Change


class Seeing:
    """Let the function find other things behind names that it uses, such as `select` or `torch.logaddexp`.

    Each name comes with a function from what stands behind it to what shall. Nothing but this function sees the others.
    """

    def __init__(self, names: Mapping[str, Callable[[Any], Any] | Given]) -> None:
        self.names = names

    def of(self, original: FunctionType, mark: Mark) -> Callable[..., Any]:
        """Return the function with the other names; `mark` is called when it calls one of them."""
        used = set(_names_in(original.__code__))
        for name in self.names:
            if missing := [part for part in name.split(".") if part not in used]:
                raise CannotPlant(f"{original.__qualname__} does not use {missing[0]}, so {name} changes nothing in it")

        def seeing(*args: Any, **kwargs: Any) -> Any:
            known = dict(original.__globals__)
            for name, change in self.names.items():
                if isinstance(change, Given):
                    change = partial(_given, change.change, args, kwargs)
                root, _, path = name.partition(".")
                known[root] = _seen(known[root] if root in known else vars(builtins)[root], path, change, mark)
            return _copy(original, known)(*args, **kwargs)

        return seeing


class OfKinds(Seeing):
    """Change what a method returns, for objects of these classes alone: others inherit it."""

    def __init__(self, change: Callable[[Any], Any], *kinds: str) -> None:
        super().__init__({})
        self.change, self.kinds = change, kinds

    def of(self, original: FunctionType, mark: Mark) -> Callable[..., Any]:
        def changing(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(this, *args, **kwargs)
            if type(this).__name__ not in self.kinds:
                return result
            mark()
            return self.change(result)

        return changing


def _given(change: Change, args: tuple[Any, ...], kwargs: dict[str, Any], thing: Any) -> Any:
    return change(thing, *args, **kwargs)


def _seen(thing: Any, path: str, change: Callable[[Any], Any], mark: Mark) -> Any:
    if path:
        name, _, rest = path.partition(".")
        return Altered(thing, **{name: lambda below: _seen(below, rest, change, mark)})
    new = change(thing)
    if not callable(new):
        mark()
        return new

    def marked(*args: Any, **kwargs: Any) -> Any:
        mark()
        return new(*args, **kwargs)

    return marked


def _names_in(code: CodeType) -> Iterator[str]:
    """Global names and attributes that the code uses, with the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


class Altered:
    """A stand-in for an object or a module, some of whose attributes are others; the rest it passes on."""

    def __init__(self, thing: Any, /, **changes: Callable[[Any], Any]) -> None:
        self.__dict__.update({name: change(getattr(thing, name)) for name, change in changes.items()})
        self.__dict__["_thing"] = thing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


@dataclass(frozen=True)
class Waiting:
    """A transfer under way, whose result is another than what arrives."""

    pending: Any
    change: Callable[[Any], Any]

    def wait(self) -> Any:
        return self.change(self.pending.wait())
