"""Texts of others, on a terminal or in a comment: no character in them moves the cursor, colours it or ends a line."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape newlines and other characters that do not print, as Python does."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines: these stay, and so do tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
