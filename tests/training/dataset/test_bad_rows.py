"""Rows and files that cannot be used: each is named by file, line and field, and none is trained on silently."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base.errors import CheckpointError, ConfigError, DataError
from rlexp.config.load import compose_config
from rlexp.config.schema.row_kinds import Kind
from rlexp.launch import run_folder
from rlexp.training.dataset import hub, row_files
from rlexp.training.dataset.hub import HubSplit
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.resume import refuse_other_versions
from tests.helpers.rows import SMALL, as_lines, assistant, cache, configured, ids, read, user, write_lines

__all__ = ["cache"]  # a fixture of every test here too
GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(("line", "said"), [
    ("{", "is not JSON"), ("[1]", "must be a JSON object, not list"),
    ('{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}', "is not UTF-8 text"),
    ("[" * 100_000, "is not JSON"),
    ('{"prompt": "a", "chosen": "b"}', "field `rejected` is missing; the row has chosen, prompt"),
    ('{"prompt": "a", "chosen": 3, "rejected": "c"}', "field `chosen` must be a text"),
    ('{"prompt": "a", "chosen": "b", "rejected": ""}', "field `rejected` must be a text that is not empty"),
    ('{"prompt": "", "chosen": "b", "rejected": "c"}', "field `prompt` must not be empty"),
    ('{"prompt": 7, "chosen": "b", "rejected": "c"}', "field `prompt` must be a text or a list"),
    ('{"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}', "message (number 1) without"),
    ('{"prompt": [], "chosen": "b", "rejected": "c"}', "field `prompt` must be a text or a list"),
    ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "chosen": "b", "rejected": "c"}',
     "a part of type image; only text is read"),
    ('{"chosen": "b", "rejected": "c"}', "field `prompt` is missing"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "tools": "{"}', "field `tools` is a text, and not JSON"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c", "system": 1}', "field `system` must be a text"),
    ('{"prompt": "a", "chosen": [{"role": "assistant", "content": "", "tool_calls": [{}]}], "rejected": "c"}',
     "has tools, or calls of them, and no chat template writes them"),
    ('{"prompt": "a", "chosen": [{"role": "assistant", "content": ""}], "rejected": "c"}', "a message that is empty"),
    ('{"prompt": "a", "completion": "b", "label": true}',
     "make it unpaired (prompt, completion, label), and the rows before it are pairs (chosen, rejected)"),
])  # fmt: skip
def test_a_bad_row_is_named_by_file_line_and_field(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError) as error:
        read(str(path))
    assert str(error.value).startswith(f"{path}:3: ")
    assert said in str(error.value)
    assert len(read(str(path), "data.bad_rows=drop").train) == 1


@pytest.mark.parametrize(("row", "said"), [
    ({"chosen": [user("a"), assistant("b")], "rejected": [user("x"), assistant("c")]}, "share no message before"),
    ({"chosen": [user("a"), assistant("b")], "rejected": "c"}, "must both be whole conversations, or both"),
    ({"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": "c"},
     "must both be whole conversations, or both"),
    ({"chosen": "b", "rejected": "c"}, "field `prompt` is missing"),
    ({"prompt": "other", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
     "field `prompt` is not in the beginning"),
])  # fmt: skip
def test_conversations_that_are_no_pair_are_named(row: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{said}"):
        read(write_lines(tmp_path, [row]))


@pytest.mark.parametrize(("kind", "row", "said"), [
    (Kind.unpaired, {"prompt": "a", "completion": "b", "label": 1}, "field `label` must be true or false"),
    (Kind.supervised, {"messages": [user("a")]}, "has no message of the role `assistant`"),
    (Kind.supervised, {"messages": [assistant("a")]}, "begins with the role `assistant`"),
    (Kind.prompts, {"prompt": ""}, "field `prompt` must not be empty"),
    (Kind.prompts, {"prompt": "a", "answer": ""}, "must be a number or a text that is not empty"),
    (Kind.prompts, {"prompt": "a", "answer": True}, "must be a number or a text"),
    (Kind.prompts, {"prompt": "a", "answer": float("nan")}, "must be a number or a text"),
    (Kind.prompts, {"prompt": "a", "answer": ["b"]}, "must be a number or a text"),
])  # fmt: skip
def test_a_bad_row_of_another_kind_is_named(kind: Kind, row: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{said}"):
        read(write_lines(tmp_path, [row]), kind=kind)


def test_a_pair_among_single_answers_is_told_from_a_field_that_is_missing(tmp_path: Path) -> None:
    answer = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(DataError, match=r"which make it pairs .*, and the rows before it are unpaired"):
        read(write_lines(tmp_path, [answer, GOOD]), kind=Kind.unpaired)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_rows_by_the_thousand_are_reported_together_and_all_listed(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other processes read them, which are started after four parts."""
    monkeypatch.setattr(row_files, "MOST_ROWS", 128)
    random_ = random.Random(0)
    kinds = ["{", "[1]", '{"prompt": 1}', '{"prompt": "a", "chosen": "b", "rejected": ""}', "\ufeff", '"text"', "NaN"]
    lines = [json.dumps({**GOOD, "prompt": f"number {number}"}) for number in range(2200)]
    places = sorted(random_.sample(range(1, 2200), 1200))
    for place in places:
        lines[place] = random_.choice(kinds)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as error:
        read(str(path), f"data.workers={workers}")
    said = str(error.value).splitlines()
    assert said[0] == f"{path}: 1,200 rows cannot be used."
    assert len(said) == 13
    listed = Path(said[11].rpartition(" ")[2]).read_text(encoding="utf-8").splitlines()
    assert [int(line.split(":")[1]) for line in listed] == [place + 1 for place in places]
    assert "data.bad_rows=drop" in said[-1]
    kept = read(str(path), "data.bad_rows=drop", f"data.workers={workers}")
    assert len(kept.train) == 1000
    assert kept.dropped == {"unusable, and left out by data.bad_rows=drop": len(listed)}


