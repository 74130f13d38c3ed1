"""The store of tokenized rows: made once, the same bytes however often it was killed, and never torn or stale."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlexp.base import file_hashes
from rlexp.base.cache import locked, root
from rlexp.base.errors import DataError
from rlexp.base.made_once import Appending
from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import Kind
from rlexp.launch.joining import RankSpec
from rlexp.training.dataset import row_files
from rlexp.training.dataset.store import TYPES, StoreFacts, StoreInTheMaking, _mask, _runs, block_of
from rlexp.training.dataset.tokenize_worker import TokenizeWorker
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train import examples
from rlexp.training.types import Example
from rlexp.training.world import objects
from rlexp.training.world.groups import build_world
from tests.helpers.paths import files_of_at_most
from tests.helpers.ranks import on_ranks
from tests.helpers.rows import assistant, cache, configured, ids, read, user, write_lines

__all__ = ["cache"]  # a fixture of every test here too
RLEXP = Path(sys.modules["rlexp"].__file__ or "").parent
PRODUCT = str(RLEXP / "training" / "dataset"), str(RLEXP / "base" / "made_once.py")


def written(folder: Path, count: int) -> str:
    """Write pairs that differ, some with several turns, and some that are left out."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        talk = [user(f"Question {number}?"), assistant("Which?"), user("That one. " * (number % 7 + 1))]
        answers = [[assistant(f"{word} {number}")] for word in ("Yes", "No")]
        if number % 5 == 0:
            answers = [[*answer, user("And then?"), assistant("Nothing.")] for answer in answers]
        if number % 11 == 0:
            answers[1] = answers[0]
        rows.append({"prompt": talk, "chosen": answers[0], "rejected": answers[1]})
    return write_lines(folder, rows)


def stores(root: Path) -> dict[str, bytes]:
    """Return all files of the stores there, without locks and notes."""
    tokens = root / "tokens"
    return {str(p.relative_to(tokens)): p.read_bytes() for p in tokens.rglob("*") if p.is_file() and p.name[0] != "."}


def lines_of(run: Callable[[], Any], last: int | None = None) -> int:
    """Run a function and count the lines that it takes of what makes stores; the process kills itself at the last."""
    count = 0

    def traced(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        if event == "line":
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return traced

    sys.settrace(traced)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.slow
def test_killed_at_any_moment_and_begun_again_it_is_the_same_store(tmp_path: Path, monkeypatch: Any) -> None:
    """Twenty moments, spread over the making of a store; what is killed goes on from what the one before left."""
    path = written(tmp_path, 3000)
    undisturbed = ids(read(path).train)
    expected = stores(tmp_path / "cache")
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "again"))
    whole = lines_of(lambda: read(path))
    assert stores(tmp_path / "again") == expected
    fork = multiprocessing.get_context("fork")
    kept_going = 0
    for number in range(20):
        place = tmp_path / f"killed{number % 4}"  # four stores, each killed five times, later and later
        monkeypatch.setenv("RLEXP_CACHE", str(place))
        process = fork.Process(target=lines_of, args=(lambda: read(path), whole * (number // 4 * 4 + 2) // 20 + number))
        process.start()
        process.join(60)
        assert process.exitcode in (-signal.SIGKILL, 0)
        journal = list(place.rglob("journal.jsonl"))
        kept_going += bool(journal and journal[0].stat().st_size)
    assert kept_going > 5, "nothing was ever taken up"
    for number in range(4):
        monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / f"killed{number}"))
        assert ids(read(path).train) == undisturbed
        assert stores(tmp_path / f"killed{number}") == expected


@pytest.mark.slow
def test_processes_beside_each_other_make_the_same_bytes_and_end(tmp_path: Path, monkeypatch: Any) -> None:
    path = written(tmp_path, 6000)
    alone = ids(read(path, "data.workers=1").train)
    expected = stores(tmp_path / "cache")
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "beside"))
    assert ids(read(path, "data.workers=3").train) == alone
    assert stores(tmp_path / "beside") == expected
    assert not [name for name in processes() if "rlexp.training.dataset.tokenize_worker" in name]


