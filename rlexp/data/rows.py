"""Reading preference pairs. A bad row is an error with file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlexp.errors import DataError
from rlexp.types import Row


def read_jsonl(path: Path) -> list[Row]:
    """Rows with `prompt` (a string, or chat messages), `chosen` and `rejected`."""
    try:
        with path.open("rb") as lines:
            rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}).") from None
    if not rows:
        raise DataError(f"{path}: has no rows. One JSON object per line is expected.")
    return rows


def _row(line: bytes, origin: str) -> Row:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is JSON, and no text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(f"{origin}: is not UTF-8 text ({error.reason}). Convert the file to UTF-8.") from None
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{origin}: is not JSON ({reason}). One JSON object per line is expected.") from None
    if not isinstance(fields, dict):
        raise DataError(f"{origin}: must be a JSON object, not {type(fields).__name__}.")
    for name in ("prompt", "chosen", "rejected"):
        if name not in fields:
            raise DataError(f"{origin}: field `{name}` is missing; the row has {', '.join(sorted(fields)) or 'none'}.")
    for name in ("chosen", "rejected"):
        if not isinstance(fields[name], str) or not fields[name]:
            raise DataError(
                f"{origin}: field `{name}` must be a text that is not empty (of a list of messages, the answer alone)."
            )
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        for problem in _message_problems(prompt):
            raise DataError(f"{origin}: field `prompt` {problem}")
    elif not prompt:
        raise DataError(f"{origin}: field `prompt` must not be empty.")
    return Row(prompt, fields["chosen"], fields["rejected"], origin)


def _message_problems(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        yield "must be a text or a list of chat messages."
        return
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            yield f"has a message (number {number}) without the texts `role` and `content`."
