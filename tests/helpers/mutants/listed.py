"""Plant the changes of tests/files/mutants_listed.tsv, each where the same is computed today: after a refactoring, too.

A line has the change's place at commit c0012adb, which is its name; the file below rlexp/, the function, and a
statement of it before and after, or the first line of an `if`, `for` or `with`; which it is, from 1, if several of the
function are equal; and what finds it: a test, `verify: NAME` of configurations.py, or `gone: WHY`.
"""

from __future__ import annotations

import ast
import csv
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path

from tests.helpers.mutants.runs import Reaching, Runs
from tests.helpers.mutants.sites import STATEMENT, Site, bare, parsed
from tests.helpers.paths import FILES, ROOT

LIST = FILES / "mutants_listed.tsv"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Row = Mapping[str, str]


def rows_below(folders: Sequence[str]) -> list[Row]:
    with LIST.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    return [row | {"line": str(line)} for line, row in enumerate(rows, 2)
            if not folders or row["file"].startswith(tuple(f"{each}/" for each in folders))]  # fmt: skip


def place_of(row: Row) -> Site | str:
    """Return the place of a line, or what is wrong with it. Statements are compared as Python reads them."""
    path = ROOT / "rlexp" / row["file"]
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    wanted = ast.dump(parsed(row["before"]))
    equal = [each for each in _inside(tree, row["function"].split(".")) if ast.dump(bare(each)) == wanted]
    which = int(row["which"] or len(equal) == 1) - 1
    if not 0 <= which < len(equal):
        return (f"{LIST.relative_to(ROOT)}:{row['line']}: {row['file']}, {row['function']}: {len(equal)} statements "
                f"are `{row['before']}`. Write into this line where the same is computed now (file, function, before, "
                "after, which), or as its finder `gone: WHY`.")  # fmt: skip
    node = equal[which]
    number = next(number for number, each in enumerate(ast.walk(tree)) if each is node)
    place = (node.lineno, node.col_offset, row["before"], row["after"])
    return Site(f"rlexp/{row['file']}", number, "", STATEMENT, *place)


def _inside(tree: ast.AST, names: Sequence[str]) -> Iterator[ast.stmt]:
    """Yield the statements of a function, in their order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and not names:
            yield node
        if not isinstance(node, DEFINITIONS):
            yield from _inside(node, names)
        elif names and node.name == names[0]:
            yield from _inside(node, names[1:])


def replant(folders: Sequence[str], workers: int) -> int:
    """Return 0 if each finder fails with its change, and passes without."""
    began, wrong = time.monotonic(), 0
    rows = rows_below(folders)
    alive = [row for row in rows if not row["finder"].startswith("gone: ")]
    places = [place_of(row) for row in alive]
    if moved := [each for each in places if isinstance(each, str)]:
        sys.exit("\n".join(moved))
    finders = [*dict.fromkeys(row["finder"] for row in alive)]
    asked = [("", finders[number::workers], []) for number in range(min(workers, len(finders)))]
    asked += [(row["change"], [row["finder"]], [place]) for row, place in zip(alive, places, strict=True)]
    with tempfile.TemporaryDirectory(prefix="rlexp-mutants-") as folder:
        runs = Runs([], folders, Path(folder), workers, print)
        with runs.pool() as pool:
            running = {pool.submit(runs.failure, runs.planted(*sites), [*map(Reaching, finders)]): change
                       for change, finders, sites in asked}  # fmt: skip
            for each in as_completed(running):
                change, failure = running[each], each.result()
                wrong += (failure is None) == bool(change)
                ended = " ".join(failure) if failure else "NOT FOUND" if change else "all pass"
                print(f"{time.monotonic() - began:7.0f} s  {change or 'without a change'}: {ended}", flush=True)
    print(f"{len(alive)} changes were planted; {len(rows) - len(alive)} are gone. {wrong or 'Nothing'} is wrong.")
    return 1 if wrong else 0
