"""From rows to token ids. A prompt is never trained on, so prompt and answers are tokenized apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlexp.config.schema import TooLong
from rlexp.errors import DataError
from rlexp.types import Ids, Pair, Row


@dataclass(frozen=True)
class Encoded:
    """The pairs kept, in the order of their rows, and how many were not, by reason."""

    pairs: list[Pair]
    dropped: Counter[str] = field(default_factory=Counter)


class PairTokenizer:
    """Applies the chat template where the tokenizer has one, and an end of sequence after each answer.

    Chat messages without a template are written as `Role: text` paragraphs.
    """

    def __init__(self, tokenizer: Any, max_length: int, too_long: TooLong) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.too_long = too_long
        self.eos_id: int | None = tokenizer.eos_token_id

    def encode(self, rows: Iterable[Row]) -> Encoded:
        pairs: list[Pair] = []
        dropped: Counter[str] = Counter()
        for row in rows:
            pair = self._pair(row)
            cut = pair.longest() > self.max_length
            if cut:
                match self.too_long:
                    case TooLong.error:
                        raise DataError(
                            f"{row.origin}: {pair.longest()} tokens, and data.max_length={self.max_length}. "
                            f"Raise it, or say data.too_long=truncate or data.too_long=drop."
                        )
                    case TooLong.drop:
                        dropped["longer than data.max_length"] += 1
                        continue
                    case TooLong.truncate:
                        pair = truncated(pair, self.max_length, self.tokenizer.bos_token_id)
                        dropped["kept, but truncated"] += 1
            if np.array_equal(pair.chosen, pair.rejected):
                dropped["chosen and rejected are the same"] += 1
                dropped["kept, but truncated"] -= cut
                continue
            pairs.append(pair)
        return Encoded(pairs, +dropped)

    def _pair(self, row: Row) -> Pair:
        if getattr(self.tokenizer, "chat_template", None):
            prompt, answers = self._templated(row)
        else:
            text = row.prompt if isinstance(row.prompt, str) else _as_paragraphs(row.prompt)
            prompt, answers = self._ids(text, special=True), [self._ids(row.chosen), self._ids(row.rejected)]
        if not len(prompt):
            raise DataError(f"{row.origin}: field `prompt` has no tokens.")
        chosen, rejected = (self._ended(answer) for answer in answers)
        return Pair(-1, prompt, chosen, rejected, row.origin)

    def _templated(self, row: Row) -> tuple[Ids, list[Ids]]:
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
        template = self._rendered(row.origin)
        prompt = template(messages, add_generation_prompt=True)
        answers = []
        for text in (row.chosen, row.rejected):
            whole = template([*messages, {"role": "assistant", "content": text}])
            if not whole.startswith(prompt):
                raise DataError(
                    f"{row.origin}: the chat template writes the prompt differently once there is an answer, so "
                    f"the two cannot be told apart. Use a tokenizer whose template does not, or one without a template."
                )
            answers.append(self._ids(whole[len(prompt) :]))
        return self._ids(prompt), answers

    def _rendered(self, origin: str) -> Callable[..., str]:
        def render(messages: list[dict[str, str]], **options: Any) -> str:
            try:
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
            except Exception as error:  # a template is code of the tokenizer's author, and raises what it likes
                raise DataError(f"{origin}: field `prompt`: the tokenizer's chat template says: {error}") from error

        return render

    def _ids(self, text: str, *, special: bool = False) -> Ids:
        return np.asarray(self.tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)

    def _ended(self, answer: Ids) -> Ids:
        """With the end-of-sequence token, unless the template has put it (perhaps with a newline after it)."""
        if self.eos_id is None or self.eos_id in answer[-2:]:
            return answer
        return np.append(answer, np.int32(self.eos_id))


def truncated(pair: Pair, max_length: int, bos_id: int | None = None) -> Pair:
    """Cut the prompt from its start, behind the token of the beginning; then the answers from their end."""
    room = max(1, max_length - max(len(pair.chosen), len(pair.rejected)))
    prompt = pair.prompt[-room:]
    if bos_id is not None and pair.prompt[0] == bos_id:
        prompt = np.concatenate((pair.prompt[:1], pair.prompt[1:][len(pair.prompt) - room :]))
    rest = max_length - len(prompt)
    return Pair(pair.index, prompt, pair.chosen[:rest], pair.rejected[:rest], pair.origin)


def numbered(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with their place in the whole data set."""
    return [Pair(index, pair.prompt, pair.chosen, pair.rejected, pair.origin) for index, pair in enumerate(pairs)]


def _as_paragraphs(messages: Sequence[dict[str, str]]) -> str:
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*lines, "Assistant: "])
