"""Errors that are part of the product: key, value, rule, remedy. They are shown without a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user can put right. The message says what and how."""


class ConfigError(UserError):
    """A value, or a pair of values, that cannot be run."""


class FolderError(ConfigError):
    """A folder that is another's, or that nothing can be written to."""


class DataError(UserError):
    """A row, a file or a data set that cannot be trained on."""


class ModelError(UserError):
    """A model that would compute something else over the ring than alone."""


class NonFiniteError(UserError):
    """A loss or a gradient that is not finite; raised on all ranks before the optimizer step."""


class DrawError(UserError):
    """An answer that could not be drawn; raised by the rank that draws it, while the others may go on."""


class CheckpointError(UserError):
    """A checkpoint that is not whole, not there, or not this run's."""


class RewardError(UserError):
    """An answer that could not be judged; the message names the reward and the sample."""


class SinkError(UserError):
    """A place for rows that cannot be reached, or has not what was asked of it."""


class OutOfMemory(UserError):
    """A rank could not allocate what it needed; the message says in which phase."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own class is known by its name, since nothing here imports torch; on CPU it has none."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def exit_code(command: Callable[[], int]) -> int:
    """Of a command, which tells a mistake of the user's in one message; a defect keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no × must not end it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return command()
    except BrokenPipeError:  # who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError) as error:
        sys.stderr.write(f"rlexp: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
