"""Chat messages as they stand in rows, in one form: `role`, `content`, and what else a template takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlexp.base import plain_json
from rlexp.training.types import Messages

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
TURN = re.compile(r"\n\n(Human|Assistant): ?")  # of a dialogue that is written as one text
ANSWERS = "assistant"  # the role that is trained on


class FieldError(Exception):
    """A field of a row that cannot be used; the message goes on after the field's name."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"field `{field}` {rule}")
        self.field, self.rule = field, rule


def text_or_messages(value: Any, field: str) -> str | Messages:
    if isinstance(value, str):
        if not value:
            raise FieldError(field, "must not be empty.")
        return value
    return messages(value, field)


def messages(value: Any, field: str) -> Messages:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise FieldError(field, "must be a text or a list of chat messages.")
    return [_message(each, number, field) for number, each in enumerate(value, 1)]


def _message(value: Any, number: int, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FieldError(field, _bad(number))
    # Columns of a table have every key that any message has: those without a value were not there.
    message = {str(key): each for key, each in value.items() if each is not None}
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None)} | message
    if calls := _calls(message.pop("tool_calls", None), number, field):
        message["tool_calls"] = calls
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = _joined(content, number, field)
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise FieldError(field, _bad(number))
    return message | {"role": ROLES.get(role, role), "content": content}


def _calls(value: Any, number: int, field: str) -> list[Mapping[str, Any]]:
    """Return the calls of tools in a message; a table may hold them as JSON."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = plain_json.loads(value)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise FieldError(field, f"has a message (number {number}) whose `tool_calls` is no list of calls, or its JSON.")
    return value


def _bad(number: int) -> str:
    return f"has a message (number {number}) without the texts `role` and `content`."


def _joined(blocks: Sequence[Any], number: int, field: str) -> str:
    texts = []
    for block in blocks:
        text = block.get("text") if isinstance(block, Mapping) else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise FieldError(field, f"has a message (number {number}) with a part of type {kind}; only text is read.")
        texts.append(text)
    return "".join(texts)


def dialogue(text: str) -> Messages | None:
    """Read a dialogue that is written as one text: "\\n\\nHuman: …\\n\\nAssistant: …"; None if it is no such text."""
    marks = list(TURN.finditer(text))
    if not marks or marks[0].start() or marks[0][1] != "Human":
        return None
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        {"role": "user" if mark[1] == "Human" else ANSWERS, "content": text[mark.end() : end]}
        for mark, end in zip(marks, ends, strict=True)
    ]


def shared_beginning(one: Messages, other: Messages) -> int:
    """Return how many messages two conversations share before both are answered; 0 if they share none."""
    shared = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        shared += 1
    for length in range(min(shared, len(one) - 1, len(other) - 1), 0, -1):
        if one[length]["role"] == other[length]["role"] == ANSWERS:
            return length
    return 0


def before_answers(talk: Messages, field: str) -> tuple[Messages, Messages]:
    """Cut a conversation before its first answer, and leave out what follows the last one."""
    answered = [place for place, message in enumerate(talk) if message["role"] == ANSWERS]
    if not answered:
        raise FieldError(field, "has no message of the role `assistant`, so nothing is trained on.")
    if answered[0] == 0:
        raise FieldError(field, "begins with the role `assistant`: an answer needs a message before it.")
    return talk[: answered[0]], talk[answered[0] : answered[-1] + 1]


def with_system(prompt: str | Messages, system: str | None) -> str | Messages:
    """Put a system prompt first, unless the conversation has one."""
    talk = as_messages(prompt)
    if not system or talk[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system}, *talk]


def as_messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_answer(answer: str | Messages) -> Messages:
    return [{"role": ANSWERS, "content": answer}] if isinstance(answer, str) else list(answer)


def as_text(prompt: str | Messages) -> str:
    """Write messages as paragraphs, up to the start of the answer."""
    if isinstance(prompt, str):
        return prompt
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in prompt]
    return "\n\n".join([*lines, "Assistant: "])


def turns(answer: str | Messages) -> Iterator[tuple[str, bool]]:
    """Write an answer after `as_text`: each part of the text, and whether it is trained on."""
    before = ""
    for place, message in enumerate(as_answer(answer)):
        if message["role"] == ANSWERS:
            if place:
                yield f"{before}\n\nAssistant: ", False
            yield message["content"], True
            before = ""
        else:
            before += f"\n\n{message['role'].capitalize()}: {message['content']}"
