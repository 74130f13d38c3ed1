"""What the pages say: links lead somewhere, shown errors are the real ones, tables agree with the code.
Their commands are tested in `test_commands.py`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bench.kept_rows import page_of, refreshed, slug
from bench.tables import put
from rlexp.base.engine_facts import ENGINES
from rlexp.config import sizes
from rlexp.config.schema import KINDS
from rlexp.config.schema.keys import all_keys, launcher_keys
from tests.conftest import Shell
from tests.helpers.imports import PACKAGE, modules_of
from tests.helpers.pages import INDEX, MEASURED, PAGES
from tests.helpers.paths import ROOT

REFERENCES = ("README.md", "keys.md")  # their generated tables measure nothing
ROWS = 12  # of a measured table on a page, at most
LOOKED_UP = ("families", "where")  # tables in which each reader looks for a row of their own
GROUPS = ("Start", "Configure", "Operate", "Inside")  # of pages, as the README's headings name them


@pytest.mark.parametrize("page", [*PAGES, *MEASURED], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            to = page.parent / file if file else page
            assert to.exists(), target
            assert not anchor or anchor in anchors(to), target


def anchors(page: Path) -> list[str]:
    """Return what GitHub calls the headings of a page in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [slug(heading) for heading in re.findall(r"^#+ .*$", text, flags=re.MULTILINE)]


def grouped() -> list[tuple[str, str]]:
    """Return the pages that the index lists, each with its group."""
    text = INDEX.read_text(encoding="utf-8")
    found = []
    for group in GROUPS:
        _, heading, section = text.partition(f"\n## {group}\n")
        assert heading, group
        rows = re.findall(r"^\|.*$", section.partition("\n#")[0], flags=re.MULTILINE)
        found += [(page, group) for row in rows for page in re.findall(r"\]\(((?:convert/)?[\w-]+\.md)\)", row)]
    return found


def test_the_index_lists_each_page_once() -> None:
    assert sorted(page for page, _ in grouped()) == sorted(map(named, PAGES[2:]))


def named(page: Path) -> str:
    """Return how the index links to a page."""
    return str(page.relative_to(INDEX.parent))


@pytest.mark.parametrize("page", PAGES[2:], ids=named)
def test_a_page_shows_the_group_that_the_index_lists_it_in(page: Path) -> None:
    own = dict(grouped())[named(page)]
    index = "../README.md" if page.parent != INDEX.parent else "README.md"
    shown = (f"**{group}**" if group == own else f"[{group}]({index}#{group.lower()})" for group in GROUPS)
    title, empty, groups, *_ = page.read_text(encoding="utf-8").splitlines()
    assert (title[:2], empty, groups) == ("# ", "", " · ".join(shown))


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_a_measured_page_belongs_to_inside_and_to_a_page(page: Path) -> None:
    title, empty, shown, _, *rest = page.read_text(encoding="utf-8").splitlines()
    groups = [f"[{group}](../README.md#{group.lower()})" for group in GROUPS[:-1]]
    assert (title[:2], empty, shown) == ("# ", "", " · ".join([*groups, f"**{GROUPS[-1]}**"]))
    assert f"](../{page_of(page).name}" in rest[0] + rest[1]
    inside = INDEX.read_text(encoding="utf-8").partition("\n## Inside\n")[2]
    assert inside.count(f"](measured/{page.name})") == 1
    assert f"](measured/{page.name}" in page_of(page).read_text(encoding="utf-8")


# ---- rows that a page keeps of a measured table ----


def wrongly_kept(page: Path) -> list[str]:
    """Return the rows between markers that do not stand in the measured page, and markers that nothing closes."""
    text = page.read_text(encoding="utf-8")
    wrong, closed = [], 0
    for file, heading, block in re.findall(r"<!-- from ([\w/.-]+)#(\S+): begin -->\n(.*?)<!--", text, flags=re.DOTALL):
        measured = (page.parent / file).read_text(encoding="utf-8").splitlines()
        wrong += [line for line in block.splitlines() if line not in measured]
        closed += text.count(f"{block}<!-- from {file}#{heading}: end -->")
    return wrong + ["a marker without its end"] * (2 * closed != text.count("<!-- from "))


