"""What others wrote reaches a terminal as text: in errors of every command, and in those of a run's ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rlexp.base import waiting
from rlexp.base.command import exit_code
from rlexp.base.errors import ConfigError, FolderError
from rlexp.base.printable import fitted, printable, printable_lines
from rlexp.base.waiting import busy_message
from rlexp.config.explain import explained
from rlexp.config.load import compose_config
from rlexp.launch import rank_progress, run_folder
from rlexp.launch.rank_progress import Whereabouts, before_steps
from rlexp.launch.stops import Outcome, _Stops, say_at_once
from rlexp.training.model import loading
from rlexp.training.sinks import console
from rlexp.training.train import header
from tests.conftest import Shell
from tests.helpers import warm
from tests.helpers.paths import ROOT

PACKAGE = ROOT / "rlexp"
ESCAPES = "\x1b]0;PWN\x07\x1b[2J\x9b\u202e\r"


@given(st.text())
def test_a_text_prints_and_keeps_its_lines(text: str) -> None:
    assert printable(text).isprintable()
    lines = printable_lines(text)
    assert lines.replace("\n", "").replace("\t", "").isprintable()
    assert lines.count("\n") == text.count("\n")
    assert not text.isprintable() or lines == text


def test_long_lines_end_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "short\n  peak  1.00    2.00\n  " + "word " * 30 + "\n" + "x" * 100 + "\n"
    assert fitted(text) == text  # no terminal
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "60")
    lines = fitted(text).split("\n")
    assert lines[:2] == text.split("\n")[:2]
    assert max(len(line) for line in lines if "x" not in line) <= 60
    assert {word for line in lines[2:-2] for word in line.split()} == {"word"}
    assert lines[3].startswith("      word")
    assert lines[-2:] == ["x" * 100, ""]
    command = f"to continue: python -m rlexp {'seed=1 ' * 20}"
    assert fitted(command) == command  # it is to be copied


@pytest.mark.parametrize("command", [exit_code, explained])
def test_an_error_is_printed_without_escapes(
    command: Callable[[Callable[[], int]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> int:
        raise ConfigError(f"a{ESCAPES}b")

    assert command(wrong) == 1
    said = capsys.readouterr().err
    assert said.removesuffix("\n").isprintable()
    assert said.startswith("rlexp: a\\x1b]0;PWN")


def test_a_row_s_names_are_printed_without_escapes(rlexp: Shell, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"\\u001b]0;PWN\\u0007\\u001b[2Jprompt": "a", "chosen": "b"}\n')
    done = rlexp("data=jsonl", "data.path=rows.jsonl", "launch.device=cpu", "logger=none")
    assert done.returncode == 1
    assert "\\x1b]0;PWN" in done.stderr
    assert all(each.isprintable() or each in "\n\t" for each in done.stderr + done.stdout)


@pytest.mark.parametrize("name", [run_folder.LOCK, run_folder.RANKS])
def test_a_folder_of_somebody_else_s_is_one_message(name: str, tmp_path: Path) -> None:
    """A folder in place of the lock stands for every reason why it cannot be opened: here, root may write anywhere."""
    (tmp_path / name).mkdir()

    def begin() -> None:
        run_folder.claim(tmp_path)
        run_folder._wait_for_ranks(tmp_path, 0.0)

    with pytest.raises(FolderError, match=r"^hydra\.run\.dir=.*: nothing can be written there \(Is a directory\)\."):
        begin()
    run_folder.leave(tmp_path)


def test_what_a_model_makes_transformers_say_prints(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own colours stay. Lines of a run, as of one that goes on, are printed by `say`."""
    loading._log_printably()
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:  # it has the standard error of the time when it was made
            monkeypatch.setattr(handler, "stream", sys.stderr)
    transformers.logging.get_logger("transformers.modeling_utils").warning("a%s\x1b[31mred\x1b[0m", ESCAPES)
    console.say(f"engine was {ESCAPES}\n")
    said = capfd.readouterr().err
    assert "\x1b[31mred\x1b[0m" in said
    assert all(each.isprintable() or each == "\n" for each in re.sub(r"\x1b\[31mred\x1b\[0m", "", said))
    assert said.count("\\x1b]0;PWN") == 2


