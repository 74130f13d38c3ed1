"""Each row of rules that a configuration may break names keys that there are, or words that its caller gives."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from string import Formatter
from types import ModuleType
from typing import get_type_hints

import pytest

from rlexp.config import checks
from rlexp.config.checks.rules import Check
from rlexp.config.schema import KINDS, Config

MODULES = [importlib.import_module(f"{checks.__name__}.{each.name}") for each in pkgutil.iter_modules(checks.__path__)]
ROWS = [(module, row) for module in MODULES for table in vars(module).values() if isinstance(table, tuple)
        for row in table if isinstance(row, Check)]  # fmt: skip


@pytest.mark.parametrize(("module", "row"), ROWS, ids=lambda each: getattr(each, "key", ""))
def test_what_a_rule_names_is_there(module: ModuleType, row: Check) -> None:
    words = {word.arg for node in ast.walk(ast.parse(inspect.getsource(module)))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse_broken"
             for word in node.keywords}  # fmt: skip
    for path in {row.key, *(name for _, name, _, _ in Formatter().parse(row.says) if name is not None)} - words:
        group, key, *_ = [*path.split("."), "name"]
        kinds = KINDS.get(group, {}).values() or [get_type_hints(Config)[group]]
        assert any(hasattr(kind, key) or key in get_type_hints(kind) for kind in kinds), path
