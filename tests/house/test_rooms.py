"""The table in docs/imports.md, the picture in docs/architecture.md and the code agree: what each module imports, only
from modules below it, one door to each package, no circle."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.imports import PACKAGE, PAGE, PICTURE, circles, imports_of, layers_of, module_of, upward, wrong_rows

ONLY_HERE = {"deepspeed": "training/engine", "wandb": "training/sinks", "wandb_workspaces": "dashboard/__main__",
             "trackio": "training/sinks", "vllm": "training/rollout", "transformers": "training/model",
             "hydra": "config", "rich": "status"}  # fmt: skip
# `verify` holds the product to transformers alone, so it goes round the product's own door to it.
# Both commands that draw for the terminal use rich.
BESIDE = {"hydra": {"launch", "run", "__main__"}, "transformers": {"verify"}, "rich": {"status/__main__", "data"},
          "wandb": {"dashboard/__main__"}}  # fmt: skip
BY_TORCH = {"Counting._should_skip_dynamo", "Accelerator._is_in_bad_fork", "Staged._start_coalescing",
            "Staged._end_coalescing"}  # fmt: skip


# ---- the code as it is ----


def test_the_table_says_what_each_module_imports() -> None:
    assert wrong_rows(PACKAGE, PAGE) == []


def test_a_module_imports_only_what_is_below_it_in_the_picture() -> None:
    assert len(layers_of(PICTURE)) == 17
    assert upward(PACKAGE, PICTURE) == []


def test_no_file_and_no_module_imports_another_that_imports_it_back() -> None:
    assert circles(PACKAGE) == []


def nodes_of_product() -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes with their files."""
    for path in PACKAGE.rglob("*.py"):
        yield from ((str(path.relative_to(PACKAGE)), node) for node in ast.walk(ast.parse(path.read_text())))


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for place, node in nodes_of_product():
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(place)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_variables_are_named_by_what_they_hold() -> None:
    """And not by how it came about."""
    names = {(place, getattr(node, field)) for place, node in nodes_of_product()
             for kind, field in ((ast.Name, "id"), (ast.arg, "arg"), (ast.Attribute, "attr"), (ast.FunctionDef, "name"))
             if isinstance(node, kind) and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)}  # fmt: skip
    assert [each for each in sorted(names) if each[1] in ("said", "found", "told", "mine", "there")] == []


def uncalled(paths: Iterable[Path]) -> set[str]:
    """Return the private methods that no file of their class, or of one that it derives from, calls.

    A rehearsal overrides methods of training: one that training calls no more would do nothing there.
    """
    classes: dict[str, tuple[Path, ast.ClassDef]] = {}
    names: dict[Path, set[str]] = {}
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names[path] = {node.id for node in nodes if isinstance(node, ast.Name)}
        names[path] |= {node.attr for node in nodes if isinstance(node, ast.Attribute)
                        and getattr(getattr(node.value, "func", None), "id", "") != "super"}  # fmt: skip
        classes.update({node.name: (path, node) for node in nodes if isinstance(node, ast.ClassDef)})

    def called(name: str) -> set[str]:
        if name not in classes:
            return set()
        path, node = classes[name]
        return names[path].union(*(called(base.id) for base in node.bases if isinstance(base, ast.Name)))

    return {f"{name}.{method.name}" for name, (_, node) in classes.items() for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name[0] == "_" != method.name[1]
            and method.name not in called(name)}  # fmt: skip


def test_a_private_method_is_called() -> None:
    assert uncalled(PACKAGE.rglob("*.py")) == BY_TORCH


@pytest.mark.parametrize("package", ONLY_HERE)
def test_a_package_has_one_door(package: str) -> None:
    modules = {each.module for each in imports_of(PACKAGE) if each.to == package}
    assert modules <= {ONLY_HERE[package]} | BESIDE.get(package, set())


def test_functions_fit_a_screen() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


