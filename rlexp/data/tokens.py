"""From rows to token ids. A prompt is never trained on, so prompt and answers are tokenized apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlexp.config.schema import TooLong
from rlexp.errors import DataError
from rlexp.types import Ids, Pair, Prompt, PromptRow, Row

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Encoded:
    """The pairs kept, in the order of their rows, and how many were not, by reason."""

    pairs: list[Pair]
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts kept, in the order of their rows, and how many were not, by reason."""

    prompts: list[Prompt]
    dropped: Counter[str] = field(default_factory=Counter)


class TextTokenizer:
    """Applies the chat template where the tokenizer has one, and an end of sequence after each answer.

    Chat messages without a template are written as `Role: text` paragraphs.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos_id: int | None = tokenizer.eos_token_id

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def prompt(self, prompt: str | Messages, origin: str) -> Ids:
        """Up to where the answer begins."""
        if self.has_template:
            ids = self._ids(self._rendered(origin)(_as_messages(prompt), add_generation_prompt=True))
        else:
            ids = self._ids(as_text(prompt), special=True)
        return _not_empty(ids, origin)

    def with_answers(self, prompt: str | Messages, texts: Sequence[str], origin: str) -> tuple[Ids, list[Ids]]:
        """The prompt, and each of its answers to the end."""
        if self.has_template:
            ids, answers = self._templated(_as_messages(prompt), texts, origin)
        else:
            ids, answers = self._ids(as_text(prompt), special=True), [self._ids(text) for text in texts]
        return _not_empty(ids, origin), [self._ended(answer) for answer in answers]

    def _templated(self, messages: list[dict[str, str]], texts: Sequence[str], origin: str) -> tuple[Ids, list[Ids]]:
        template = self._rendered(origin)
        prompt = template(messages, add_generation_prompt=True)
        answers = []
        for text in texts:
            whole = template([*messages, {"role": "assistant", "content": text}])
            if not whole.startswith(prompt):
                raise DataError(
                    f"{origin}: the chat template writes the prompt differently once there is an answer, so "
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


class PairTokenizer(TextTokenizer):
    """From rows of preference pairs to their tokens, at most `max_length` of a prompt with either answer."""

    def __init__(self, tokenizer: Any, max_length: int, too_long: TooLong) -> None:
        super().__init__(tokenizer)
        self.max_length = max_length
        self.too_long = too_long

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
        prompt, (chosen, rejected) = self.with_answers(row.prompt, (row.chosen, row.rejected), row.origin)
        return Pair(-1, prompt, chosen, rejected, row.origin)


class PromptTokenizer(TextTokenizer):
    """From rows of prompts to their tokens, at most `longest`: data.max_length − rollout.max_new_tokens."""

    def __init__(self, tokenizer: Any, longest: int, too_long: TooLong) -> None:
        super().__init__(tokenizer)
        self.longest = longest
        self.too_long = too_long

    def encode(self, rows: Iterable[PromptRow]) -> EncodedPrompts:
        prompts: list[Prompt] = []
        dropped: Counter[str] = Counter()
        for row in rows:
            tokens = self.prompt(row.prompt, row.origin)
            if len(tokens) > self.longest:
                match self.too_long:
                    case TooLong.error:
                        raise DataError(
                            f"{row.origin}: the prompt has {len(tokens)} tokens, and data.max_length − "
                            f"rollout.max_new_tokens leaves it {self.longest}. Raise data.max_length, lower "
                            f"rollout.max_new_tokens, or say data.too_long=truncate or data.too_long=drop."
                        )
                    case TooLong.drop:
                        dropped["longer than data.max_length − rollout.max_new_tokens"] += 1
                        continue
                    case TooLong.truncate:
                        tokens = cut_from_start(tokens, self.longest, self.tokenizer.bos_token_id)
                        dropped["kept, but truncated"] += 1
            prompts.append(Prompt(-1, tokens, as_text(row.prompt), row.answer, row.origin))
        return EncodedPrompts(prompts, dropped)


def truncated(pair: Pair, max_length: int, bos_id: int | None = None) -> Pair:
    """Cut the prompt from its start, behind the token of the beginning; then the answers from their end."""
    room = max(1, max_length - max(len(pair.chosen), len(pair.rejected)))
    prompt = cut_from_start(pair.prompt, room, bos_id)
    rest = max_length - len(prompt)
    return Pair(pair.index, prompt, pair.chosen[:rest], pair.rejected[:rest], pair.origin)


def cut_from_start(prompt: Ids, longest: int, bos_id: int | None = None) -> Ids:
    """The last `longest` tokens, the first of them being that of the beginning where the prompt has one."""
    if len(prompt) <= longest or bos_id is None or prompt[0] != bos_id:
        return prompt[-longest:]
    return np.concatenate((prompt[:1], prompt[1:][len(prompt) - longest :]))


def numbered(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with their place in the whole data set."""
    return [Pair(index, pair.prompt, pair.chosen, pair.rejected, pair.origin) for index, pair in enumerate(pairs)]


def numbered_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with their place in the whole data set."""
    return [replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def _not_empty(prompt: Ids, origin: str) -> Ids:
    if not len(prompt):
        raise DataError(f"{origin}: field `prompt` has no tokens.")
    return prompt


def _as_messages(prompt: str | Messages) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_text(prompt: str | Messages) -> str:
    """Messages as paragraphs, up to where the answer begins."""
    if isinstance(prompt, str):
        return prompt
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in prompt]
    return "\n\n".join([*lines, "Assistant: "])
