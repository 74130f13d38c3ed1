"""Files of a run or a sweep that somebody else spoilt end neither `status` nor `compare`, and print no escape."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base.plain_json import Kinds, dumps, loads, of_kinds
from rlexp.launch import run_folder
from rlexp.status.__main__ import main
from tests.helpers.curves import a_run, compare

DEEP = "[" * 100_000
KINDS = (None, "\x1b[2Jtext", 0, -3, 1.5, True, [1], {"a": {"b": 1}})  # in the place of any value
TEXTS = (DEEP, "[]", "3", '"a"', "{", "\x00", "a: &a [*a]", '{"rank": "x"}\n', "\udcff")
FILES = (
    *("run.json", "memory.jsonl", "metrics.jsonl", "sweep.json", "config.yaml", "rollouts.jsonl", "verdict.json"),
    "deal.json",
)


@pytest.fixture
def runs(two: Path, unpainted: None) -> Path:
    del unpainted
    a_run(two / "spoilt", "parallel=ring2")
    return two


def looked_at(runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Look at the runs by both commands, from their folder. Each ends with an answer or one message."""
    capsys.readouterr()
    before = Path.cwd()
    os.chdir(runs)
    try:
        codes = [main(["."]), main(["spoilt"]), main([".", "--json"]), compare(runs, "--force", "--out", runs / "out")]
    finally:
        os.chdir(before)
    assert set(codes) <= {0, 1}
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert [line for line in said.split("\n") if not line.isprintable()] == []
    return said


@pytest.mark.parametrize("text", TEXTS, ids=[ascii(each)[:20] for each in TEXTS])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_anything(name: str, text: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "spoilt" / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    looked_at(runs, capsys)


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_an_end(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe would be waited for; a device gives zeros for ever, and a hole in a file as many as it likes."""
    file = runs / "spoilt" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    looked_at(runs, capsys)
    file.unlink()
    file.symlink_to("/dev/zero")
    looked_at(runs, capsys)
    file.unlink()
    with file.open("wb") as hole:
        hole.truncate(1 << 40)
    looked_at(runs, capsys)


def test_a_rank_that_says_little_is_in_no_long_step(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on, in this process; its rank began its step long ago."""
    place = runs / "spoilt"
    known = json.loads((place / "run.json").read_text(encoding="utf-8"))
    known |= {"status": "running", "pid": os.getpid(), "host": socket.gethostname()}
    (place / "run.json").write_text(json.dumps(known), encoding="utf-8")
    run_folder.claim(place)
    rank = {"rank": 0, "at": 1.0, "began": 1.0, "step": 3, "phase": "forward", "peaks": {}}
    whole = {"pack": 1, "packs": 2, "tokens": 3, "of_tokens": 5}
    for facts, long in ((rank | whole, True), (rank, False), (rank | whole | {"tokens": "x"}, False)):
        (place / "memory.jsonl").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        assert ("spoilt is in step 3" in looked_at(runs, capsys)) == long
    run_folder.leave(place)


@pytest.mark.parametrize("value", KINDS, ids=repr)
def test_a_value_of_another_kind(value: object, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value of run.json in turn, then those of the sizes, of a rank's line and of a row."""
    place = runs / "spoilt"
    known = json.loads((place / "run.json").read_text(encoding="utf-8"))
    rank = {"rank": 0, "at": 1.0, "step": 3, "phase": "forward", "peaks": {"forward": 5}, "tensors": {"forward": 5},
            "pack": 1, "packs": 2, "tokens": 3, "of_tokens": 5, "pace": 0.1, "began": 1.0, "died": "here"}  # fmt: skip
    row = json.loads((place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    spoilt: list[tuple[str, object]] = [("run.json", known | {key: value}) for key in known]
    spoilt += [("run.json", known | {"sizes": known["sizes"] | {key: value}}) for key in known["sizes"]]
    spoilt += [("run.json", known | {"requeues": [value]}), ("run.json", known | {"data": {"versions": value}})]
    spoilt += [("memory.jsonl", rank | {key: value}) for key in rank]
    spoilt += [("memory.jsonl", rank | {"peaks": {"forward": value}})]
    spoilt += [("metrics.jsonl", row | {key: value}) for key in row]
    whole = {name: (place / name).read_bytes() for name in ("run.json", "metrics.jsonl")}
    for name, content in spoilt:
        (place / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
        looked_at(runs, capsys)
        (place / name).unlink()
        for each, text in whole.items():
            (place / each).write_bytes(text)


@given(
    st.recursive(st.text() | st.integers() | st.none(), lambda each: st.dictionaries(st.text(), each) | st.lists(each))
)
def test_what_is_written_prints_and_is_read_back(value: object) -> None:
    for text in (dumps(value), dumps(value, indent=1)):
        assert all(each.isprintable() or each == "\n" for each in text)
        assert loads(text) == value
    assert dumps(["é日本", "\x9b\u202e\ud800\U000e0041"]) == '["é日本", "\\u009b\\u202e\\ud800\\udb40\\udc41"]'


def test_values_are_of_their_kinds() -> None:
    kinds: Kinds = {"a": int, "b": int, "c": (str, bool), "d": str}
    assert of_kinds({"a": 1, "b": True, "c": "x", "d": None, "e": []}, kinds) == {"a": 1, "c": "x", "e": []}
    assert of_kinds([1], {}) == {}
    with pytest.raises(ValueError, match="too deep"):
        loads(DEEP)
