"""The map in docs/architecture.md and the code hold each other true: rooms, what each imports, and no circle."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
PACKAGE, PAGE = TOP / "rlexp", TOP / "docs" / "architecture.md"
LATER = "; later: "  # in a cell of the map: what a room imports inside functions only
FEW = 2  # a room that imports this many files of another, or fewer, has them named in the map
ONLY_HERE = {"deepspeed": "engine", "wandb": "sinks", "wandb_workspaces": "sinks", "trackio": "sinks",
             "vllm": "rollout", "transformers": "model", "hydra": "config", "rich": "status"}  # fmt: skip
# `verify` holds the product to transformers alone, so it goes round the model's room.
# Both rooms that draw for the terminal use rich.
BESIDE = {"hydra": {"launch", "__main__"}, "transformers": {"prove"}, "rich": {"status/__main__", "preview"}}


@dataclass(frozen=True)
class Import:
    file: Path  # below the package's folder
    line: int
    target: str  # a file of the package, or another package's name
    top: bool  # at the top of the module: loaded with it

    @property
    def room(self) -> str:
        return room_of(self.file)

    @property
    def to(self) -> str:
        """The room, or the other package, that is imported."""
        return room_of(Path(self.target)) if self.target.endswith(".py") else self.target


def room_of(file: Path) -> str:
    """Return the room of a file. A room's `__main__.py` is a command, and stands by itself."""
    if len(file.parts) == 2 and file.stem == "__main__":
        return f"{file.parts[0]}/__main__"
    return file.parts[0] if len(file.parts) > 1 else file.stem


def imports_of(package: Path) -> list[Import]:
    """Return every import of the package, also those inside functions and under TYPE_CHECKING."""
    return [
        Import(path.relative_to(package), line, target, top)
        for path in sorted(package.rglob("*.py"))
        for line, name, top in names_in(path.read_text(encoding="utf-8"))
        if (target := target_of(name, package)) is not None
    ]


@functools.cache  # copies of the house share nearly all of their files
def names_in(text: str) -> list[tuple[int, str, bool]]:
    """Return the line of each import, the dotted name, and whether it stands at the top of the module."""
    tree, names = ast.parse(text), []
    tops = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name, node in tops) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names += [(node.lineno, f"{node.module}.{alias.name}", node in tops) for alias in node.names]
    return names


def target_of(name: str, package: Path) -> str | None:
    """Return the package's file, or the other package, that a dotted name means; None in the standard library."""
    first, *rest = name.split(".")
    if first == "rlexp":
        return file_of(rest, package)
    return None if first in sys.stdlib_module_names else first


def file_of(parts: list[str], package: Path) -> str:
    """Return the file of a dotted name: a module, a package's face, or the module that holds a name."""
    for length in range(len(parts), -1, -1):
        path = package.joinpath(*parts[:length])
        for file in (path.with_suffix(".py") if length else None, path / "__init__.py"):
            if file is not None and file.is_file():
                return str(file.relative_to(package))
    raise AssertionError(f"no file of rlexp.{'.'.join(parts)}")


# ---- what is wrong: one line for each ----


def wrong_rows(package: Path, page: Path) -> list[str]:
    """Compare each row of the map with what its room imports, to the name."""
    rows, imports = rows_of(page), imports_of(package)
    rooms = {room_of(path.relative_to(package)) for path in package.rglob("*.py")} - {"__init__"}
    wrong = [f"{room}: has no row in the map" for room in sorted(rooms - rows.keys())]
    wrong += [f"{room}: is in the map, and not in the package" for room in sorted(rows.keys() - rooms)]
    for room in sorted(rooms & rows.keys()):
        cell = cell_of(room, imports)
        if rows[room] != cell:
            wrong.append(f"{room}: the map says `{rows[room]}`, the code `{cell}`")
    return wrong


def rows_of(page: Path) -> dict[str, str]:
    rows = re.findall(
        r"^\| `rlexp/(\w+(?:/__main__)?)(?:/|\.py)` \|.*\| (.*?) ?\|$", page.read_text(encoding="utf-8"), re.M
    )
    assert rows, "the map has no table of rooms"
    return dict(rows)


def cell_of(room: str, imports: list[Import]) -> str:
    """Return what the map must say of a room: its imports at the top of modules, then those inside functions only."""
    theirs = [each for each in imports if each.room == room and each.to not in (room, "__init__")]
    files: dict[str, set[str]] = {}
    for each in theirs:
        files.setdefault(each.to, set()).add(each.target)

    def name(each: Import) -> str:
        few = each.to != Path(each.target).stem and "/" in each.target and len(files[each.to]) <= FEW
        return each.target.removesuffix(".py").removesuffix("/__init__") if few else each.to

    top = {name(each) for each in theirs if each.top}
    later = {name(each) for each in theirs} - top
    return ", ".join(sorted(top)) + (LATER + ", ".join(sorted(later)) if later else "")


