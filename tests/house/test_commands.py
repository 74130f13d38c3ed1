"""Every command of every page is one: it composes, or its options are read, and what it names is there.

`test_door.py` runs those of the README and the quickstart.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from bench.recipes import recipes
from bench.recipes_run import LONG, SUMS
from rlexp.config.elsewhere import compose_elsewhere, composed_for
from rlexp.config.load import compose_config
from tests.helpers.pages import MEASURED, PAGES, commands, files
from tests.helpers.paths import ROOT

ROWS = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
# Programs of which nothing is checked but that they are these.
OF_OTHERS = ("wandb", "cat", "ls", "grep", "hf", "vllm", "lm_eval")
ON_GPUS = ("rollout.engine=vllm", "launch.ranks_per_gpu=4")  # keys that need GPUs, or a package for them
RECIPES = {f"+experiment={each.name}" for each in recipes()}  # runs on GPUs
COMPOSING = ("rlexp", "rlexp.data", "rlexp.verify", "rlexp.preflight")
SHOWN = [
    pytest.param(each, id=f"{page.parent.name}-{page.stem}-{place}") for page in (*PAGES, *MEASURED)
    for place, command in enumerate(commands(page)) for each in command.partition("\n")[0].split(" && ")
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: rows under the names of the pages, and the files that pages have them write."""
    written = dict.fromkeys(("PAIRS.jsonl", "pairs.jsonl", "FILE", "help.jsonl", "sets/a.parquet"), ROWS)
    written["conf/experiment/hh_helpful.jsonl.gz"] = ROWS  # a reader types in a checkout, which has it
    written |= dict.fromkeys(map(str, (SUMS, LONG)), ROWS)  # that bench.recipes makes
    written["runs/reward/model/config.json"] = '{"model_type": "llama"}'  # that a command of docs/rewards.md trains
    config = "tests/files/models/llama_8b/config.json"  # of the checkout too
    written[config] = (ROOT / config).read_text(encoding="utf-8")
    for page in PAGES:
        written |= files(page)
        made = re.findall(r"rlexp\.long_pairs .*--out (\S+)", "\n".join(commands(page)))
        written |= dict.fromkeys(made, ROWS)
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_is_one(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):  # for its environment
        del words[0]
    match words:
        case [python, "-m", "venv", folder_of_venv] if re.fullmatch(r"python3?", python):
            assert folder_of_venv == ".venv"
        case [python, "-m", module, *args] if re.fullmatch(r"(.*/)?python3?", python):
            check_module(module, args, monkeypatch)
        case ["torchrun" | "srun", *_]:
            check_module("rlexp", words[words.index("rlexp") + 1 :], monkeypatch)
        case ["docker", "build", *_]:
            assert (ROOT / "Dockerfile").is_file()
        case ["docker", "run", *args]:
            check_module("rlexp", args[args.index("-m") + 2 :], monkeypatch)
        case ["sbatch", *given]:
            script, *args = itertools.dropwhile(lambda each: each.startswith("--"), given)
            assert (ROOT / script).is_file()
            composed(args)
        case ["make", target, *variables]:
            made = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{target}:", made, re.MULTILINE)
            assert all(re.search(rf"^{each.partition('=')[0]} \?=", made, re.MULTILINE) for each in variables)
        case ["pip", "install", "-e", what]:
            check_extras(what)
        case ["pip", "install" | "download", *others]:
            assert "-e" not in others
        case ["python", "-c", code, *_]:
            compile(code, command, "exec")
        case ["source" | ".", ".venv/bin/activate"]:
            assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
        case ["cp", source, _]:
            assert (ROOT / source).is_file()
        case [program, *_]:
            assert program in OF_OTHERS
        case _:
            pytest.fail("no command")


def check_module(module: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose what the command would run, or read its options as it does."""
    if module == "rlexp" and "--help" in args:
        return
    if module == "rlexp":
        overrides = [each for each in args if each not in ("-m", "--cfg", "job", "--resolve")]
    else:
        options = read_options(module, args, monkeypatch)
        overrides = getattr(options, "overrides", [])
        assert module in COMPOSING or not overrides
    if module == "rlexp.preflight":
        compose_elsewhere(overrides)
    elif overrides or module == "rlexp":
        composed(overrides)


def composed(overrides: list[str]) -> None:
    """Compose a run; one for GPUs as on a machine that has them."""
    if {*overrides} & {*ON_GPUS, *RECIPES} and "launch.device=cpu" not in overrides:
        composed_for(["launch.device=cuda", *overrides], Path.cwd())
    else:
        compose_config(overrides)


class Read(BaseException):
    """The options of a command, which is not to run."""


def read_options(module: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    def to_stop(parse: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **named: Any) -> Any:
            raise Read(parse(*given, **named))

        return read

    program: Any = importlib.import_module(module)
    if hasattr(program, "__path__"):  # of a package, what `python -m` runs
        program = importlib.import_module(f"{module}.__main__")
    with monkeypatch.context() as patched:
        for name in ("parse_args", "parse_intermixed_args"):
            patched.setattr(argparse.ArgumentParser, name, to_stop(getattr(argparse.ArgumentParser, name)))
        patched.setattr(sys, "argv", [module, *args])
        with pytest.raises(Read) as raised:
            program.main()
    (options,) = raised.value.args
    assert isinstance(options, argparse.Namespace)
    return options


def check_extras(what: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (extras := re.fullmatch(r"\.(?:\[([\w,-]+)\])?", what))
    assert {*filter(None, (extras[1] or "").split(","))} <= {*project["optional-dependencies"]}


def test_the_container_has_what_the_package_needs() -> None:
    said = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", said, re.MULTILINE) for word in line.split()}
    assert all((ROOT / each).exists() for each in copied)
    assert copied >= {"rlexp", "conf", "launchers", "sweeps", "pyproject.toml", project["readme"], "LICENSE"}
    (extras,) = re.findall(r'pip install .*"/opt/rlexp\[([\w,]+)\]"', said)
    check_extras(f".[{extras}]")
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-", said, re.MULTILINE)
    assert SpecifierSet(project["requires-python"]).contains(version)


@pytest.mark.parametrize("wrong", ["python -m rlexp train.batchsize=3", "python -m rlexp.compare --nothing runs/A",
    "python -m rlexp.verify loss=nothing", "python -m bench.data --nothing", "sbatch launchers/nothing.sh",
    "make nothing", "pip install -e '.[nothing]'", "rlexp"])  # fmt: skip
def test_a_command_that_is_none_is_found(wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Exception, SystemExit)):
        test_a_command_is_one(wrong, folder, monkeypatch)


@pytest.mark.parametrize("name", [Path(name).stem for page in PAGES for name in files(page) if name.endswith(".yaml")])
def test_an_experiment_of_a_page_composes(name: str, folder: Path) -> None:
    composed_for([f"+experiment={name}"], folder / "conf")


def test_blocks_of_python_compile() -> None:
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            compile(block, str(page), "exec")
