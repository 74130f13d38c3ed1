"""`python -m tests.helpers.mutants`: which places there are, what a change makes of them, and that it is planted."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.mutants.listed import place_of, rows_below
from tests.helpers.mutants.planting import Plan, Watch, _Loader, environment
from tests.helpers.mutants.sites import KINDS, STATEMENT, WATCH, Site, changed, chosen, sites_of, watched
from tests.helpers.mutants.table import KNOWN
from tests.helpers.paths import ROOT

SOURCE = '''
LIMIT = 3

def compute(x, y=1, wide=True):
    """Say 1 < 2."""
    if x < y and wide:
        x += 2
    names = [x, -1]
    names.append(max(x, y) * 2 - names[0])
    assert x < 100
    return names

def text(x) -> str:
    return f"{x + 1}" + str(x + 1)
'''


def found(name: str, before: str | None = None) -> Site:
    (site,) = [each for each in sites_of("module.py", SOURCE)
               if each.name == name and (before is None or each.before == before)]  # fmt: skip
    return site


def module_of(tree: ast.Module, **known: Any) -> dict[str, Any]:
    exec(compile(tree, "module.py", "exec"), known)
    return known


def test_what_may_be_changed() -> None:
    """Nothing outside functions, no default, message, assertion or function that makes a text."""
    sites = sites_of("module.py", SOURCE)
    assert {(each.line, each.before, each.after) for each in sites} == {
        (6, "x < y", "x <= y"), (6, "x < y and wide", "x < y"), (6, "x < y and wide", "wide"),
        (7, "x += 2", "x -= 2"), (7, "2", "3"), (8, "-1", "0"),
        (9, "names.append(max(x, y) * 2 - names[0])", "pass"), (9, "max(x, y)", "min(x, y)"),
        (9, "max(x, y) * 2", "max(x, y)"), (9, "max(x, y) * 2", "2"), (9, "2", "3"), (9, "0", "1"),
        (9, "max(x, y) * 2 - names[0]", "max(x, y) * 2 + names[0]"), (9, "max(x, y) * 2 - names[0]", "max(x, y) * 2"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "before", "arguments", "result"),
    [
        ("<=", "x < y", (1, 1), [3, -1, 3]),
        ("right alone", "x < y and wide", (5, 1), [7, -1, 7]),
        ("-", "x += 2", (0, 1), [-2, -1, 4]),
        ("0", "-1", (1, 1), [1, 0, 1]),
        ("min", "max(x, y)", (1, 3, False), [1, -1, 1]),
        ("+", None, (1, 1), [1, -1, 3]),
        ("dropped", None, (1, 1), [1, -1]),
    ],
)
def test_a_change_computes_something_else(name: str, before: str | None, arguments: Any, result: Any) -> None:
    assert module_of(changed(SOURCE, found(name, before)))["compute"](*arguments) == result


def test_a_watched_module_computes_the_same_and_tells_what_would_differ(tmp_path: Path) -> None:
    sites = [found("<=", "x < y"), found("left alone", "x < y and wide"), found("-", "x += 2"), found("+")]
    log = tmp_path / "log"
    compute = module_of(watched(SOURCE, dict(enumerate(sites))), **{WATCH: Watch(str(log))})["compute"]
    assert compute(0, 1, False) == [0, -1, 2]
    assert log.read_text().splitlines() == ["1 reached", "0 reached", "1 active", "3 reached"]
    assert compute(1, 1) == [1, -1, 1]  # x < y is false, x <= y is true
    assert compute(0, 1) == [2, -1, 2]
    assert log.read_text().splitlines()[4:] == ["0 active", "3 active", "2 reached", "2 active"]


def test_places_of_one_file_keep_their_numbers_where_another_file_s_lie_between(tmp_path: Path) -> None:
    first, last = found("<="), found("-", "x += 2")
    plan = Plan([first, replace(first, path="other.py"), last], str(tmp_path / "log"))
    (tmp_path / "module.py").write_text(SOURCE)
    code = _Loader("module", str(tmp_path / "module.py"), plan, [0, 2]).get_code("module")
    assert code is not None
    known: dict[str, Any] = {WATCH: Watch(str(plan.log))}
    exec(code, known)
    known["compute"](0, 1)
    assert (tmp_path / "log").read_text().splitlines() == ["0 reached", "2 reached", "2 active"]


def test_what_only_takes_a_check_away_is_told_apart() -> None:
    sites = sites_of("module.py", "def f(a, b):\n    return dict(zip(a, b, strict=True)), sorted(a, reverse=True)")
    assert [(each.kind, each.checks) for each in sites] == [("flag", True), ("flag", False)]


def test_every_place_of_training_can_be_watched_and_changed() -> None:
    for path in sorted((ROOT / "rlexp" / "training").rglob("*.py")):
        source = path.read_text()
        sites = sites_of(path.name, source)
        assert len({site.id for site in sites}) == len(sites)
        for site in chosen(sites, 2, seed=1):
            compile(changed(source, site), path.name, "exec")
        compile(watched(source, dict(enumerate(chosen(sites, len(sites), seed=1)))), path.name, "exec")


def test_the_choice_follows_from_the_seed_and_has_every_kind() -> None:
    path = ROOT / "rlexp" / "training" / "ring" / "kernels" / "plain.py"
    sites = sites_of("plain.py", path.read_text())
    ten = chosen(sites, 10, seed=4)
    assert ten == chosen(sites, 10, seed=4) != chosen(sites, 10, seed=5)
    assert {each.kind for each in ten} == {each.kind for each in sites} == {*KINDS} - {"flag"}
    assert len({each.node for each in ten}) == 10


def test_reasons_belong_to_places_that_there_are() -> None:
    for path, line, before, after in KNOWN:
        source = (ROOT / "rlexp" / path).read_text()
        numbers = [number for number, each in enumerate(source.splitlines(), 1) if each.strip() == line]
        assert numbers, f"{path}: {line}"
        assert any(site.line in numbers and (site.before, site.after) == (before, after)
                   for site in sites_of(path, source)), f"{path}: {line}: {before}"  # fmt: skip


def test_listed_changes_are_in_the_code() -> None:
    for row in (rows := rows_below([])):
        if not row["finder"].startswith("gone: "):
            site = place_of(row)
            assert isinstance(site, Site), site
            compile(changed((ROOT / site.path).read_text(), site), site.path, "exec")
            file, _, test = row["finder"].partition("::")
            assert not test or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), row["finder"]
    moved = place_of(rows[0] | {"before": "if gone:"})
    assert "mutants_listed.tsv:2: " in moved
    assert ": 0 statements are `if gone:`. Write into this line where the same is computed now" in moved


def test_a_whole_statement_becomes_another() -> None:
    """A compound one keeps its body."""
    (number,) = [number for number, node in enumerate(ast.walk(ast.parse(SOURCE))) if isinstance(node, ast.If)]
    site = Site("module.py", number, "", STATEMENT, 1, 1, "if x < y and wide:", "if wide:")
    assert "    if wide:\n        x += 2\n    names = [x, -1]\n" in ast.unparse(changed(SOURCE, site))


def test_it_is_planted_in_a_process_of_its_own(tmp_path: Path) -> None:
    """As tests and ranks are started: the module is changed as it is imported, and its file stays as it is."""
    path = "rlexp/base/wilson.py"
    source = (ROOT / path).read_text()
    (site, *_) = [each for each in sites_of(path, source) if each.kind == "sign"]
    program = "import json; from rlexp.base.wilson import wilson; print(json.dumps(wilson(0.5, 10)))"

    def said(plan: Plan) -> Any:
        plan.write(tmp_path / "plan.json")
        run = subprocess.run([sys.executable, "-c", program], env=environment(tmp_path / "plan.json"), cwd=tmp_path,
                             capture_output=True, text=True, check=True, timeout=240)  # fmt: skip
        return json.loads(run.stdout)

    log = tmp_path / "log"
    unchanged = said(Plan([site], str(log)))
    assert unchanged == pytest.approx([0.2366, 0.7634], abs=1e-4)
    assert log.read_text().splitlines() == ["0 reached", "0 active"]
    assert said(Plan([site])) != unchanged
    assert (ROOT / path).read_text() == source
