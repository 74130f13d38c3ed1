"""What each module of the product imports, as the table in docs/imports.md says it, and the layers of modules, as the
picture in docs/architecture.md shows them. `python -m tests.helpers.imports` writes the table."""

from __future__ import annotations

import ast
import functools
import re
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.helpers.paths import ROOT

PACKAGE, PAGE = ROOT / "rlexp", ROOT / "docs" / "imports.md"
PICTURE = ROOT / "docs" / "architecture.md"
GROUP = "training"  # a folder whose folders are modules of their own
LATER = "; later: "  # in a cell of the table: what a module imports inside functions only
ABOVE_ALL = {"__main__", "__init__", GROUP}  # the command `rlexp` starts in the package's own __main__.py
FEW = 2  # a module that imports this many files of another, or fewer, has them named in the table


@dataclass(frozen=True)
class Import:
    file: Path  # below the package's folder
    line: int
    target: str  # a file of the package, or another package's name
    top: bool  # at the top of the module: loaded with it

    @property
    def module(self) -> str:
        return module_of(self.file)

    @property
    def to(self) -> str:
        """The module, or the other package, that is imported."""
        return module_of(Path(self.target)) if self.target.endswith(".py") else self.target


def module_of(file: Path) -> str:
    """Return the module of a file: its folder, or the file itself. A `__main__.py` is a command of its own."""
    folders = 2 if file.parts[0] == GROUP else 1
    if file.stem == "__main__" or len(file.parts) <= folders:
        return str(file.with_suffix(""))
    return "/".join(file.parts[:folders])


def modules_of(package: Path) -> set[str]:
    modules = {module_of(path.relative_to(package)) for path in package.rglob("*.py")}
    return modules - {"__init__", f"{GROUP}/__init__"}


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
    """Compare each row of the table with what its module imports, to the name."""
    rows, imports = rows_of(page), imports_of(package)
    modules = modules_of(package)
    wrong = [f"{module}: has no row in the table" for module in sorted(modules - rows.keys())]
    wrong += [f"{module}: is in the table, and not in the package" for module in sorted(rows.keys() - modules)]
    for module in sorted(modules & rows.keys()):
        cell = cell_of(module, imports)
        if rows[module] != cell:
            wrong.append(f"{module}: the table says `{rows[module]}`, the code `{cell}`")
    return wrong


def rows_of(page: Path) -> dict[str, str]:
    rows = re.findall(r"^\| `rlexp/([\w/]+?)(?:/|\.py)` \| (.*?) ?\|$", page.read_text(encoding="utf-8"), re.M)
    assert rows, f"{page} has no table of imports"
    return dict(rows)


def cell_of(module: str, imports: list[Import]) -> str:
    """Return what the table must say of a module: its imports at the top of files, then those inside functions only."""
    theirs = [each for each in imports if each.module == module and each.to not in (module, "__init__")]
    files: dict[str, set[str]] = {}
    for each in theirs:
        files.setdefault(each.to, set()).add(each.target)

    def name(each: Import) -> str:
        few = each.to + ".py" != each.target and "/" in each.target and len(files[each.to]) <= FEW
        return each.target.removesuffix(".py").removesuffix("/__init__") if few else each.to

    top = {name(each) for each in theirs if each.top}
    later = {name(each) for each in theirs} - top
    return ", ".join(sorted(top)) + (LATER + ", ".join(sorted(later)) if later else "")


def upward(package: Path, picture: Path) -> list[str]:
    """Look for modules without a place in the picture, and for imports that do not lead to a line below."""
    height = {module: -number for number, line in enumerate(layers_of(picture)) for module in line}
    commands = layers_of(picture)[0]
    parts = {(layer_of(each.module), layer_of(each.to), each.file) for each in imports_of(package)
             if each.target.endswith(".py")}  # fmt: skip
    wrong = {f"{module}: has no place in the picture" for pair in parts for module in pair[:2]
             if module not in height and module not in ABOVE_ALL}  # fmt: skip
    wrong |= {
        f"{file}: {start} imports {end}, which is not below it"
        for start, end, file in parts
        if start != end and {start, end} <= height.keys() and height[end] >= height[start]
        and not {start, end} <= commands
    }  # fmt: skip
    return sorted(wrong)


def layer_of(module: str) -> str:
    return module.removesuffix("/__main__").removesuffix("/__init__")


def layers_of(picture: Path) -> list[set[str]]:
    """Return the modules of each line of the picture, the highest first. All commands are one line."""
    (text,) = re.findall(r"^```\n the commands.*?^```", picture.read_text(encoding="utf-8"), re.M | re.S)
    commands, training, below = re.split(r"^ ─+$", text, flags=re.M)
    in_line = re.compile(r"(?:^| )([a-z_]+)(?:/|\.py)(?= |$)")
    lines = [{f"{GROUP}/{module}" for module in in_line.findall(line)} for line in training.splitlines()]
    lines += [set(in_line.findall(line)) for line in below.splitlines()]
    return [set(in_line.findall(commands)), *filter(None, lines)]


def circles(package: Path) -> list[str]:
    """Look for a circle of files, and for one of modules."""
    inside = [each for each in imports_of(package) if each.target.endswith(".py") and str(each.file) != each.target]
    files = {(str(each.file), each.target) for each in inside}
    modules = {(each.module, each.to) for each in inside if each.module != each.to and not each.to.endswith("__init__")}
    return [circle for edges in (files, modules) if (circle := circle_of(edges))]


def circle_of(edges: set[tuple[str, str]]) -> str | None:
    graph: dict[str, set[str]] = {}
    for start, end in edges:
        graph.setdefault(start, set()).add(end)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(reversed(error.args[1]))
    return None


def table(package: Path) -> str:
    """Return the table: a row for each module, commands after the module that they start."""
    imports = imports_of(package)
    modules = sorted(modules_of(package))
    ending = {module: ".py" if (package / f"{module}.py").is_file() else "/" for module in modules}
    rows = [
        f"| `rlexp/{module}{ending[module]}` | {cell_of(module, imports)} |".replace(" |  |", " | |")
        for module in modules
    ]
    return "\n".join(["| module | imports |", "| --- | --- |", *rows]) + "\n"


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(before[: before.index("| module |")] + table(PACKAGE), encoding="utf-8")
