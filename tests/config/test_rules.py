"""Each row of rules that a configuration may break is about keys that there are."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from string import Formatter
from types import ModuleType
from typing import get_type_hints

import pytest

from rlexp.config import checks
from rlexp.config.checks.rules import Check
from rlexp.config.schema import KINDS, Config

MODULES = [importlib.import_module(f"{checks.__name__}.{each.name}") for each in pkgutil.iter_modules(checks.__path__)]


def rows_of(module: ModuleType) -> Iterator[Check]:
    for table in vars(module).values():
        if isinstance(table, tuple):
            yield from (row for row in table if isinstance(row, Check))


def is_key(path: str) -> bool:
    """Say whether some configuration has a value there; the last part may be a property of that."""
    group, *rest = path.split(".")
    kinds = KINDS.get(group, {}).values() or [get_type_hints(Config)[group]]
    return not rest or any(hasattr(kind, rest[0]) or rest[0] in get_type_hints(kind) for kind in kinds)


@pytest.mark.parametrize("module", [each for each in MODULES if any(rows_of(each))], ids=lambda each: each.__name__)
def test_what_a_rule_names_is_there(module: ModuleType) -> None:
    words = {word.arg for node in ast.walk(ast.parse(inspect.getsource(module)))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse_broken"
             for word in node.keywords}  # fmt: skip
    for row in rows_of(module):
        named = {name for _, name, _, _ in Formatter().parse(row.says) if name is not None} - words
        assert [path for path in (row.key, *named) if not is_key(path)] == [], row.says
