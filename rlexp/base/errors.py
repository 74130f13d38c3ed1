"""Errors that a user can put right. Each message names key, value, rule and remedy; no traceback is shown."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can put right. The message says what is wrong and what to do."""


class ConfigError(UserError):
    """A value, or a combination of values, with which no run is possible."""


class FolderError(ConfigError):
    """A folder that belongs to another run, or that cannot be written to."""


class DataError(UserError):
    """A row, a file or a data set that cannot be trained on."""


class ModelError(UserError):
    """A model that would compute something else over the ring than in one process."""


class NonFiniteError(UserError):
    """A loss or gradient that is not finite. Raised on all ranks before the optimizer step."""


class DrawError(UserError):
    """An answer that could not be drawn. Raised by the rank that draws it, while the other ranks may go on."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, missing, or of another run."""


class RewardError(UserError):
    """An answer that could not be judged. The message names the reward and the sample."""


class SinkError(UserError):
    """A sink that cannot be reached, or that lacks what was asked of it."""


class OutOfMemory(UserError):
    """A rank could not allocate the memory it needed. The message says in which phase."""


def is_out_of_memory(error: BaseException) -> bool:
    """Recognize failed allocations. torch's class is compared by name, since nothing here imports torch; on CPU torch
    raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """Return an error in one line; torch writes pages."""
    return next(iter(str(error).splitlines()), "")