@pytest.mark.parametrize("name", ["checkpoints", "model", "logs"])
def test_a_run_whose_folder_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    """Old checkpoints would be removed where it leads."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path)
    with pytest.raises(FolderError, match=rf"^hydra\.run\.dir=.*: its {name} is a link to "):
        run_folder.enter(compose_config(["launch.device=cpu"]), tmp_path / "run")


def test_names_in_commands_that_are_printed_are_quoted_for_a_shell() -> None:
    """Who copies such a command runs what a folder, or a stranger's file, is named."""
    quoted = r"(?:(?:shlex\.)?quote\(|path\}|model_words\}|name\} \.\.\.)"  # the last: quoted where they are made
    for file in sorted(PACKAGE.rglob("*.py")):
        found = re.findall(rf"python -m rlexp[\w.]* (?:--\w+ )?\{{(?!{quoted}).*", file.read_text(encoding="utf-8"))
        assert found == [], file
    run = SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=SimpleNamespace(export=False), logger=SimpleNamespace(name=None)),
        engine=SimpleNamespace(policy=SimpleNamespace(scores=None)),
    )
    task = SimpleNamespace(run=run, examples=SimpleNamespace(held_out=[]))
    said = header.footer(task, Path("a b/$(touch x)"), Outcome(), {})  # type: ignore[arg-type]
    assert said.splitlines()[1] == "see its answers: python -m rlexp.generate 'a b/$(touch x)' --prompt TEXT"


def typed(line: str) -> tuple[str, list[str]]:
    """Return the module and the arguments of a printed command, as a shell would read them."""
    python, dash, module, *words = shlex.split(line)
    assert (python, dash) == ("python", "-m")
    return module, words


def test_printed_commands_run_as_they_are_printed(tmp_path: Path) -> None:
    """In a folder with a space: a run is stopped, goes on by what it prints, and answers by what it prints then."""
    folder = tmp_path / "a folder's"
    folder.mkdir()
    words = ["launch.device=cpu", "logger=none", "train.stop_after=1", "train.max_steps=2", "train.eval_every=1"]
    stopped = warm.run("rlexp", [*words, "data.eval_size=8"], folder)
    assert re.search(r"^step 1/1  held-out rows: loss 0\.\d{4}  acc [01]\.\d\d$", stopped.stderr, re.MULTILINE)
    module, again = typed(stopped.stderr.partition("\nto continue: ")[2])
    finished = warm.run(module, again, folder)
    assert finished.returncode == 0, finished.stderr
    assert "continues from" in finished.stderr
    done, held_out, answers = finished.stderr.splitlines()[-3:]
    assert done.startswith("done: ")
    assert held_out.startswith("held-out rows, after step 2: loss 0.")
    answered = warm.run(*typed(answers.removeprefix("see its answers: ")), folder)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.count("trained  ") == 4


@pytest.mark.slow
def test_printed_commands_of_other_programs_run_too(tmp_path: Path) -> None:
    """In a folder with a space: a sweep that stopped goes on, and a copied recipe and pairs that were made train."""
    folder = tmp_path / "a folder's"
    folder.mkdir()
    quick = ["launch.device=cpu", "logger=none", "train.batch_size=2", "data.size=4"]
    swept = warm.run("rlexp", ["-m", *quick, "train.stop_after=1", "seed=0,1"], folder)
    again = typed(re.findall(r"To continue: (.*)$", swept.stderr, re.MULTILINE)[-1])
    assert warm.run(*again, folder).stdout.count("  finished  ") == 2
    copied = warm.run("rlexp.recipe", ["bug_report", "--copy", "conf/experiment/my-own.yaml"], folder)
    module, words = typed(copied.stdout.partition("train by it: ")[2])
    trained = warm.run(module, [*words, *quick, "launch.nproc=2", "train.max_steps=1"], folder)
    assert "done: " in trained.stderr, trained.stderr
    made = warm.run("rlexp.long_pairs", ["model=tiny", "--tokens=1000", "--pairs=4", "--out=my pairs.jsonl"], folder)
    checks, trains = (re.findall(rf"^{word} +(.*)$", made.stdout, re.MULTILINE)[0] for word in ("check", "train"))
    assert warm.run(*typed(checks), folder).returncode == 0
    module, words = typed(trains)
    assert "done: " in warm.run(module, [*words, *quick[:-1], "train.max_steps=1"], folder).stderr


