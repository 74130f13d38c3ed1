"""What no layout moves: the rows behind the examples, and rules of examples, read and written out a second time.

The examples of a run are decoded, and their texts compared with what their rows say, through transformers' own
`apply_chat_template`. Rows of JSON lines and Parquet are read whose columns have rlexp's names, or declared ones: a
prompt and answers, as texts or messages. Rows of other shapes are taken as given, and the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlexp.config.schema import Config
from rlexp.config.schema.data import ArithmeticDataConfig, RowsDataConfig, SyntheticDataConfig, TemplateUse, TooLong
from rlexp.config.schema.data_sources import sources_of
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset import generated  # it alone has the text of generated rows
from rlexp.training.types import Row
from rlexp.verify.recording import ANSWER, Array, Scene, TokenExample

Messages = Sequence[Mapping[str, Any]]
ASSISTANT = "assistant"
NOTHING = np.zeros(0, dtype=np.int64)
OF_MESSAGES = {"role", "content"}
FIELDS = {"prompt": ("prompt", "question", "instruction", "query"), "chosen": ("chosen",), "rejected": ("rejected",),
          "completion": ("completion", "response", "output"), "messages": ("messages",)}  # fmt: skip
MORE = ("system", "system_prompt", "tools", "options", "chat_template_kwargs", "input")  # they change the text


class Other(Exception):
    """A row whose shape is not read here. The message says what is taken as given."""


@dataclass(frozen=True)
class TextRow:
    """A row as texts or messages: a prompt, and an answer for each side."""

    prompt: str | Messages
    answers: Mapping[str, str | Messages]
    margin: float | None = None
    label: bool | None = None


def judged_by_rows(cfg: Config, tokenizer: Any, scene: Scene, examples: Sequence[TokenExample]) -> None:
    """Put beside each other what examples say, decoded, and what their rows say."""
    rows = SourceRows(cfg, [example.origin for example in examples])
    for number, example in enumerate(examples):
        try:
            row = rows.of(example)
            for place, (what, got, meant) in enumerate(compared(cfg, tokenizer, example, row)):
                scene.expect(what, (example.origin, number, place), got, meant)
        except Other as reason:
            scene.put("taken as given", (str(reason),), True)


def compared(cfg: Config, tokenizer: Any, example: TokenExample, row: TextRow) -> Iterator[tuple[str, Any, Any]]:
    templated = bool(tokenizer.chat_template) and getattr(cfg.data, "template", None) is not TemplateUse.never
    most = cfg.data.max_length - (cfg.rollout.max_new_tokens if cfg.loss.draws else 0)
    longest = len(example.prompt) + max(map(len, example.answers.values()), default=0)
    yield "tokens that are too many", max(0, longest - most), 0
    cut = cfg.data.too_long is TooLong.truncate and longest >= most
    for side, answer in row.answers.items() or (("", ""),):
        named = f"text of an example{side and f', {side}'}"
        asked, whole = written(tokenizer, row.prompt, answer, templated=templated)
        prompt, reply = bare(tokenizer, example.prompt), bare(tokenizer, example.answers.get(side, NOTHING))
        if cut:  # the end of its prompt, and the beginning of its answer
            as_cut = asked.endswith(prompt) and whole.removeprefix(asked).startswith(reply)
            yield named, prompt + reply, prompt + reply if as_cut else whole
            continue
        yield named, prompt + reply, whole
        if side and not templated:
            yield "last token of an answer", int(example.answers[side][-1]), tokenizer.eos_token_id
        if isinstance(answer, list):
            yield from masks(tokenizer, example, side, answer)
        elif side:
            yield "tokens that are trained on", int(example.masks[side].sum()), len(example.answers[side])
    yield "margin of the row", example.margin, row.margin
    yield "label of the row", example.label, row.label


def masks(tokenizer: Any, example: TokenExample, side: str, answer: Messages) -> Iterator[tuple[str, Any, Any]]:
    """Compare what is trained on of an answer of several turns with what the assistant says in it."""
    trained = bare(tokenizer, example.answers[side][example.masks[side]])
    rest = bare(tokenizer, example.answers[side][~example.masks[side]])
    for message in answer:
        text = stripped(tokenizer, str(message["content"]))
        own = message["role"] == ASSISTANT
        yield "turns that are trained on", text in trained, own or (text in trained and text not in rest)


def written(tokenizer: Any, prompt: str | Messages, answer: str | Messages, *, templated: bool) -> tuple[str, str]:
    """Return a prompt, and a whole sequence, as texts without white space and special tokens."""
    if not templated:
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise Other("messages that no chat template writes")
        return stripped(tokenizer, prompt), stripped(tokenizer, prompt + answer)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    replied = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
    calls = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    replied = replied if answer else []
    text = tokenizer.apply_chat_template([*asked, *replied], tokenize=False) if replied else calls
    return stripped(tokenizer, calls), stripped(tokenizer, text)


def bare(tokenizer: Any, tokens: Array) -> str:
    return stripped(tokenizer, tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))


def stripped(tokenizer: Any, text: str) -> str:
    for special in sorted(set(tokenizer.all_special_tokens), key=len, reverse=True):
        text = text.replace(special, "")
    return "".join(text.split())


# ---- rows ----


class SourceRows:
    """The rows that some examples come from, by the names of their places."""

    def __init__(self, cfg: Config, origins: Sequence[str]) -> None:
        self.kind, self.unpair = Kind.pairs if cfg.data.unpair else cfg.loss.rows, cfg.data.unpair
        self.known: dict[str, Any] = {}
        data, self.columns = cfg.data, dict[str, str]()
        for split, size in (("train", getattr(data, "size", 0)), ("eval", getattr(data, "eval_size", 0))):
            made: list[Row] = []
            if isinstance(data, SyntheticDataConfig):
                made = generated.pairs(int(size), data.seed, split, data.max_length if data.fill else 0)
            elif isinstance(data, ArithmeticDataConfig):
                made = generated.sums(int(size), data.seed, split, data.digits)
            self.known |= {row.origin: (number, row) for number, row in enumerate(made)}
        if isinstance(data, RowsDataConfig):
            sources = [source.cfg for source in sources_of(data)]
            self.columns = sources[0].columns
            alike = all(source.system is None and source.columns == self.columns for source in sources)
            if alike and data.system is None and not data.template_options:
                self._read(origins)

    def _read(self, origins: Sequence[str]) -> None:
        places: dict[str, set[int]] = {}
        for origin in origins:
            file, _, number = origin.rpartition(":")
            if number.isdigit() and Path(file).is_file():
                places.setdefault(file, set()).add(int(number))
        for file, numbers in places.items():
            self.known |= {f"{file}:{number}": fields for number, fields in _rows_of(Path(file), numbers)}

    def of(self, example: TokenExample) -> TextRow:
        known = self.known.get(example.origin)
        if known is None:
            raise Other("rows of other files than JSON lines and Parquet, or with a system prompt or options")
        if isinstance(known, Mapping):
            return self._of_fields(known, example)
        number, row = known
        row = generated.taken(self.kind, row, number) if row.answers else row
        sides = ("chosen", "rejected") if len(row.answers) == 2 else (ANSWER,)
        return TextRow(row.prompt, dict(zip(sides, row.answers, strict=False)), row.margin, row.label)

    def _of_fields(self, fields: Mapping[str, Any], example: TokenExample) -> TextRow:
        own: dict[str, Any] = {}
        for ours, known in FIELDS.items():
            names = [self.columns[ours]] if ours in self.columns else known
            own[ours] = next((fields[name] for name in names if fields.get(name) is not None), None)
        if any(fields.get(name) for name in MORE) or self.unpair:
            raise Other("rows with a system prompt, tools, options or an input, and pairs that are taken apart")
        single = example.sides == (ANSWER,) and self.kind is not Kind.prompts
        if single and own["messages"] is not None and own["prompt"] is None:
            roles = [message.get("role") for message in own["messages"]]
            first = roles.index(ASSISTANT) if ASSISTANT in roles else 0
            own["prompt"], own["completion"] = own["messages"][:first], own["messages"][first:]
        sides = () if self.kind is Kind.prompts else example.sides
        answers = {side: own["completion" if side == ANSWER else side] for side in sides}
        if not all(map(_is_read, (own["prompt"], *answers.values()))) or any(
            isinstance(text, list) and {text[0]["role"], text[-1]["role"]} != {ASSISTANT} for text in answers.values()
        ):
            raise Other("rows of another shape than a prompt and its answers, as texts or messages")
        margin = fields.get("margin")
        if margin is None and {"score_chosen", "score_rejected"} <= fields.keys():
            margin = fields["score_chosen"] - fields["score_rejected"]
        label = fields.get("label") if self.kind is Kind.unpaired else None
        return TextRow(own["prompt"], answers, margin if self.kind is Kind.pairs else None, label)


def _is_read(text: Any) -> bool:
    """Whether a text, or a conversation, is written as it stands."""
    if isinstance(text, str):
        return bool(text) and not text.startswith("\n\nHuman:")
    return isinstance(text, list) and bool(text) and all(isinstance(m, dict) and set(m) == OF_MESSAGES for m in text)


def _rows_of(file: Path, numbers: set[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield rows of a file of Parquet or of JSON lines, counted from 1; of anything else none."""
    with file.open("rb") as opened:
        if opened.read(4) == b"PAR1":
            yield from ((n, row) for n, row in enumerate(pq.read_table(file).to_pylist(), 1) if n in numbers)
            return
        opened.seek(0)
        for number, line in enumerate(opened, 1):
            if number not in numbers:
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError:
                return
            if isinstance(row, dict):
                yield number, row


