"""What the pages of docs/ show: their commands, the output of commands, and the files that a reader is to write."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT

INDEX = ROOT / "docs" / "README.md"
PAGES = [
    ROOT / "README.md",
    INDEX,
    *sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "convert").glob("*.md")} - {INDEX}),
]
MEASURED = sorted((ROOT / "docs" / "measured").glob("*.md"))  # the long tables, and what wrote them


def scripts(page: Path) -> list[str]:
    """Return the blocks of commands, in the order in which a reader types them."""
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Return the commands one by one. One that goes on over lines, or reads the lines below it, is one."""
    one = re.compile(r"^[^#\s][^\n]*<<'(\w+)'\n[\s\S]*?^\1$|^[^#\s](?:[^\n\\]|\\[\s\S])*", re.MULTILINE)
    return [found[0].replace("\\\n", "") for script in scripts(page) for found in one.finditer(script)]


def files(page: Path) -> dict[str, str]:
    """Return the files that the page has a reader write, by name: the line before a block of text names each."""
    blocks = r"`([\w/.]+\.(?:yaml|py))`[^`\n]*\n\n```(?:yaml|python)\n(.*?)^```"
    return dict(re.findall(blocks, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE))


def rows_of(page: Path) -> dict[str, str]:
    """Return the files that the page writes by a command, `cat > FILE <<'WORD'` or `python -c CODE > FILE`, by name."""
    written = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2$", re.DOTALL | re.MULTILINE)
    rows = {name: text for command in commands(page) for name, _, text in written.findall(command)}
    for command in commands(page):
        match shlex.split(command, comments=True):
            case ["python", "-c", code, ">", name]:
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
                rows[name] = done.stdout
    return rows


# ---- output that a page shows ----

ELIDED = "..."  # a line that leaves out any number of lines of the output
MARK = re.compile(
    r"^<!-- output of: (.+?)(?:, which exits with (\d+))? -->\n+```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE
)
MAKE_RUN = "make run"
DEAR = (
    MAKE_RUN,
    "smollm",
    "ppo_tiny",
    "rlexp.verify",
    "rlexp.preflight",
    "sweep",
    "8b",
)  # words of commands that take longer


@dataclass(frozen=True)
class Shown:
    """A block of a page with the output of a command. The commands before it, joined by &&, prepare it."""

    page: Path
    command: str
    code: int  # that it exits with
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command behind `python -m`."""
        return [shlex.split(typed(each)) for each in self.command.split(" && ")]

    @property
    def slow(self) -> bool:
        return any(word in self.command for word in DEAR)


def outputs(page: Path) -> list[Shown]:
    """Return the blocks that a comment before them, `<!-- output of: COMMAND -->`, calls the output of a command. Of a
    command that fails it says `, which exits with 1`."""
    found = MARK.findall(page.read_text(encoding="utf-8"))
    return [Shown(page, command, int(code or 0), text) for command, code, text in found]


def typed(command: str) -> str:
    """Return the words behind `python -m`. `make run` has those of the Makefile."""
    if command == MAKE_RUN:
        (words,) = re.findall(r"^ARGS \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return f"rlexp {words}"
    start = "python -m "
    assert command.startswith(start), f"{command}: must begin with `{start}`, or be `{MAKE_RUN}`"
    return command.removeprefix(start)


# What differs from run to run, and from machine to machine. Each becomes the same word on both sides.
VARYING: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<!\d)\d{4}-\d\d-\d\d(_\d\d-\d\d-\d\d)?(?!\d)", "DATE"),
    (r"\brlexp \d+\.\d+\.\d+\b", "rlexp VERSION"),
    (r"\b[0-9a-f]{12,40}\b", "COMMIT"),
    (r"(?<![\w.])~?(/[\w.+-]+)+/(?=[\w.+-])", ""),  # the folders before a name
    (r"[\d,.]+( ?)(tok/s|tokens/s|tokens a second)", r"N\1\2"),
    (r"tok/s +[\d,.]+", "tok/s N"),
    (r"(?<![\w.])[\d,.]+ ?(s|ms|min|h|seconds?|minutes?)\b", "TIME"),
    (r"(?<![\w.])\d+:\d\d(:\d\d)?\b", "TIME"),
    (r"(?<![\w.])(\d\.\d+e[+-]?\d+|0)(?=\s|$)", lambda found: size_of(float(found[1]))),  # of rounding
)


def size_of(difference: float) -> str:
    """Name the precision that a difference can be the rounding of: how large it is depends on the machine."""
    return "N64" if difference < 1e-11 else "N32" if difference < 1e-5 else "N16" if difference < 0.1 else "LARGE"


def legible(text: str) -> list[str]:
    """Return the words of a text without what varies, and without how they are laid on lines."""
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text.split()


def not_printed(shown: str, printed: str) -> str | None:
    """Return the first words of a shown output that the program did not print; None if it printed all, in order. The
    output may begin earlier and go on longer: a page shows a part of it."""
    lines = shown.splitlines()
    if lines and lines[0].startswith("$ "):
        del lines[0]  # the command itself
    parts = [legible(part) for part in re.split(rf"^{re.escape(ELIDED)}$", "\n".join(lines), flags=re.MULTILINE)]
    words, at = legible(printed), 0
    for part in filter(None, parts):
        lengths = [(_same(part, words[start:]), start) for start in range(at, len(words)) if words[start] == part[0]]
        longest, start = max(lengths, key=lambda each: (each[0], -each[1]), default=(0, at))
        if longest < len(part):
            begin = max(0, longest - 3)
            there = " ".join(words[start + begin : start + longest + 8]) if longest else "nothing like it"
            return f"{' '.join(part[begin : longest + 8])} (the program: {there})"
        at = start + longest
    return None


def _same(part: list[str], words: list[str]) -> int:
    """Return how many words are the same at the beginning."""
    return next((at for at, (one, other) in enumerate(zip(part, words, strict=False)) if one != other),
                min(len(part), len(words)))  # fmt: skip