@pytest.mark.parametrize(
    ("step", "phase", "said"),
    [
        (8, "forward", "SIGTERM: finishing step 8, then saving, in at most 120 s."),
        (8, rank_progress.BETWEEN, "SIGTERM: finishing step 9, then saving, in at most 120 s."),
        (8, "save", "SIGTERM: finishing step 9, then saving, in at most 120 s."),
        (0, "build", "SIGTERM: ending, as no step has begun."),
        (0, "eval", "SIGTERM: finishing the evaluation and step 1, then saving, in at most 120 s."),
        (8, "export", "SIGTERM: ending; the last checkpoint stays."),
    ],
)
def test_what_a_request_to_stop_leads_to_is_said(step: int, phase: str, said: str, tmp_path: Path) -> None:
    nothing = rank_progress.once_asked(tmp_path, "SIGTERM", 120, again=False)
    assert nothing == "SIGTERM: ending, as no step has begun."
    rank_progress.Whereabouts(tmp_path, 0).tell(step=step, phase=phase, peaks={})
    assert rank_progress.once_asked(tmp_path, "SIGTERM", 120, again=False) == said
    hinted = rank_progress.once_asked(tmp_path, "SIGTERM", 120, again=True)
    assert hinted == said + " Ctrl-C again ends it now." * ("saving" in said)


def test_a_request_is_not_lost_where_nobody_reads_what_is_said() -> None:
    """Standard error may be a pipe that is full."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 65536)
    os.set_blocking(write, True)
    kept = os.dup(2)
    os.dup2(write, 2)
    try:
        say_at_once("never read")
    finally:
        os.dup2(kept, 2)
    for each in (read, write, kept):
        os.close(each)


def test_a_rank_of_another_launcher_says_so_itself() -> None:
    """Once, at the first request, and only while a step may finish."""
    stops, said = _Stops(), list[str]()
    stops.grace, stops.answer = 120.0, lambda signum: said.append(signum.name)
    try:
        stops.ask(signal.SIGTERM)
        stops.ask(signal.SIGUSR1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if stops.watchdog is not None:
            stops.watchdog.cancel()
    assert said == ["SIGTERM"]


def test_who_waits_is_told_what_is_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Until it is over, by the block's end or because nothing more is to be said."""
    monkeypatch.setattr(waiting, "EVERY", 0.001)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said, doing = list[str](), iter(["starts 8 ranks", "builds the model", None])
    with busy_message(lambda: next(doing), said.append):
        for thread in [each for each in threading.enumerate() if each.name == "told"]:
            thread.join()
    assert [each.rpartition(", ")[0] for each in said] == ["starts 8 ranks", "builds the model"]
    first = threading.Event()
    with busy_message("evaluates", lambda _text: first.set()):
        first.wait()
    with busy_message("evaluates"):
        while not capsys.readouterr().err.startswith("rlexp: evaluates, 0 s so far\n"):
            time.sleep(0.001)
    assert "told" not in {each.name for each in threading.enumerate()}
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with busy_message("evaluates", said.append) as over:
        assert over.is_set()
    assert len(said) == 2


def test_what_a_run_does_before_its_header_is_told(tmp_path: Path) -> None:
    assert before_steps(tmp_path, 8) == "starts 8 ranks"
    line = Whereabouts(tmp_path, 0)
    line.tell(step=0, phase="build", peaks={})
    assert before_steps(tmp_path, 8) == "reads the rows, and builds the model"
    line.tell(step=1, phase="forward", peaks={})
    assert before_steps(tmp_path, 8) is None
