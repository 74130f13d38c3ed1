"""What the pages say: commands compose, links lead somewhere, shown errors are the real ones."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlexp.base.engine_facts import ENGINES
from rlexp.config import sizes
from rlexp.config.schema import KINDS
from rlexp.config.schema.keys import all_keys, launcher_keys
from tests.helpers.imports import PACKAGE, modules_of
from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = ("Start", "Configure", "Operate", "Inside")  # of pages, as the README's headings name them
Shell = Callable[..., subprocess.CompletedProcess[str]]


def commands(pages: Sequence[Path] = PAGES) -> list[str]:
    of_pages = []
    for page in pages:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = (line.partition("#")[0].strip() for line in block.splitlines())
            ours = re.compile(r"\brlexp\b|launchers/\w+\.sh")
            of_pages += [line for line in lines if ours.search(line) and not re.search(r"rlexp\.\w+", line)]
    return sorted(set(of_pages))


def cases() -> list[Any]:
    """Return the commands of all pages; those of the README are quick enough for `make test`."""
    first = commands(PAGES[:1])
    return [*first, *(pytest.param(each, marks=pytest.mark.slow) for each in commands() if each not in first)]


@pytest.mark.parametrize("command", cases())
def test_every_command_composes(rlexp: Shell, tmp_path: Path, command: str) -> None:
    (tmp_path / "PAIRS.jsonl").write_text("{}\n", encoding="utf-8")
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = words[words.index("-m") :]
    begin = next(place for place, word in enumerate(words) if word == "rlexp" or word.endswith(".sh"))
    args = words[begin + 1 :]
    multirun = "-m" in args
    args = [arg for arg in args if arg not in ("-m", "--cfg", "job", "--resolve")]
    shown = rlexp("--cfg", "job", *([] if multirun else ["--resolve"]), *args)
    assert shown.returncode == 0, shown.stderr
    assert "ring_size" in shown.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings], target


def grouped() -> list[tuple[str, str]]:
    """Return the pages that the README lists in its tables of pages, each with its group."""
    text = PAGES[0].read_text(encoding="utf-8")
    found = []
    for group in GROUPS:
        _, heading, section = text.partition(f"\n### {group}\n")
        assert heading, group
        rows = re.findall(r"^\|.*$", section.partition("\n#")[0], flags=re.MULTILINE)
        found += [(page, group) for row in rows for page in re.findall(r"\]\(docs/([\w-]+\.md)\)", row)]
    return found


def test_the_readme_lists_each_page_once() -> None:
    assert sorted(page for page, _ in grouped()) == [page.name for page in PAGES[1:]]


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_a_page_shows_the_group_that_the_readme_lists_it_in(page: Path) -> None:
    own = dict(grouped())[page.name]
    shown = (f"**{group}**" if group == own else f"[{group}](../README.md#{group.lower()})" for group in GROUPS)
    title, empty, groups, *_ = page.read_text(encoding="utf-8").splitlines()
    assert (title[:2], empty, groups) == ("# ", "", " · ".join(shown))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_errors_are_the_real_ones(rlexp: Shell, page: Path) -> None:
    for command, said in re.findall(r"\$ python -m rlexp (.*)\n(rlexp: .*)\n", page.read_text(encoding="utf-8")):
        answer = rlexp(*shlex.split(command))
        assert answer.returncode == 1
        assert answer.stderr.strip() == said


def test_usage_lists_every_group_and_option() -> None:
    text = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, flags=re.MULTILINE))
    folders = {f.name: sorted(p.stem for p in f.glob("*.yaml")) for f in (ROOT / "conf").iterdir() if f.is_dir()}
    folders.pop("experiment")
    assert {group: sorted(re.findall(r"`(\w+)`", options)) for group, options in rows.items()} == folders
    assert set(KINDS) <= set(rows)


def test_pages_name_keys_that_exist() -> None:
    groups = "|".join(key for key in all_keys() if "." not in key)
    known = {*all_keys(), *launcher_keys()}
    for page in (each for each in PAGES if each.name != "coming_from.md"):  # it names other trainers' keys
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
