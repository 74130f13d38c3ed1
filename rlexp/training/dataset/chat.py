"""Rows as text: through the tokenizer's chat template, or as paragraphs; and which parts are the assistant's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlexp.base.errors import DataError
from rlexp.training.dataset.messages import ANSWERS, as_answer, as_messages, as_text, turns
from rlexp.training.dataset.seam import Text
from rlexp.training.types import Messages, Row

# To a template that asks for the day it is always the same one, else tokens would change overnight.
TODAY = {"%d": "26", "%-d": "26", "%e": "26", "%b": "Jul", "%B": "July", "%Y": "2024", "%m": "07", "%-m": "7",
         "%y": "24", "%A": "Friday", "%a": "Fri", "%H": "00", "%M": "00", "%S": "00", "%I": "12", "%p": "AM",
         "%j": "208", "%F": "2024-07-26", "%D": "07/26/24", "%x": "07/26/24", "%T": "00:00:00", "%%": "%"}  # fmt: skip
SAME_DAY = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('{asked}', '{value}')" for asked, value in TODAY.items())
    + " }}{%- endmacro %}\n"  # the line ends here: a template's own first spaces mean what they mean at its beginning
)
SWITCH = re.compile(r"/(?:no_)?think\b|/system_override\b")  # a word to the template, which takes it out
MARK = "\ue000rlexp\ue001"  # takes an answer's place, to find where a template puts it


@dataclass(frozen=True)
class Chat:
    """Writes rows as text. With a template, an answer is what follows the template's own call for one."""

    tokenizer: Any
    use_template: bool = True

    @property
    def templated(self) -> bool:
        return self.use_template and bool(getattr(self.tokenizer, "chat_template", None))

    def texts(self, row: Row) -> list[Text]:
        """Return the prompt with each of its answers; the prompt alone where there is none."""
        if row.answers and not row.prompt:
            return [Text("", tuple(turns(answer))) for answer in row.answers]
        if not self.templated:
            _refuse_tools(row)
            prompt = as_text(row.prompt)
            return [Text(prompt, tuple(turns(answer))) for answer in row.answers] or [Text(prompt)]
        asked = _Rendering(self.tokenizer, row)
        messages = list(as_messages(row.prompt))
        prompt = asked.text(messages, asking=True)
        asked.refuse_left_out(messages, prompt, asking=True)
        texts = [_answered(asked, messages, prompt, as_answer(answer)) for answer in row.answers]
        return _with_one_prompt(texts) if texts else [Text(prompt)]


