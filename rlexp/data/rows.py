"""Read preference pairs and prompts. A bad row is an error that names file, line and field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlexp.errors import DataError
from rlexp.types import PromptRow, Row

AnyRow = TypeVar("AnyRow")


def read_jsonl(path: Path) -> list[Row]:
    """Read rows with `prompt` (a string, or chat messages), `chosen` and `rejected`."""
    return _read(path, _row)


def read_prompts(path: Path) -> list[PromptRow]:
    """Read rows with `prompt` and, if the reward needs it, `answer` (a text or a number). Other fields are ignored, so
    a file of preference pairs works too."""
    return _read(path, _prompt_row)


def _read(path: Path, row: Callable[[bytes, str], AnyRow]) -> list[AnyRow]:
    try:
        with path.open("rb") as lines:
            rows = [row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}).") from None
    if not rows:
        raise DataError(f"{path}: has no rows. One JSON object per line is expected.")
    return rows


def _row(line: bytes, origin: str) -> Row:
    fields = _fields(line, origin, ("prompt", "chosen", "rejected"))
    for name in ("chosen", "rejected"):
        if not isinstance(fields[name], str) or not fields[name]:
            raise DataError(
                f"{origin}: field `{name}` must be a text that is not empty (with chat messages, the answer alone)."
            )
    return Row(_prompt(fields, origin), fields["chosen"], fields["rejected"], origin)


def _prompt_row(line: bytes, origin: str) -> PromptRow:
    fields = _fields(line, origin, ("prompt",))
    answer = fields.get("answer")
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if answer is not None and not is_number and not (isinstance(answer, str) and answer):
        raise DataError(
            f"{origin}: field `answer` must be a number or a text that is not empty. Leave it out if there is none."
        )
    return PromptRow(_prompt(fields, origin), None if answer is None else str(answer), origin)


def _fields(line: bytes, origin: str, needed: Sequence[str]) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is valid JSON, but not text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(f"{origin}: is not UTF-8 text ({error.reason}). Convert the file to UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{origin}: is not JSON ({reason}). One JSON object per line is expected.") from None
    if not isinstance(fields, dict):
        raise DataError(f"{origin}: must be a JSON object, not {type(fields).__name__}.")
    for name in needed:
        if name not in fields:
            raise DataError(f"{origin}: field `{name}` is missing; the row has {', '.join(sorted(fields)) or 'none'}.")
    return fields


def _prompt(fields: dict[str, Any], origin: str) -> str | list[dict[str, str]]:
    prompt: Any = fields["prompt"]
    if not isinstance(prompt, str):
        for problem in _message_problems(prompt):
            raise DataError(f"{origin}: field `prompt` {problem}")
    elif not prompt:
        raise DataError(f"{origin}: field `prompt` must not be empty.")
    return prompt


def _message_problems(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        yield "must be a text or a list of chat messages."
        return
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            yield f"has a message (number {number}) without the texts `role` and `content`."