@SMALL
@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode("utf-8", "ignore"))))
def test_a_file_of_anything_is_read_or_refused_in_one_message(content: bytes, tmp_path: Path) -> None:
    for name, bytes_ in (
        ("rows.jsonl", content),
        ("rows.json", b"[" + content + b"]"),
        ("x.gz", gzip.compress(content)),
    ):
        (tmp_path / name).write_bytes(bytes_)
        with pytest.raises(DataError, match=name):
            read(str(tmp_path / name))


def test_files_that_are_cut_off_or_empty_are_refused(tmp_path: Path) -> None:
    lines = as_lines([GOOD] * 50)
    for name, content, said in (
        ("empty.jsonl", b"\n", "has no rows"),
        ("empty.json", b"[]", "has no rows"),
        ("torn.json", b'[{"prompt": "a", "chosen": "b", "rejected": "c"},', "row 2 is not JSON"),
        ("rows.bz2", b"BZh9" + b"x" * 40, "is bzip2, which is not read. Give JSON lines, a JSON list or Parquet"),
        ("cat.png", b"\x89PNG\r\n", "is a picture, which is not read"),
        ("rows.csv", b"prompt,chosen\na,b\n", "is not JSON .* Give JSON lines, a JSON list or Parquet"),
        ("comma.json", b'[{"prompt": "a", "chosen": "b", "rejected": "c"} {}]', "a comma or ] must follow row 1"),
        ("torn.gz", gzip.compress(lines)[:-9], "cannot be read"),
        ("torn.zst", pa.compress(lines, codec="zstd", asbytes=True)[:-3], "cannot be read"),
        ("latin.jsonl", json.dumps(GOOD).encode() + b"\n\xff\xfe\n", "latin.jsonl:2: is not UTF-8"),
        ("torn.parquet", b"PAR1 and no more", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=said):
            read(str(tmp_path / name))


def test_wrong_settings_of_rows_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path, [GOOD] * 3)
    unpaired = [{"prompt": "a", "completion": "b", "label": True}]
    (tmp_path / "other").mkdir()
    with pytest.raises(
        DataError, match=r"data\.columns\.prompt=question: .*rows.jsonl:1 has no such column, but chosen"
    ):
        read(path, "data.columns.prompt=question")
    with pytest.raises(
        DataError, match=r"the run needs pairs, with `chosen` and `rejected`, and the row has completion"
    ):
        read(write_lines(tmp_path / "other", unpaired))
    with pytest.raises(ConfigError, match=r"data\.eval_size=3: 3 rows are left to train on"):
        read(write_lines(tmp_path, [{**GOOD, "prompt": str(number)} for number in range(3)]), "data.eval_size=3")
    with pytest.raises(DataError, match=r"data\.path=.*cannot be read as a data set"):
        read(str(tmp_path / "other" / "nothing"))