class _Rendering:
    def __init__(self, tokenizer: Any, row: Row) -> None:
        self.tokenizer, self.row = tokenizer, row
        tools = {} if row.tools is None else {"tools": list(row.tools)}
        try:
            template = tokenizer.get_chat_template(tools=row.tools)
        except ValueError as error:  # of several, none is for this row
            raise DataError(f"the tokenizer has no chat template for it: {error}") from error
        dated = {"chat_template": SAME_DAY + template} if "strftime_now" in template else {}
        self.extra = {**row.options, **tools, **dated}

    def text(self, messages: Sequence[Mapping[str, Any]], *, asking: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=asking, **self.extra
            )
        except Exception as error:  # a template is foreign code and may raise anything
            raise DataError(f"field `prompt`: the tokenizer's chat template raises: {error}") from error
        return str(text)

    def refuse_left_out(self, messages: Messages, text: str, *, asking: bool = False) -> None:
        """Refuse a row of which the template leaves out the system prompt, a tool, or a call of one.

        Whether a tool is written is seen by another name, since its own may stand in the text by chance.
        """
        for message in messages:
            needed = SWITCH.sub("", message["content"]).strip()
            if message["role"] == "system" and needed not in SWITCH.sub("", text):
                raise _left_out(f"the system prompt {needed[:40]!r}")
        renamed: dict[str, str] = {}
        tools = [_renamed(tool, "the tool", renamed) for tool in self.row.tools or ()]
        talk = [
            {**message, "tool_calls": [_renamed(call, "the call of", renamed) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]
        if renamed:
            other = replace(self.row, tools=tools or None)
            written = _Rendering(self.tokenizer, other).text(talk, asking=asking)
            for name, what in renamed.items():
                if name not in written:
                    raise _left_out(what)

    def beginning(self, talk: Messages, place: int, whole: str, called: str | None = None) -> int:
        """Return where the answer at `place` begins in the whole text: after the template's call for it.

        A template may call for an answer in other words than it writes one that others follow (with an empty thought);
        the answer then begins where the two part.
        """
        called = called or self.text(talk[:place], asking=True)
        if whole.startswith(called):
            return len(called)
        start = self._common(called, whole)
        if not whole.startswith(before := self.text(talk[:place])) or start < len(before):
            raise DataError(
                "the chat template changes the prompt when an answer follows, so the two cannot be told apart. Give "
                "one that does not (model.chat_template=FILE), or data.template=never."
            )
        return start

    def turn(self, talk: Messages, place: int, whole: str) -> tuple[int, int]:
        """Return where a turn begins and ends in the whole text.

        A template may write a turn otherwise when others follow (Qwen3 leaves thinking out), so it is looked for in the
        whole text: a mark in the answer's place shows what stands before and after it.
        """
        begin = self.beginning(talk, place, whole)
        alone = self.text(talk[: place + 1])
        if whole.startswith(alone):
            return begin, len(alone)
        marked = [*talk[:place], {**talk[place], "content": MARK}]
        _, last, ending = self.text(marked).partition(MARK)
        head, inside, tail = self.text([*marked, *talk[place + 1 :]]).partition(MARK)
        shared = self._common(ending, tail)
        ended = shared or not ending  # a template may write nothing behind a turn: the next one's role ends it
        if not (last and inside and ended and whole.startswith(head) and whole.endswith(tail)):
            raise DataError(
                f"the chat template does not show where message number {place + 1} ends, so no mask is certain. Give "
                f"another one (model.chat_template=FILE)."
            )
        return begin, len(whole) - len(tail) + shared

    def _common(self, one: str, other: str) -> int:
        """Return how much of their beginning two texts share, without a special token of which they share a part."""
        length = next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        for text in (one, other):
            for token in self.tokenizer.get_added_vocab():
                at = text.find(token, max(0, length - len(token) + 1))
                if 0 <= at < length < at + len(token):
                    length = at
        return length


def _refuse_tools(row: Row) -> None:
    talk = [*as_messages(row.prompt), *(message for answer in row.answers for message in as_answer(answer))]
    if row.tools or any(message.get("tool_calls") for message in talk):
        raise DataError(
            "has tools, or calls of them, and no chat template writes them. Give one (model.chat_template=FILE), or "
            "rows without tools."
        )


def _renamed(thing: Any, what: str, renamed: dict[str, str]) -> Any:
    """Return a tool, or a call of one, with another name, and note what has that name."""
    if isinstance(thing, Mapping) and isinstance(thing.get("function"), Mapping):
        return {**thing, "function": _renamed(thing["function"], what, renamed)}
    if not isinstance(thing, Mapping) or not thing.get("name"):
        return thing
    name = f"rlexp{len(renamed)}name"
    renamed[name] = f"{what} {str(thing['name'])[:40]!r}"
    return {**thing, "name": name}


def _left_out(what: str) -> DataError:
    return DataError(
        f"the chat template leaves out {what}. Give a template that writes it (model.chat_template=FILE), or rows "
        f"without it."
    )


def _with_one_prompt(texts: Sequence[Text]) -> list[Text]:
    """Give all answers the shortest prompt; what another answer's prompt has more stands before it, untrained."""
    shortest = min((text.prompt for text in texts), key=len)
    return [
        replace(text, prompt=shortest, parts=((text.prompt[len(shortest) :], False), *text.parts))
        if len(text.prompt) > len(shortest)
        else text
        for text in texts
    ]


def _answered(asked: _Rendering, messages: Messages, prompt: str, answer: Messages) -> Text:
    talk = [*messages, *answer]
    whole = asked.text(talk)
    asked.refuse_left_out(talk, whole)
    start = asked.beginning(talk, len(messages), whole, prompt)
    if len(answer) == 1:
        return Text(whole[:start], ((whole[start:], True),), changed=start < len(prompt))
    parts, at = [], start
    for place in range(len(messages), len(talk)):
        if talk[place]["role"] == ANSWERS:
            begin, end = asked.turn(talk, place, whole)
            if begin < at:
                raise DataError("the chat template writes turns in another order than the messages have.")
            parts += [(whole[at:begin], False)] if begin > at else []
            parts.append((whole[begin:end], True))
            at = end
    parts += [(whole[at:], False)] if at < len(whole) else []
    return Text(whole[:start], tuple(parts), changed=start < len(prompt))