@pytest.mark.slow
def test_machines_make_a_store_each_and_must_have_the_same_rows(tmp_path: Path) -> None:
    """Two ranks take themselves for two machines: each has a folder, a cache and a file of this path of its own."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        shutil.copy(written(tmp_path, 40), tmp_path / str(rank) / "rows.jsonl")
    cfg = configured(Kind.pairs)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, path="rows.jsonl"))
    one, other = on_ranks(2, as_machines, cfg, tmp_path)
    assert one == other
    assert len(one) == 36  # without the pairs of equal answers
    made = [stores(tmp_path / str(rank) / "cache") for rank in range(2)]
    assert made[0] == made[1] != {}
    with (tmp_path / "1" / "rows.jsonl").open("ab") as file:
        file.write(b'{"prompt": "one", "chosen": "more", "rejected": "row"}\n')
    expected = "data.path=rows.jsonl: two machines have other rows there, or another tokenizer."
    assert [told[: len(expected)] for told in on_ranks(2, as_machines, cfg, tmp_path)] == [expected] * 2


def as_machines(spec: RankSpec, cfg: Config, folder: Path) -> Any:
    mine = folder / str(spec.rank)
    os.chdir(mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "BOOT", mine / "boot")
        (mine / "boot").write_text(str(spec.rank))
        patch.setenv("RLEXP_CACHE", str(mine / "cache"))
        try:
            return ids(examples.read_examples(cfg, byte_tokenizer(), build_world(1)).train)
        except DataError as error:
            return str(error)


def processes() -> list[str]:
    """Return the command lines of this process's children."""
    told = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False
    )
    return told.stdout.splitlines()


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    path, results = written(tmp_path, 1000), []
    made: list[int] = []
    finish = Appending.finish

    def counted(self: Appending, *args: Any) -> None:
        made.append(1)
        finish(self, *args)

    threads = [threading.Thread(target=lambda: results.append(ids(read(path).train))) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Appending, "finish", counted)
        configured(Kind.pairs)  # Hydra composes in one thread at a time
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(results) == 4
    assert all(each == results[0] for each in results)
    assert len(made) == 1


