"""What a stranger may write in the place of a text, and what must not come of it.

Each test plants these at one door: a recipe, a row, a run's files, a configuration. A hundred cases run in `make test`,
3,300 in `make check`.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

SECRET = "canary-9f31c7"  # the value of a variable of the environment
VARIABLE = "RLEXP_TEST_CANARY"
CALLBACK = "hydra: {callbacks: {x: {_target_: os.system, command: id}}}"
BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
ESCAPES = ("\x1b[2J", "\x1b]0;title\x07", "\x1bc", "\x9b31m", "\x90q\x9c", "\x07\x08\x7f", "\u202etxt\u202c",
           "\u2066x", "\ufeff", "\x00", "\U000e0041", "\ud800")  # fmt: skip
READ_BY = (f"${{oc.env:{VARIABLE}}}", f"\\${{oc.env:{VARIABLE}}}", f"\\\\${{oc.env:{VARIABLE}}}",
           f"a${{oc.env:{VARIABLE}}}b", "${oc.decode:'${oc.env:" + VARIABLE + "}'}", f"${VARIABLE}",
           f"${{{VARIABLE}}}", f"$(echo ${VARIABLE})", f"`echo ${VARIABLE}`", f"$((${VARIABLE}))", "${seed}", "${",
           "a${b}", "${hydra:runtime.cwd}", "${.}", "%(a)s", "{0.__class__}", "{a!r}", "{{ 7 * 7 }}",
           "{% for a in range(9) %}", "{% include 'a' %}", "{{ ''.__class__ }}")  # fmt: skip
TAGS = ("!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!binary QQ==", "!!set {a}",
        "!!timestamp x", "!a b", "&a [*a]", "*a", "&a b", "<<: {a: b}", "? a", "--- a", "%YAML 1.1", "2001-99-99",
        "0o8", "1_0", "0x" + "f" * 4000)  # fmt: skip
NESTED = ("[" * 3000, "{" * 3000, "[" * 3000 + "]" * 3000, "{a: " * 1500 + "b" + "}" * 1500, "(" * 3000,
          "$(" * 2000, "${a:-" * 500, "`" * 999, "'" * 999, '"' * 999, "\\" * 999, "((((1" * 400)  # fmt: skip
NUMBERS = ("9" * 400, "9" * 5000, "-" + "9" * 5000, "1e99999", "-1e400", ".nan", "nan", "inf", "-.inf", "1e-400",
           "0." + "0" * 5000 + "1", "1/0", "9223372036854775808", "0b1", "1:2:3", "٣", "²")  # fmt: skip
WORDS = ("", " ", "null", "true", "~", "-", "--", "#", ": ", "a: b", "- a", "@a", ",", "]", "}", "'", '"', "\\",
         "<script>alert(1)</script>", "../../x", "/", "~root/x", "--x=y", "a=b", "x" * 20_000, "é" * 5000,
         "[link=x]a[/link]", "trl " * 5_000, "hydra.run.dir=x")  # fmt: skip
PLANTS = (
    *(f"a{each}{CALLBACK}{each}# " for each in BREAKS),
    *(f"a{each}b" for each in ESCAPES),
    *(each for kinds in (READ_BY, TAGS, NESTED, NUMBERS, WORDS) for each in kinds),
)
MEMORY = 1 << 30
SECONDS = 20


def planted(value: Any, plant: object) -> Iterator[Any]:
    """Yield a value with a plant in the place of each part of it in turn, and of each name in it."""
    yield plant
    if isinstance(value, dict):
        for name, below in value.items():
            yield from ({**value, name: each} for each in planted(below, plant))
            yield {each if each != name else str(plant): other for each, other in value.items()}
    elif isinstance(value, list):
        for place, below in enumerate(value):
            yield from ([*value[:place], each, *value[place + 1 :]] for each in planted(below, plant))


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Give a test the number of its cases: a few, and many, which is slow."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def drawn(cases: Iterable[Case], count: int) -> list[Case]:
    """Draw so many of the cases, the same each time."""
    return random.Random(0).sample(list(cases), count)


def _too_long(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"it took {SECONDS} s of processor time")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let the process take 1 GB more than it has, and 20 s of processor time."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def shown(case: object) -> Iterator[None]:
    """Name the case that fails."""
    try:
        yield
    except (Exception, SystemExit) as error:
        error.add_note(f"the case: {ascii(case)[:2000]}")
        raise


def assert_harmless(said: str, *files: Path) -> None:
    """What was printed moves no cursor, and nothing that was printed or written holds the variable's value."""
    assert all(each.isprintable() or each in "\n\t" for each in said), ascii(said)
    assert "Traceback" not in said
    assert SECRET not in said
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file