@pytest.mark.parametrize(("overrides", "said"), [
    (["data.sources.a.weight=0"], "data.sources.a.weight=0.0: must be greater than 0, or null"),
    (["data.sources.a.weight=-1"], "data.sources.a.weight=-1.0: must be greater than 0, or null"),
    (["data.sources.a.wieght=1"], "no such key of a source. Did you mean weight?"),
    (["data.sources.a.weight=1", "data.sources.b.path=org/b"], "data.sources.b.weight: has no value, and other"),
    (["data.path=org/c"], "data.path=org/c: describes a single source, and data.sources names a"),
    (["data.columns.prompt=x"], "each of several sources has its own columns"),
    (["data.sources.a.columns.promt=x"], "data.sources.a.columns.promt=x: no such field. Did you mean prompt?"),
    (["data.sources.a=5"], "data.sources.a=5: must be a group of keys"),
    (["data.sources.a.path=./nothing.jsonl"], "data.sources.a.path=./nothing.jsonl: no such file or folder"),
    (["data.sources.a.path=x/*.jsonl"], "matches no file"),
    (["data.eval_size=5", "data.sources.a.eval_split=test"], "data.eval_size=5: holds out some of the rows"),
    (["data.workers=0"], "data.workers=0: must be at least 1"),
    (["data.sources.a.path=README.md", "data.sources.a.eval_split=test"], "README.md is a file, and only a data set"),
    (["data.sources.a.path=README.md", "data.sources.a.split=test"], "data.sources.a.split=test: data.sources.a.path"),
    (["data.sources.a.path=docs", "data.sources.a.revision=v1"], "is a folder, which has no revisions"),
    (["data.sources.a.eval_split=train"], "data.sources.a.eval_split=train: these are the rows to train on"),
    (["train.eval_every=1"], "there is no held-out data"),
])  # fmt: skip
def test_sources_that_do_not_fit_are_refused_before_a_row_is_read(overrides: list[str], said: str) -> None:
    base = [] if overrides[0] == "data.sources.a=5" else ["data.sources.a.path=org/a"]
    with pytest.raises((ConfigError, DataError)) as error:
        configured_sources(*base, *overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bad_element_of_a_json_list_is_left_out_like_a_bad_line(tmp_path: Path) -> None:
    for bad, said in (("text", "must be a JSON object, not str"), ({**GOOD, "prompt": "\ud800"}, "is not UTF-8 text")):
        (tmp_path / "rows.json").write_text(json.dumps([GOOD, bad, {**GOOD, "prompt": "z"}]), encoding="utf-8")
        with pytest.raises(DataError, match=rf"rows\.json:2: {said}"):
            read(str(tmp_path / "rows.json"))
        assert len(read(str(tmp_path / "rows.json"), "data.bad_rows=drop").train) == 2


def test_a_dictionary_of_numbers_is_read() -> None:
    """Its values have no length of their own; the datasets library may hold such a column."""
    table = pa.table({"source": pa.array([3, 4] * 50).dictionary_encode()})
    assert [row for row, _ in row_files.rows_of(table)] == [{"source": 3}, {"source": 4}] * 50


LONG = "x" * (1 << 20)


@pytest.mark.parametrize(("column", "bad"), [
    pytest.param(lambda: pa.array([LONG]).dictionary_encode().take(pa.array([0] * 200)), 0, id="a text"),
    pytest.param(lambda: pa.array([f'"{LONG}"'] * 100, pa.json_()), 0, id="JSON"),
    pytest.param(lambda: pa.array([f'"{LONG}"', "{", '"\\ud800"'], pa.json_()), 2, id="JSON that is none"),
    pytest.param(lambda: pa.ListArray.from_arrays([0, 100, 101], pa.array([LONG] * 101)), 1, id="a list"),
    pytest.param(lambda: pa.array([LONG, ""] * 100, pa.string_view()), 0, id="a view"),
])  # fmt: skip
def test_a_small_parquet_file_cannot_take_all_memory(
    column: Callable[[], pa.Array], bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that the file has once may be the value of every row: here 100 MB and more, beside bounds of 16 and 4."""
    monkeypatch.setattr(row_files, "LONGEST", 16 << 20)
    monkeypatch.setattr(row_files, "MOST_BYTES", 4 << 20)
    file, values = tmp_path / "rows.parquet", column()
    pq.write_table(pa.table({"text": values, "number": range(len(values))}), file, compression="zstd")
    assert file.stat().st_size < 1 << 20
    before, most, numbers, unreadable = pa.total_allocated_bytes(), 0, [], []
    del values
    tracemalloc.start()
    for part in row_files.parts_of(file):
        most = max(most, pa.total_allocated_bytes() - before)
        for row in part.rows:
            if isinstance(row, row_files.Unreadable):
                unreadable.append(row.rule)
            else:
                numbers.append(row["number"])
    assert len(unreadable) == bad
    assert len(numbers) + bad == pq.read_metadata(file).num_rows
    assert numbers == sorted(numbers)
    assert most < 40 << 20
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def configured_sources(*overrides: str) -> None:
    compose_config(["data=hf", "launch.device=cpu", *overrides])


def test_calls_of_tools_may_be_json_and_must_be_calls(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}

    def row(calls: Any, answer: str = "yes") -> dict[str, Any]:
        chosen = [{"role": "assistant", "content": "", "tool_calls": calls}, user("Well?"), assistant(answer)]
        return {"prompt": "a", "chosen": chosen, "rejected": "no"}

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "({{ c.function.name }}){% endfor %}{% endfor %}"
    )
    for calls in ([call], json.dumps([call])):
        made = read(write_lines(tmp_path, [row(calls)]), tokenizer=tokenizer).train[0]
        assert "(add)" in tokenizer.decode(made.answers[0])
    for calls in (True, 3, "add", '{"name": "add"}', [json.dumps(call)]):
        with pytest.raises(DataError, match=r":1: field `chosen` has a message \(number 1\) whose `tool_calls` is no"):
            read(write_lines(tmp_path, [row(calls)]), tokenizer=tokenizer)
    silent = [{"role": "assistant", "content": "", "tool_calls": []}]
    with pytest.raises(DataError, match="ends with a message that is empty"):
        read(write_lines(tmp_path, [{"prompt": "a", "chosen": silent, "rejected": "no"}]), tokenizer=tokenizer)


def test_options_without_a_template_are_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match=r"data\.template_options=.*enable_thinking.*: no chat template is used"):
        read(file, "data.template=never", "data.template_options.enable_thinking=false")


def test_a_hub_name_that_cannot_be_reached_is_refused_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for place in (constants, datasets.config):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=r"data\.path=org/name: is no file or folder, .* the hub cannot be reached"):
        read("org/name")
    assert capfd.readouterr().err.splitlines() == [
        "rlexp: the hub does not answer: what was fetched from it before is taken."
    ]
    assert configured(Kind.pairs).data.path == "org/name"


@pytest.mark.slow
def test_a_split_that_a_folder_does_not_have_is_one_line(shell: Any, tmp_path: Path) -> None:
    """In a process of its own: the locks of a library's progress bars would be told of when it ends."""
    folder = tmp_path / "rows"
    folder.mkdir()
    write_lines(folder, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    answer = shell("data=hf", f"data.path={folder}", "data.split=test", "launch.device=cpu", "logger=none")
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"rlexp: data.split=test: {folder} has no such split")
    assert len(answer.stderr.splitlines()) == 1


def test_a_set_of_the_hub_that_changed_is_refused_on_resume(tmp_path: Path) -> None:
    old, new = "a" * 40, "b" * 40
    (tmp_path / "run.json").write_text(json.dumps({"data": {"versions": {"data.path": old}}}))
    refuse_other_versions(tmp_path, {"data.path": old, "data.sources.new.path": new}, [])
    refuse_other_versions(tmp_path, {"data.path": new}, ["data.path"])
    refuse_other_versions(tmp_path, {"data.path": new}, ["data"])
    with pytest.raises(CheckpointError, match=rf"data\.path: the set .* Give data\.revision={old} resume"):
        refuse_other_versions(tmp_path, {"data.path": new}, [])
    (tmp_path / "run.json").write_text(json.dumps({"data": {"versions": {"model.path": old}}}))
    with pytest.raises(CheckpointError, match=rf"model\.path: the model .* weights .* model\.revision={old} resume"):
        refuse_other_versions(tmp_path, {"model.path": new}, [])
    (tmp_path / "run.json").write_text(json.dumps({"data": {"versions": {"data.eval_path": old}}}))
    with pytest.raises(CheckpointError, match=rf"data\.revision={old} resume\.force=\[data\.revision\] to continue"):
        refuse_other_versions(tmp_path, {"data.eval_path": new}, [])


def test_a_run_that_goes_on_knows_the_commits_that_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is entered before its ranks compare them."""
    monkeypatch.setattr(run_folder, "claim", lambda *_, **__: None)  # this process enters it twice
    cfg, run = compose_config(["launch.device=cpu", "logger=none"]), tmp_path / "run"
    assert run_folder.enter(cfg, run)
    run_folder.note(run, data={"versions": {"data.path": "a" * 40}})
    assert run_folder.enter(cfg, run)
    for checkpoint in (run / "checkpoints" / "step-00000001", run / "step-00000001"):
        assert run_folder.commits(checkpoint) == {"data.path": "a" * 40}


def test_rows_to_train_on_and_held_out_rows_have_a_commit_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def table(key: str, path: str, *_: object) -> hub.HubSplit:  # the hub cannot exist on this machine
        rows = datasets.Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
        rows.info.download_checksums = {f"hf://datasets/{path}@{path[-1] * 40}/rows.parquet": {}}
        return hub.HubSplit((path,), rows)

    monkeypatch.setattr(hub, "table", table)
    held = ["data.eval_path=org/e", "data.eval_split=test"]
    assert read("org/a").versions == {"data.path": "a" * 40}
    assert read("org/a", *held).versions == {"data.path": "a" * 40, "data.eval_path": "e" * 40}
    file = write_lines(tmp_path, [{"prompt": "d", "chosen": "b", "rejected": "c"}])
    assert read("org/a", f"data.eval_path={file}").versions == {"data.path": "a" * 40}


def test_a_file_to_train_on_and_a_set_of_the_hub_to_hold_out(tmp_path: Path) -> None:
    file = write_lines(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    of_set = ["data.subset=main", "data.revision=v1", "data.eval_split=test"]
    configured_sources(f"data.path={file}", "data.eval_path=org/name", *of_set)
    configured_sources(f"data.path={tmp_path}", "data.eval_path=org/name", *of_set)
    with pytest.raises(ConfigError, match=r"data\.subset=main: data\.path=.* is a file"):
        configured_sources(f"data.path={file}", f"data.eval_path={file}", *of_set)


def test_the_commit_of_a_set_is_read_off_its_files() -> None:
    from types import SimpleNamespace

    def table(*names: str) -> HubSplit:  # the hub cannot exist on this machine
        return HubSplit(("x",), SimpleNamespace(info=SimpleNamespace(download_checksums=dict.fromkeys(names))))

    commit = "0123456789" * 4
    assert table(f"hf://datasets/org/x@{commit}/a.parquet", f"hf://datasets/org/x@{commit}/b.parquet").version == commit
    assert table("/data/a.parquet").version is None
    assert table().version is None


# ---- texts at the edge ----


@SMALL
@given(
    rows=st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=8)] * 3), min_size=1, max_size=5
    )
)
def test_any_texts_are_kept_whole_or_named(rows: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """Also empty ones, duplicates, and answers that are the prompt."""
    path = write_lines(tmp_path, [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])
    usable = [row for row in rows if all(row)]
    different = [row for row in usable if row[1] != row[2]]
    if not different:
        with pytest.raises(DataError):
            read(path, "data.bad_rows=drop")
        return
    pairs = read(path, "data.bad_rows=drop").train
    decode = byte_tokenizer().decode
    assert [(decode(p.prompt), decode(p.answers[0]), decode(p.answers[1])) for p in pairs] == [
        (prompt, f"{chosen}<eos>", f"{rejected}<eos>") for prompt, chosen, rejected in different
    ]
    if len(usable) < len(rows):
        with pytest.raises(DataError, match=r"rows\.jsonl"):
            read(path)


def test_answers_of_one_token_and_of_a_hundred_thousand(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "x" * 100_000, "rejected": "y"}] * 2
    one, same = read(write_lines(tmp_path, rows)).train
    assert (len(one.answers[0]), len(one.answers[1])) == (100_001, 2)
    assert ids([one])[0][1:] == ids([same])[0][1:]
