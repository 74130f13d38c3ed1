"""Texts of others, on a terminal or in a comment: no character in them moves the cursor, colours it or ends a line."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

COMMAND = "python -m rlexp"


def printable(text: str) -> str:
    """Escape newlines and other characters that do not print, as Python does."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines: these stay, and so do tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Return a text for a stream, or for standard output: on a terminal, lines that are too long for it end between
    words. A command stays on its line, since it is to be copied."""
    if not (stream or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    """Break a line that is too long; what follows stands four columns further to the right."""
    if len(line) <= width or COMMAND in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
                         replace_whitespace=False, drop_whitespace=True)  # fmt: skip