def long_tables(page: Path) -> list[str]:
    """Return the names of generated blocks that have a table of too many rows."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"<!-- (.+?): begin -->\n(.*?)<!-- \1: end -->", text, flags=re.DOTALL)
    long = [name for name, block in found if re.search(rf"(^\|.*\n){{{ROWS + 3},}}", block, flags=re.MULTILINE)]
    return [name for name in long if name not in LOOKED_UP]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_kept_rows_are_the_measured_ones(page: Path) -> None:
    assert wrongly_kept(page) == []
    assert refreshed(page) == (page.read_text(encoding="utf-8"), [])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in REFERENCES], ids=lambda page: page.name)
def test_a_page_has_no_long_measured_table(page: Path) -> None:
    assert long_tables(page) == [], f"write it into docs/{MEASURED[0].parent.name}/, and keep the rows that decide"


HEAD = "| engine | ring | s |\n| --- | ---: | ---: |\n"
KEPT = f"<!-- from measured/a.md#times: begin -->\n{HEAD}%s<!-- from measured/a.md#times: end -->\n"


def planted(folder: Path, kept: str) -> tuple[Path, Path]:
    (folder / "measured").mkdir()
    page, measured = folder / "a.md", folder / "measured" / "a.md"
    page.write_text(KEPT % kept, encoding="utf-8")
    measured.write_text("## Other\n\n## Times\n\n<!-- table: begin -->\n<!-- table: end -->\n", encoding="utf-8")
    return page, measured


def test_a_table_that_is_measured_again_takes_the_kept_rows_along(tmp_path: Path) -> None:
    page, measured = planted(tmp_path, "| zero1 | 2 | 5 |\n| | 4 | 6 |\n")
    put(measured, f"{HEAD}| torch | 2 | 5 |\n| zero1 | 2 | 7 |\n| | 4 | 8 |\n| zero3 | 4 | 6 |")
    assert page.read_text(encoding="utf-8") == KEPT % "| zero1 | 2 | 7 |\n| | 4 | 8 |\n"
    assert wrongly_kept(page) == []


def test_a_row_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, measured = planted(tmp_path, "| zero1 | 2 | 5 |\n| zero2 | 2 | 6 |\n")
    put(measured, f"{HEAD}| zero1 | 2 | 7 |\n| zero3 | 2 | 8 |")
    assert "measured/a.md#times does not have, or has several times: | zero2 | 2 | 6 |" in capsys.readouterr().err
    assert wrongly_kept(page) == ["| zero1 | 2 | 5 |", "| zero2 | 2 | 6 |"]


def test_a_long_table_and_an_open_marker_are_seen(tmp_path: Path) -> None:
    page, measured = planted(tmp_path, "")
    put(measured, HEAD + "| torch | 2 | 5 |\n" * (ROWS + 1))
    assert (long_tables(page), long_tables(measured)) == ([], ["table"])
    put(measured, HEAD + "| torch | 2 | 5 |\n" * ROWS)
    assert long_tables(measured) == []
    page.write_text((KEPT % "").replace("end", "END"), encoding="utf-8")
    assert wrongly_kept(page) == ["a marker without its end"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_errors_are_the_real_ones(rlexp: Shell, page: Path) -> None:
    for command, said in re.findall(r"\$ python -m rlexp (.*)\n(rlexp: .*)\n", page.read_text(encoding="utf-8")):
        answer = rlexp(*shlex.split(command))
        assert answer.returncode == 1
        assert answer.stderr.strip() == said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_rows_of_a_table_have_as_many_cells_as_its_header(page: Path) -> None:
    wide: int | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        assert None in (wide, cells) or cells == wide, f"{page.name}:{number}: {line}"
        wide = cells


def test_usage_lists_every_group_and_option() -> None:
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    groups, _, experiments = text.partition("| `+experiment=` |")
    row = re.compile(r"^\| `(\w+)` \| ([^|]*) \|", flags=re.MULTILINE)
    rows = dict(row.findall(groups))
    folders = {f.name: sorted(p.stem for p in f.glob("*.yaml")) for f in (ROOT / "conf").iterdir() if f.is_dir()}
    listed = re.findall(r"^\| (`[^|]*) \|", experiments.partition("\n\n")[0], flags=re.MULTILINE)
    assert sorted(name for names in listed for name in re.findall(r"`(\w+)`", names)) == folders.pop("experiment")
    assert {group: sorted(re.findall(r"`(\w+)`", options)) for group, options in rows.items()} == folders
    assert set(KINDS) <= set(rows)


def test_pages_name_keys_that_exist() -> None:
    groups = "|".join(key for key in all_keys() if "." not in key)
    known = {*all_keys(), *launcher_keys()}
    for page in (each for each in PAGES if each.parent.name != "convert"):  # these name other trainers' keys
        code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
        named = {key for each in code for key in re.findall(rf"^((?:{groups}|hydra\.launcher)\.[a-z_]+)\b", each)}
        files = {name for name in named if name.endswith((".py", ".jsonl"))}
        assert named - files <= known, page.name


def test_the_engines_page_and_the_table_of_engines_agree() -> None:
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\|.*\| ([^|]*) \|$", text, flags=re.MULTILINE))
    assert {name: tuple(re.findall(r"(?:fp|bf)\d+", said)) for name, said in rows.items()} == {
        name: traits.precisions for name, traits in ENGINES.items()
    }
    whole = {name for name in rows if re.search(rf"`{name}`[^|]*\| whole \| whole \| whole", text)}
    assert whole == {name for name, traits in ENGINES.items() if traits.replicated}
    pieces = {name for name in rows if re.search(rf"`{name}`[^|]*\| 1/N", text)}
    assert pieces == {name for name, traits in ENGINES.items() if traits.sharded}


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/.]+)` \|", text, flags=re.MULTILINE))
    modules = {module for module in modules_of(PACKAGE) if "__main__" not in module}
    assert named - {"module"} == {f"{each}.py" if each == "training/types" else f"{each}/" for each in modules}


def test_the_formula_of_the_field_would_have_trained_another_batch() -> None:
    """docs/why.md: batch 8, micro-batch 8, 8 replicas. The circulating formula accumulates once, which is 64 pairs."""
    batch, micro, world, ring = 8, 8, 8, 1
    circulating = max(1, batch // (micro * (world // ring)))
    assert circulating * micro * (world // ring) == 64
    with pytest.raises(sizes.ConfigError):
        sizes.grad_acc(batch, micro, world // ring)