@pytest.mark.parametrize("name", [*TYPES, "meta.json"])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_store_is_noticed_and_made_anew(
    name: str, harm: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was whole at its last look, which is remembered here however new its files are."""
    monkeypatch.setattr(file_hashes, "FRESH", 0.0)
    path = written(tmp_path, 40)
    rows = ids(read(path).train)
    read(path)
    expected = stores(tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "tokens").glob(f"*/{name}")
    content = file.read_bytes()
    if not content:
        return
    match harm:
        case "cut":
            file.write_bytes(content[:-1])
        case "changed":
            file.write_bytes(content[:1] + bytes([content[1] ^ 1]) + content[2:])
        case "gone":
            file.unlink()
    assert ids(read(path).train) == rows
    assert stores(tmp_path / "cache") == expected
    assert "is damaged (" in "".join(capfd.readouterr())


@pytest.mark.parametrize("harm", ["cut", "changed", "longer", "torn journal"])
def test_a_damaged_store_in_the_making_goes_on_from_what_is_whole(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MOST_ROWS", 64)
    path = written(tmp_path, 220)
    rows = ids(read(path).train)
    expected = stores(tmp_path / "cache")
    (place,) = (tmp_path / "cache" / "tokens").glob("[!.]*")
    fork = multiprocessing.get_context("fork")
    killed = tmp_path / "killed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLEXP_CACHE", str(killed))
        making = killed / "tokens" / f"{place.name}.making"
        tokens, journal = making / "tokens", making / "journal.jsonl"
        for _ in range(2):
            process = fork.Process(target=die_before_the_end, args=(path,))
            process.start()
            process.join(60)
            assert len(journal.read_bytes().splitlines()) == 4
            match harm:
                case "cut":
                    os.truncate(tokens, tokens.stat().st_size - 10)
                case "changed":
                    content = tokens.read_bytes()
                    tokens.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
                case "longer":
                    tokens.write_bytes(tokens.read_bytes() + b"half a block")
                case "torn journal":
                    journal.write_bytes(journal.read_bytes()[:-7])
        assert ids(read(path).train) == rows
        assert stores(killed) == expected


def die_before_the_end(path: str) -> None:
    Appending.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    read(path)


def test_a_file_that_changes_while_it_is_read_leaves_no_store(tmp_path: Path, monkeypatch: Any) -> None:
    path = written(tmp_path, 40)
    append, before = Appending.append, Path(path).read_bytes()

    def while_written(self: Appending, *args: Any) -> None:
        Path(path).write_bytes(before + before.splitlines(keepends=True)[0])
        append(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Appending, "append", while_written)
        with pytest.raises(DataError, match=r"rows\.jsonl: was changed while it was read\. Start again"):
            read(path)
    assert not stores(tmp_path / "cache")
    Path(path).write_bytes(before)
    assert len(read(path).train) == 36


def test_a_store_whose_maker_died_before_it_had_its_name_is_taken_as_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    path = written(tmp_path, 40)
    rows, expected = ids(read(path).train), stores(tmp_path / "cache")
    (place,) = (tmp_path / "cache" / "tokens").glob("[!.]*")
    place.rename(place.with_name(f"{place.name}.making"))
    monkeypatch.setattr(Appending, "append", None)  # nothing is made again
    assert ids(read(path).train) == rows
    assert stores(tmp_path / "cache") == expected


KEYS = (
    ["data.system=Be brief."], ["data.max_length=90"], ["data.too_long=drop"], ["data.bad_rows=drop"],
    ["data.template=never"], ["data.columns.prompt=rejected"],
)  # fmt: skip


def test_what_was_made_outlives_a_process_that_ends(tmp_path: Path) -> None:
    path = written(tmp_path, 6000)

    answer = TokenizeWorker.answer

    def killed(self: TokenizeWorker) -> Any:
        self.process.kill()
        return answer(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenizeWorker, "answer", killed)
        with pytest.raises(DataError, match=r"ended \(exit code -9\)\. If memory ran out"):
            read(path, "data.workers=2")
    (making,) = (tmp_path / "cache" / "tokens").glob("*.making")
    assert (making / "tokens").stat().st_size > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_that_changed_within_its_times_is_read_anew(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    made = []
    for word in ("one", "two"):
        file = write_lines(tmp_path / "set", [{"prompt": "a", "chosen": word, "rejected": "no"}])
        os.utime(file, (10**9, 10**9))
        made.append(ids(read(str(tmp_path / "set"), f"data.streaming={str(streaming).lower()}").train))
    assert made[0] != made[1]


def test_all_that_a_token_depends_on_is_in_the_key(tmp_path: Path) -> None:
    """Each setting alone, the kind of rows, the room for answers, the rows themselves, and the code."""
    from rlexp.config.schema.data_sources import sources_of
    from rlexp.training.dataset import sources
    from rlexp.training.model.loading import byte_tokenizer

    path = written(tmp_path, 3)

    def key(*overrides: str, kind: Kind = Kind.pairs, room: int = 0, tokenizer: Any = None) -> str:
        cfg = dataclasses.replace(configured(Kind.pairs, *overrides).data, path=path)
        named = [dataclasses.replace(each, cfg=dataclasses.replace(each.cfg, path=path)) for each in
                 sources_of(cfg)]  # fmt: skip
        split = sources.splits_of(named[0], held_out=False)
        assert split is not None
        return sources.Tokenizing(cfg, tokenizer or byte_tokenizer(), kind, room, False).work(split)[0]

    found = [key(), *(key(*words) for words in KEYS), key(kind=Kind.prompts), key(room=5)]
    assert key() == found[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "made_by", lambda: "another version of this code")
        found.append(key())
    Path(path).write_text(Path(path).read_text().replace("Question 1?", "Question 9?"))
    found.append(key())
    assert len(set(found)) == len(found)


def test_all_that_decides_a_text_s_tokens_is_in_a_tokenizer_s_fingerprint() -> None:
    from tokenizers import normalizers

    from rlexp.training.dataset.sources import fingerprint
    from rlexp.training.model.loading import byte_tokenizer

    made = [byte_tokenizer() for _ in range(7)]
    made[1].chat_template = "{{ messages }}"
    made[2].backend_tokenizer.normalizer = normalizers.Lowercase()
    made[3].add_tokens(["<x>"])
    made[4].eos_token = "<pad>"
    made[5].split_special_tokens = True
    made[6].init_kwargs["add_bos_token"] = True
    assert len({fingerprint(each) for each in made}) == 7
    assert fingerprint(byte_tokenizer()) == fingerprint(made[0])


def test_other_rows_another_template_and_other_options_are_other_stores(tmp_path: Path) -> None:
    from rlexp.training.model.loading import byte_tokenizer

    path = written(tmp_path, 30)
    before = read(path)
    templated = byte_tokenizer()
    templated.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    templated.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    others = [read(path, "data.system=Be brief."), read(path, "data.max_length=90", "data.too_long=truncate"),
              read(path, tokenizer=templated)]  # fmt: skip
    lines = Path(path).read_text(encoding="utf-8").replace("Question 7?", "Question 8?")
    stat = os.stat(path)
    Path(path).write_text(lines, encoding="utf-8")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as `cp -p` does, with the same size
    others.append(read(path))
    assert len({str(ids(each.train)) for each in (before, *others)}) == 5


@pytest.mark.parametrize("count", [1100, pytest.param(2500, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_message_and_it_goes_on_when_there_is_room(
    count: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """The store has three parts, which this process makes; or five, of which other processes make the last."""
    path = written(tmp_path, count)
    rows = ids(read(path).train)
    expected = stores(tmp_path / "cache")
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "full"))
    wanted = len(expected[next(n for n in expected if "tokens" in n)])
    message = r"data\.cache=.*has no room for the tokens of .*it continues where it stopped"
    with files_of_at_most(wanted // 2), pytest.raises(DataError, match=message):
        read(path)
    assert ids(read(path).train) == rows
    assert stores(tmp_path / "full") == expected


def test_a_cache_that_cannot_be_written_is_one_message(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLEXP_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match=r"data\.cache=.*cannot be made \(Not a directory\)\. Give a folder"):
        read(written(tmp_path, 3))
    assert len(read(written(tmp_path, 3), f"data.cache={tmp_path}/own").train) == 2
    assert (tmp_path / "own" / "tokens").is_dir()


def test_masks_are_kept_as_the_lengths_of_their_runs() -> None:
    random_ = np.random.default_rng(0)
    for length in (1, 2, 7, 64):
        for _ in range(20):
            mask = random_.random(length) < random_.random()
            assert np.array_equal(_mask(_runs(mask)), mask)
    assert _runs(np.array([True, True, False])) == [0, 2, 1]


def test_a_block_without_examples_and_one_without_tokens_fit_in(tmp_path: Path) -> None:
    making = StoreInTheMaking(tmp_path / "making")
    empty = np.zeros(0, np.int32)
    example = Example(0, np.array([5], np.int32), expected="x")
    for kept in ([], [(0, 3, example)], [], [(0, 9, dataclasses.replace(example, prompt=empty))]):
        making.add(block_of(kept, [], StoreFacts(read=2)))
    making.complete(Kind.prompts, {})
    from rlexp.training.dataset.store import Store

    store = Store(tmp_path / "making", lambda file, row: f"{file}:{row}")
    assert [(each.prompt.tolist(), each.expected, each.origin) for each in store] == [
        ([5], "x", "0:3"),
        ([], "x", "0:9"),
    ]
    assert json.loads((tmp_path / "making" / "meta.json").read_text())["facts"]["read"] == 8


def test_a_whole_store_is_used_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A folder in the place of the lock stands for every reason: here, root may write anywhere."""
    path = write_lines(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    first = ids(read(path).train)
    locks = list((tmp_path / "cache" / "tokens").glob(".*.lock"))
    assert locks
    for lock in locks:
        lock.unlink()
        lock.mkdir()
    assert ids(read(path).train) == first


def test_the_cache_in_a_home_is_its_owner_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for own, mode in (("", 0o700), (str(tmp_path / "everybody's"), 0o755)):
        monkeypatch.setenv("RLEXP_CACHE", own)
        previous = os.umask(0o022)
        with locked(root() / "tokens" / "a"):
            os.umask(previous)
        assert (root() / "tokens").is_dir()
        assert root().stat().st_mode & 0o777 == mode