# ---- rules of examples ----


def token_weights(example: TokenExample, side: str, beyond: float) -> Array:
    """The weight of each trained token of an answer in its sum: `beyond` after the length of the shortest answer."""
    shortest = min(len(example.trained(each)) for each in example.sides)
    return np.where(np.arange(len(example.trained(side))) < shortest, 1.0, beyond)


def mismatched(batch: Sequence[TokenExample], place: int, most: int, begin: int | None) -> TokenExample:
    """Give an example of the batch the answer of another: as many places back, round the batch, as its own neighbours
    with the same prompt are; on back while the prompt is still the same; of the one just before it, if all have one."""
    same = [each.prompt.tolist() == batch[place].prompt.tolist() for each in batch]
    back = 1
    if not all(same):
        ahead = next(n for n in range(1, len(batch)) if not same[(place + n) % len(batch)])
        behind = next(n for n in range(1, len(batch)) if not same[place - n])
        back = ahead + behind - 1
        while same[(place - back) % len(batch)]:
            back += 1
    other = batch[(place - back) % len(batch)]
    return cut(replace(batch[place], answers=other.answers, masks=other.masks), most, begin)


def cut(example: TokenExample, most: int, begin: int | None) -> TokenExample:
    """Cut what is too long: keep the beginning of its answers, and the end of its prompt after its BOS token."""
    room = max(1, most - max(len(answer) for answer in example.answers.values()))
    prompt = example.prompt.tolist()
    if len(prompt) > room and begin is not None and prompt[0] == begin:
        prompt = [begin, *prompt[len(prompt) - (room - 1) :]]
    elif len(prompt) > room:
        prompt = prompt[len(prompt) - room :]
    rest = most - len(prompt)
    return replace(example, prompt=np.asarray(prompt, dtype=np.int64),
                   answers={side: answer[:rest] for side, answer in example.answers.items()},
                   masks={side: mask[:rest] for side, mask in example.masks.items()})  # fmt: skip
