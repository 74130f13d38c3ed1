"""Plant a change, or watch the places of many, in every process: a module is changed when it is imported.

The file that `RLEXP_TEST_MUTANTS` names says what to do. `planted/sitecustomize.py` calls `install` as Python starts.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.helpers.mutants.sites import WATCH, Site, changed, watched
from tests.helpers.paths import ROOT

VARIABLE = "RLEXP_TEST_MUTANTS"


@dataclass(frozen=True)
class Plan:
    """What a process does to the product: plant the one place, or watch all of them and write to the log."""

    sites: Sequence[Site]
    log: str | None = None  # None: plant

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"sites": [asdict(site) for site in self.sites], "log": self.log}))

    @staticmethod
    def read(path: Path) -> Plan:
        plan = json.loads(path.read_text())
        return Plan([Site(**site) for site in plan["sites"]], plan["log"])


def environment(plan: Path) -> dict[str, str]:
    """Return the environment of processes under a plan. The checkout comes first on the path, whatever is installed.
    Caches are the plan's own."""
    path = os.pathsep.join([str(Path(__file__).parent / "planted"), str(ROOT)])
    return os.environ | {VARIABLE: str(plan), "PYTHONPATH": path, "RLEXP_CACHE": f"{plan}.cache"}


def install() -> None:
    plan = Plan.read(Path(os.environ[VARIABLE]))
    by_path: dict[str, list[int]] = {}
    for number, site in enumerate(plan.sites):
        by_path.setdefault(site.path, []).append(number)
    sys.meta_path.insert(0, _Finder({_module(path): (plan, numbers) for path, numbers in by_path.items()}))
    if plan.log is not None:
        setattr(builtins, WATCH, Watch(plan.log))


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, plans: dict[str, tuple[Plan, list[int]]]) -> None:
        self.plans = plans

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.plans:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        assert spec.origin.startswith(f"{ROOT}/"), f"{spec.origin}: is not in this checkout"
        spec.loader = _Loader(name, spec.origin, *self.plans[name])
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, plan: Plan, numbers: Sequence[int]) -> None:
        super().__init__(name, path)
        self.plan, self.numbers = plan, numbers

    def exec_module(self, module: ModuleType) -> None:
        watch = getattr(builtins, WATCH, None)
        if watch is None:
            super().exec_module(module)
            return
        before, watch.importing = watch.importing, True
        try:
            super().exec_module(module)
        finally:
            watch.importing = before

    def get_code(self, fullname: str) -> CodeType | None:
        source, sites = self.get_source(fullname), {number: self.plan.sites[number] for number in self.numbers}
        assert source is not None
        tree = changed(source, sites[self.numbers[0]]) if self.plan.log is None else watched(source, sites)
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class Watch:
    """Computes what the unchanged place computes, and notes in the log when its process first reaches the place, and
    when the change first gives another value."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.noted: set[tuple[int, int, str]] = set()
        self.importing = False  # a watched module; whichever test comes first imports it for all

    def __call__(
        self, number: int, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None,
        *operands: Any,
    ) -> Any:  # fmt: skip
        self._note(number, "reached")
        if before is None or after is None:  # a statement
            self._note(number, "active")
            return None
        value = before(*operands)
        if (os.getpid(), number, "active") not in self.noted and not _equal(value, after, operands):
            self._note(number, "active")
        return value

    def forget(self) -> None:
        self.noted.clear()

    def _note(self, number: int, what: str) -> None:
        key = (os.getpid(), number, what)
        if key not in self.noted:
            self.noted.add(key)
            with open(self.log, "a", encoding="utf-8") as log:  # opened anew: a forked process has closed its files
                log.write(f"{number} {what}{' import' if self.importing else ''}\n")


def _equal(value: Any, after: Callable[..., Any], operands: Sequence[Any]) -> bool:
    try:
        other = after(*operands)
        if type(value) is not type(other):
            return False
        if hasattr(value, "dtype") and hasattr(value, "shape"):  # a tensor or an array
            same = value.dtype == other.dtype and value.shape == other.shape
            return bool(same and ((value == other) | ((value != value) & (other != other))).all())
        return bool(value == other)
    except Exception:  # whatever the change raises, it is another outcome
        return False
