"""What commands share: a parser whose errors read like all others, which files they refuse to write, and how those end
that only look at files. A command that composes a configuration ends by `config/explain.py`."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlexp.base.errors import ConfigError, UserError
from rlexp.base.pages import addressed
from rlexp.base.printable import printable_lines


def exit_code(command: Callable[[], int]) -> int:
    """Run a command that looks at files, and return its exit code. User errors and files that cannot be read print one
    line, a closed pipe ends it quietly, and bugs keep their traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without a × must not end the command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return command()
    except BrokenPipeError:
        return reader_left()
    except (UserError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def say(message: str) -> None:
    """Print a message that may quote what others wrote. Pages in it get an address that works here."""
    sys.stderr.write(f"rlexp: {printable_lines(addressed(message))}\n")


def reader_left() -> int:
    """End quietly when the reader of a pipe has read enough (`… | head`), and return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def refuse_unwritable(file: Path | None, option: str = "--json") -> None:
    """Refuse a file that cannot be written, before spending minutes on its content."""
    if file is None:
        return
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        file.touch()
    except OSError as error:
        raise ConfigError(
            f"{option}={file}: cannot be written ({error.strerror}). Give a file in a folder where you may write."
        ) from None


class CommandParser(argparse.ArgumentParser):
    """Parses the words behind `python -m NAME`, whose help is its module's docstring as it stands there."""

    def __init__(self, name: str, doc: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m {name}", description=doc, formatter_class=form)


class Parser(CommandParser):
    """Reports a wrong option like any other mistake of the user's."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}. See {self.prog} --help.")