def circles(package: Path, page: Path) -> list[str]:
    """Look for a circle of files, and for one of rooms, without the steps that the map allows by name."""
    allowed = set(re.findall(r"^- `(\w+)` → `(\w+)`: ", page.read_text(encoding="utf-8"), re.M))
    inside = [
        each
        for each in imports_of(package)
        if each.target.endswith(".py")
        and str(each.file) != each.target
        and not ((each.room, each.to) in allowed and not each.top)
    ]
    files = {(str(each.file), each.target) for each in inside}
    rooms = {(each.room, each.to) for each in inside if each.room != each.to and each.to != "__init__"}
    return [circle for edges in (files, rooms) if (circle := circle_of(edges))]


def circle_of(edges: set[tuple[str, str]]) -> str | None:
    graph: dict[str, set[str]] = {}
    for start, end in edges:
        graph.setdefault(start, set()).add(end)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(reversed(error.args[1]))
    return None


# ---- the house as it is ----


def test_the_map_says_what_each_room_imports() -> None:
    assert wrong_rows(PACKAGE, PAGE) == []


def test_no_file_and_no_room_imports_another_that_imports_it_back() -> None:
    assert circles(PACKAGE, PAGE) == []


@pytest.mark.parametrize("package", ONLY_HERE)
def test_a_package_has_one_door(package: str) -> None:
    rooms = {each.room for each in imports_of(PACKAGE) if each.to == package}
    assert rooms <= {ONLY_HERE[package]} | BESIDE.get(package, set())


def test_functions_fit_a_screen() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


# ---- what is planted is found ----


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the house to plant things in."""
    shutil.copytree(PACKAGE, tmp_path / "rlexp", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copy(PAGE, tmp_path / "page.md")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "line", "circle"),
    [
        ("data/seam.py", "from rlexp.data.seam import Seam", None),  # itself: no circle
        ("data/packing.py", "from rlexp.train.pair_task import PairTask", "data/packing.py"),
        ("types.py", "def later():\n    import rlexp.ring.shard", "ring/shard.py"),
        ("data/sampler.py", "if TYPE_CHECKING:\n    from rlexp.train import examples", "train/examples.py"),
        ("ring/layouts/zigzag.py", "from rlexp.ring.layouts import get_layout", "ring/layouts/__init__.py"),
        ("algos/kl.py", "from rlexp import train", "train"),
    ],
)
def test_a_planted_circle_is_found(copy: Path, file: str, line: str, circle: str | None) -> None:
    if circle == "train":  # of rooms alone: no file of them imports another back
        (copy / "rlexp" / "train" / "__init__.py").write_text("", encoding="utf-8")
        (copy / "rlexp" / "train" / "leaf.py").write_text("", encoding="utf-8")
        line = "from rlexp.train import leaf"
    path = copy / "rlexp" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    found = circles(copy / "rlexp", copy / "page.md")
    assert bool(found) == (circle is not None)
    assert circle is None or any(circle in each for each in found)


def test_a_step_that_the_map_allows_is_no_circle_at_the_top(copy: Path) -> None:
    """The map lets launch start train inside a function; at the top of a module it would load torch at once."""
    path = copy / "rlexp" / "launch" / "job.py"
    path.write_text(path.read_text(encoding="utf-8") + "\nfrom rlexp.train import rank\n", encoding="utf-8")
    assert any("train" in each for each in circles(copy / "rlexp", copy / "page.md"))


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        ("algos/dpo.py", "import numpy", "numpy"),
        ("launch/folder.py", "from rlexp.checkpoint.tensors import Reader", "checkpoint/tensors"),
        ("engine/plain.py", "from rlexp.ring.layouts import get_layout", "ring/layouts"),
        ("data/__main__.py", "import numpy", "numpy"),  # a command's row is its own, beside its room's
    ],
)
def test_an_import_that_the_map_does_not_list_is_found(copy: Path, file: str, line: str, name: str) -> None:
    path = copy / "rlexp" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    (wrong,) = wrong_rows(copy / "rlexp", copy / "page.md")
    assert wrong.startswith(f"{room_of(Path(file))}: the map says")
    assert name in wrong


@pytest.mark.parametrize(("listed", "said"), [("types", "types"), ("rlexp/attic/` | nothing | types", "attic")])
def test_what_the_map_lists_and_no_room_imports_is_found(copy: Path, listed: str, said: str) -> None:
    page = copy / "page.md"
    text = page.read_text(encoding="utf-8")
    if said == "attic":
        text = text.replace("| `rlexp/types.py`", f"| `{listed} |\n| `rlexp/types.py`")
    else:
        text = re.sub(r"(\| `rlexp/errors.py` \|.*\|) ?\|$", rf"\1 {listed} |", text, flags=re.M)
    page.write_text(text, encoding="utf-8")
    (wrong,) = wrong_rows(copy / "rlexp", copy / "page.md")
    assert said in wrong
