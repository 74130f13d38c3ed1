"""Numbers on pages: measured ones are links to the section that measured them, and stated defaults are the schema's.

In the pages that newcomers read first, a number with a unit of time, memory or ratio stands in a link to its section of
docs/measured/, in code, or between the markers of a table that is copied from there.
"""

from __future__ import annotations

import functools
import re
from enum import Enum
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bench.kept_rows import filled, slug, table_under
from rlexp.config.load import composed
from tests.helpers.pages import PAGES
from tests.helpers.paths import ROOT

MEASURED = ROOT / "docs" / "measured"
FIRST = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("recipes.md", "beside_trl.md", "why.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(((?:docs/)?measured/[\w-]+\.md)(?:#([\w-]+))?\)")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
UNIT = r"(?:s|ms|min|h|seconds?|minutes?|hours?|GiB|MiB|times|%|percent|tokens a second|tok/s|GPU hours?)"
WITH_UNIT = re.compile(rf"(?<![\w.,]){NUMBER} ?{UNIT}(?![\w/])")
ALLOWED = (r"\b95 %",)  # the confidence of an interval
DEFAULT = re.compile(
    r"`([a-z_]+(?:\.[a-z_]+)*)=([^`\s]+)`\*{0,2}(?:,| is)? \(?(?:the )?default(?: of `(\w+)`)?(?=[).;]|$)"
)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def said(text: str) -> str:
    """Return a page's sentences: without blocks, code, tables that are copied or generated, and addresses of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- ([^\n]+?): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


def section(page: Path, heading: str | None) -> str:
    """Return a page's text under a heading, with the headings below it; the whole page without one."""
    text = page.read_text(encoding="utf-8")
    if not heading:
        return text
    found = [(len(mark), slug(title), at.start()) for at in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE)
             for mark, title in [at.groups()]]  # fmt: skip
    (at,) = [at for at, (_, name, _) in enumerate(found) if name == heading]
    end = next((start for level, _, start in found[at + 1 :] if level <= found[at][0]), len(text))
    return text[found[at][2] : end]


def not_measured(page: Path, text: str, numbers: str = NUMBER) -> list[str]:
    """Return the numbers in links to measured sections that do not occur there."""
    wrong = []
    for words, file, heading in LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        there = section(page.parent / file, heading)
        wrong += [f"[{words}]({file}#{heading}): {number}" for number in re.findall(rf"(?<![\w.]){numbers}", words)
                  if not re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", there)]  # fmt: skip
    return wrong


def without_source(text: str) -> list[str]:
    """Return numbers with a unit of time, memory or ratio that are no link to where they were measured."""
    text = LINK.sub("", said(text))
    for pattern in ALLOWED:
        text = re.sub(pattern, "", text)
    return [
        text[max(0, found.start() - 40) : found.end() + 10].replace("\n", " ") for found in WITH_UNIT.finditer(text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_number_in_a_link_to_a_measured_section_stands_there(page: Path) -> None:
    numbers = NUMBER if page in FIRST else rf"(?=\d\d\d|[\d,]+\.\d|\d,\d){NUMBER}"  # elsewhere also "a ring of 4"
    assert not_measured(page, page.read_text(encoding="utf-8"), numbers) == []


@pytest.mark.parametrize("page", FIRST, ids=lambda page: page.stem)
def test_a_measured_number_is_a_link_to_its_measurement(page: Path) -> None:
    assert without_source(page.read_text(encoding="utf-8")) == []


@functools.cache
def default_of(key: str, loss: str | None) -> object:
    """Return a key's value, or a group's option, where nothing is chosen but perhaps a loss."""
    if "." not in key:
        listed = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))["defaults"]
        return next(each[key] for each in listed if isinstance(each, dict) and key in each)
    cfg = composed([f"loss={loss}"] if loss else [])
    value = OmegaConf.select(cfg, key)
    return value.name if isinstance(value, Enum) else value


def wrong_defaults(text: str) -> list[str]:
    return [f"{key}={value}: is {default_of(key, loss or None)}" for key, value, loss in DEFAULT.findall(text)
            if str(yaml.safe_load(value)) != str(default_of(key, loss or None))]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_value_that_a_page_calls_the_default_is_the_default(page: Path) -> None:
    assert wrong_defaults(page.read_text(encoding="utf-8")) == []


def test_the_verdicts_on_converted_files_add_up() -> None:
    """docs/measured/convert.md: written by hand, so the sums that pages repeat are computed here."""
    head, _, *rows = filled(table_under(MEASURED / "convert.md", "by-trainer"))
    of = [dict(zip(head[1:], map(int, row[1:]), strict=True)) for row in rows]
    for each in of:
        assert each["files"] == each["written"] + each["refused"]
        assert each["composed"] == each["agree"] + each["differ, and say so"] + each["unread"]
        assert each["composed"] <= each["written"]
    assert {name: sum(each[name] for each in of[:-1]) for name in of[-1]} == of[-1]


# ---- what is planted is found ----

TABLE = "# Speed\n\n## HH\n\n| a | 0.248 | 1,234 |\n\n### More\n\n46.1\n\n## Long\n\n0.941, 12.5\n"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[0.248 s](measured/a.md#hh), [1,234 and 46.1](measured/a.md#hh), [0.941](measured/a.md)", 0),
        ("[0.25 s](measured/a.md#hh)", 1),
        ("[0.941 s](measured/a.md#hh)", 1),
        ("[46.1 GiB](measured/a.md#more)", 0),
        ("[2.5 s](measured/a.md#long)", 1),  # 12.5 stands there
        ("[234](measured/a.md#hh)", 1),
        ("```\n[7](measured/a.md#hh)\n```", 0),
    ],
)
def test_a_number_that_was_not_measured_is_found(tmp_path: Path, text: str, wrong: int) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "a.md").write_text(TABLE, encoding="utf-8")
    assert len(not_measured(tmp_path / "page.md", text)) == wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("takes [0.248 s](measured/a.md#hh) for 8,000 tokens on 8 GPUs of 80 GB, and `time=3 s`", 0),
        ("takes 0.248 s", 1),
        ("takes 15 seconds, 4.4 GiB and 12 %, which is 1.78 times as much at 1,234 tokens a second", 5),
        ("<!-- from measured/a.md#hh: begin -->\n| 3 s |\n<!-- from measured/a.md#hh: end -->", 0),
        ("```\n3 s\n```\n[3 s](other.md)", 1),
        ("step 3 sums 4 things of times", 0),
    ],
)
def test_a_measured_number_without_its_source_is_found(text: str, wrong: int) -> None:
    assert len(without_source(text)) == wrong


def test_a_wrong_default_is_found() -> None:
    right = (
        "`launch.preflight=auto` (the default), **`train.micro_batch_size=auto`** (the default), `engine=auto` is the "
    )
    assert len(DEFAULT.findall(right + "default. (`loss.critic=own`, the default of `ppo`)")) == 4
    assert wrong_defaults(right + "default. (`loss.critic=own`, the default of `ppo`)") == []
    assert len(wrong_defaults("`launch.preflight=off` (the default). `engine=zero1`, the default.")) == 2
