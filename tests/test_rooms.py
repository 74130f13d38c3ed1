"""The table of rooms in docs/architecture.md, kept true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "rlexp"
LIGHT = {"hydra", "omegaconf", "rlexp.config", "rlexp.errors", "rlexp.files", "rlexp.kernels", "rlexp.engines", "rlexp"}
TORCH = {"torch", "numpy"}
# What a room may import at the top of its modules, beside the standard library and itself.
ROOMS = {
    "config": LIGHT | {"hydra_plugins"},
    "launch": LIGHT | {"submitit", "hydra_plugins", "rlexp.checkpoint.folder"},
    "data": TORCH | {"rlexp.types", "rlexp.errors", "rlexp.config.schema"},
    "ring": TORCH | {"rlexp.types", "rlexp.kernels"},
    "model": TORCH | {"transformers", "tokenizers", "safetensors", "rlexp.types", "rlexp.engines",
                      "rlexp.errors", "rlexp.config.schema",
                      "rlexp.ring",
                      "rlexp.data.packing", "rlexp.data.tokens"},
    "algos": TORCH | {"rlexp.types", "rlexp.config.schema"},
    "engine": TORCH
    | {"deepspeed", "rlexp.engines", "rlexp.types", "rlexp.errors", "rlexp.config.schema", "rlexp.model",
       "rlexp.ring.groups"},
    "checkpoint": TORCH
    | {"rlexp.files", "safetensors", "rlexp.types", "rlexp.errors", "rlexp.config", "rlexp.model", "rlexp.engine.base",
       "rlexp.ring.groups", "rlexp.ring.objects"},
    "rollout": TORCH | {"rlexp.types", "rlexp.errors", "rlexp.config", "rlexp.model", "rlexp.algos", "rlexp.ring"},
    "metrics": TORCH | {"rlexp.errors", "rlexp.ring.groups", "rlexp.ring.objects"},
    "sinks": {"wandb", "tqdm", "numpy", "rlexp.files",
              "rlexp.compare.difference", "rlexp.config.schema", "rlexp.errors",
              "rlexp.types"},
    "compare": {"numpy", "orjson", "yaml", "rlexp.files",
                 "omegaconf", "matplotlib", "rlexp.errors", "rlexp.config", "rlexp.launch",
                "rlexp.sinks"},
    "status": {"rich", "rlexp.errors", "rlexp.config", "rlexp.launch", "rlexp.compare", "rlexp.sinks"},
}  # fmt: skip
ONLY_HERE = {"deepspeed": "engine", "wandb": "sinks", "wandb_workspaces": "sinks", "trackio": "sinks",
             "vllm": "rollout", "transformers": "model", "hydra": "config", "rich": "status"}  # fmt: skip
# `verify` holds the product to transformers alone, so it goes round the model's room.
BESIDE = {"hydra": {"launch", "prove", "__main__.py"}, "transformers": {"prove"}}


def imports(path: Path, *, everywhere: bool) -> set[str]:
    """What a module imports at its top; with `everywhere`, inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "rlexp" else {node.module}
            )
    return found


def standard(name: str) -> bool:
    import sys

    return name.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_table_says(room: str) -> None:
    allowed = ROOMS[room] | {f"rlexp.{room}"}
    for path in (ROOT / room).rglob("*.py"):
        for name in imports(path, everywhere=False):
            fits = any(name == each or (each != "rlexp" and name.startswith(f"{each}.")) for each in allowed)
            assert standard(name) or fits or name in ("rlexp.__version__",), f"{path}: {name}"


def test_every_room_is_in_the_table() -> None:
    rooms = {folder.name for folder in ROOT.iterdir() if folder.is_dir() and (folder / "__init__.py").exists()}
    assert rooms == set(ROOMS) | {"train", "prove"}


@pytest.mark.parametrize("package", ONLY_HERE)
def test_a_package_has_one_door(package: str) -> None:
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        if any(name.partition(".")[0] == package for name in imports(path, everywhere=True)):
            allowed = {ONLY_HERE[package]} | BESIDE.get(package, set())
            assert room in allowed, f"{path} imports {package}"


def test_functions_fit_a_screen() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