# ---- what is planted is found ----


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the code to plant things in."""
    shutil.copytree(PACKAGE, tmp_path / "rlexp", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copy(PAGE, tmp_path / "page.md")
    return tmp_path


def add(copy: Path, file: str, line: str) -> None:
    path = copy / "rlexp" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "line", "circle"),
    [
        ("training/dataset/seam.py", "from rlexp.training.dataset.seam import Seam", None),  # itself: no circle
        ("training/dealer/packing.py", "from rlexp.training.train.rows_task import RowsTask",
         "dealer/packing.py"),
        ("training/types.py", "def later():\n    import rlexp.training.dealer.packing", "dealer/packing.py"),
        ("training/dataset/sampler.py", "if TYPE_CHECKING:\n    from rlexp.training.train import examples",
         "train/examples.py"),
        ("training/ring/layouts/ulysses.py", "import rlexp.training.ring.layouts", "layouts/__init__.py"),
        ("launch/run_folder.py", "def later():\n    from rlexp.run import job", "run/job.py"),  # back up
    ],
)  # fmt: skip
def test_a_planted_circle_is_found(copy: Path, file: str, line: str, circle: str | None) -> None:
    add(copy, file, line)
    found = circles(copy / "rlexp")
    assert bool(found) == (circle is not None)
    assert circle is None or any(circle in each for each in found)


def test_a_planted_circle_of_modules_is_found(copy: Path) -> None:
    """None of the files imports another back."""
    (copy / "rlexp" / "training" / "train" / "leaf.py").write_text("", encoding="utf-8")
    add(copy, "training/algos/policy.py", "from rlexp.training.train import leaf")
    (found,) = circles(copy / "rlexp")
    assert "training/train → training/algos" in found


def test_an_override_that_is_called_no_more_is_found(tmp_path: Path) -> None:
    scoring = PACKAGE / "training" / "rollout" / "scoring.py"
    changed = tmp_path / "scoring.py"
    changed.write_text(scoring.read_text(encoding="utf-8").replace("self._whole(", "whole("), encoding="utf-8")
    override = PACKAGE / "preflight" / "rehearsal" / "longest_samples.py"
    assert "ShortScorer._whole" not in uncalled([scoring, override])
    assert "ShortScorer._whole" in uncalled([changed, override])


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        ("training/algos/pairs.py", "import numpy", "numpy"),
        ("launch/run_folder.py", "from rlexp.training.checkpoint.restore import Reader", "checkpoint/restore"),
        ("training/engine/plain.py", "from rlexp.training.ring.layouts import get_layout", "ring/layouts"),
        ("data/__main__.py", "import numpy", "numpy"),  # a command's row is its own, beside its module's
    ],
)
def test_an_import_that_the_table_does_not_list_is_found(copy: Path, file: str, line: str, name: str) -> None:
    add(copy, file, line)
    (wrong,) = wrong_rows(copy / "rlexp", copy / "page.md")
    assert wrong.startswith(f"{module_of(Path(file))}: the table says")
    assert name in wrong


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("launch/stops.py", "import rlexp.training.world.groups", "launch imports training/world"),
        ("training/ring/placement.py", "import rlexp.training.algos.policy", "training/ring imports training/algos"),
        ("training/metrics/meter.py", "def later():\n    import rlexp.training.sinks.base", "training/metrics imports"),
        ("verify/attic/leaf.py", "import rlexp.attic", "attic: has no place"),
        ("status/view.py", "import rlexp.verify.report", None),  # a command's part, used by another command
    ],
)
def test_an_import_that_leads_up_is_found(copy: Path, file: str, line: str, said: str | None) -> None:
    for new in (copy / "rlexp" / "attic.py", copy / "rlexp" / "verify" / "attic" / "leaf.py"):
        new.parent.mkdir(exist_ok=True)
        new.write_text("", encoding="utf-8")
    add(copy, file, line)
    found = upward(copy / "rlexp", PICTURE)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [("| `rlexp/base/` |", "| `rlexp/base/` | numpy", "numpy"),
     ("| `rlexp/base/` |", "| `rlexp/attic/` | numpy |\n| `rlexp/base/` |", "attic")],
)  # fmt: skip
def test_what_the_table_lists_and_no_module_imports_is_found(copy: Path, before: str, after: str, said: str) -> None:
    page = copy / "page.md"
    page.write_text(page.read_text(encoding="utf-8").replace(before, after, 1), encoding="utf-8")
    (wrong,) = wrong_rows(copy / "rlexp", page)
    assert said in wrong
