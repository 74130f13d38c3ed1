"""The tokenizer of `model=tiny`, and the texts and ends of answers, written a second time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlexp.verify.recording import Array


class Bytes:
    """The tokenizer of `model=tiny`: three special tokens, then the bytes in the order of their visible stand-ins."""

    chat_template = None
    bos_token_id, eos_token_id = 0, 1
    SPECIAL = ("<bos>", "<eos>", "<pad>")

    def __init__(self) -> None:
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        self._bytes = visible + [byte for byte in range(256) if byte not in visible]
        self._ids = {byte: 3 + place for place, byte in enumerate(self._bytes)}

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:  # noqa: ARG002
        ids: list[int] = []
        for part in self._parts(text):
            ids += [self.SPECIAL.index(part)] if part in self.SPECIAL else [self._ids[b] for b in part.encode()]
        return {"input_ids": ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return bytes(self._bytes[number - 3] for number in ids if number > 2).decode(errors="replace")

    def _parts(self, text: str) -> list[str]:
        return [part for part in re.split("(<bos>|<eos>|<pad>)", text) if part]


def text_of(tokenizer: Any, answer: Sequence[int] | Array, stop: Sequence[str]) -> str:
    """Return an answer's text without special tokens, up to the first of the texts that end it."""
    text = str(tokenizer.decode([int(token) for token in answer], skip_special_tokens=True))
    return text if not stop else re.split("|".join(map(re.escape, stop)), text, maxsplit=1)[0]


def ended(tokenizer: Any, answer: Sequence[int] | Array, ends: Sequence[int], stop: Sequence[str]) -> bool:
    """Say whether an answer has ended by itself: by its last token, or by a text that its last tokens hold.

    A token is at least one byte of a text, so more tokens than a text has bytes hold all of it.
    """
    if len(answer) and int(answer[-1]) in ends:
        return True
    last = max((len(each.encode()) for each in stop), default=0) + 1
    text = text_of(tokenizer, answer[max(0, len(answer) - last) :], [])
    return any(each in text for each in stop)
