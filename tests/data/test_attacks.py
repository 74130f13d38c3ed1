"""Rows with anything in the place of any of their texts: they are shown, or refused in one message."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlexp.data.__main__ import main
from tests.helpers import attacks
from tests.helpers.parsing import parse_once
from tests.helpers.rows import assistant, cache, user

__all__ = ["cache"]  # a fixture of every test here too
TURNS = [user("a"), assistant("b")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
ROWS = (
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"chosen": TURNS, "rejected": [*TURNS[:1], assistant("c")], "system": "s", "source": "x"},
    {"prompt": TURNS[:1], "chosen": [assistant("b")], "rejected": [assistant("c")], "margin": 0.5, "id": 3},
    {"prompt": TURNS[:1], "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
     "chosen": [{"role": "assistant", "content": "", "tool_calls": [CALL]}], "rejected": [assistant("c")]},
)  # fmt: skip
KEYS = (
    "data=jsonl",
    "data.path=rows",
    "data.max_length=4096",
    "data.workers=1",
    "launch.device=cpu",
    "data.eval_size=0",
)


def cases(plant: str) -> Iterator[str]:
    """Yield a file of rows with a plant in one place."""
    good = json.dumps(ROWS[0])
    for row in ROWS:
        for planted in attacks.planted(row, plant):
            yield "\n".join([json.dumps(row), json.dumps(planted), ""])
            yield json.dumps([row, planted])
    yield f"{good}\n{plant}\n"
    yield f'{good}\n{{"prompt": {plant}, "chosen": "b", "rejected": "c"}}\n'
    yield f'[{good}, {{"prompt": {plant}}}]'
    yield plant


@attacks.few_or_many(15, 600)
def test_rows_of_anything_are_shown_or_refused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_once()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(attacks.VARIABLE, attacks.SECRET)
    texts = attacks.drawn((text for plant in attacks.PLANTS for text in cases(plant)), count)
    for number, text in enumerate(texts):
        Path("rows").write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
        how = ("data.bad_rows=drop", "data.too_long=drop", "--html", "page.html") if number % 2 else ("--json", "found")
        monkeypatch.setattr(sys, "argv", ["data", *KEYS, *how])
        with attacks.shown(text), attacks.bounded():
            assert main() in (0, 1)
            captured = capsys.readouterr()
            attacks.assert_harmless(captured.out + captured.err, *(each for each in Path().glob("*") if each.is_file()))
        for each in ("page.html", "found"):
            Path(each).unlink(missing_ok=True)
