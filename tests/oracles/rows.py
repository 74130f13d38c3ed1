"""The rows of a data set, read a second time: from files to prompts with their answers.

Whole files are read at once, by Python's own json and gzip and by the `datasets` library. No code comes from
training/dataset/ but the text of generated rows.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlexp.config.schema.data import ArithmeticDataConfig, DataConfig, RowsDataConfig, SourceConfig, SyntheticDataConfig
from rlexp.config.schema.data_sources import sources_of
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset import generated  # it alone has the text of generated rows

Messages = list[dict[str, Any]]
NAMES = {  # of columns: the first that has a value in a row
    "prompt": ("prompt", "question", "instruction", "query"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "options": ("options", "chat_template_kwargs"),
    "margin": ("margin",),
    "score_chosen": ("score_chosen",),
    "score_rejected": ("score_rejected",),
    "messages": ("messages", "conversations", "conversation"),
    "completion": ("completion", "response", "output"),
    "input": ("input",),
    "label": ("label",),
    "text": ("text",),
    "answer": ("answer",),
}
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
ASSISTANT = "assistant"
LARGEST = sys.float_info.max


class Unusable(Exception):
    """A row that a run refuses, or leaves out with data.bad_rows=drop."""


@dataclass(frozen=True)
class Asked:
    """A prompt with its answers, of a pair the chosen one first; a text is one message. An empty prompt is none.

    `extra` goes to the chat template. `right` is the answer with which a reward may compare.
    """

    prompt: str | Messages
    answers: tuple[str | Messages, ...]
    origin: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    margin: float | None = None
    label: bool | None = None
    right: str | None = None


def rows_of(cfg: DataConfig, kind: Kind, *, held_out: bool) -> Iterator[tuple[int, Asked | Unusable]]:
    """Yield the rows of all sources in their order, as examples of a kind, each with the number of its source."""
    match cfg:
        case SyntheticDataConfig():
            size, split = (cfg.eval_size, "eval") if held_out else (cfg.size, "train")
            made = generated.pairs(size, cfg.seed, split, cfg.max_length if cfg.fill else 0)
            yield from ((0, _as(kind, row, number)) for number, row in enumerate(made))
        case ArithmeticDataConfig():
            size, split = (cfg.eval_size, "eval") if held_out else (cfg.size, "train")
            for row in generated.sums(size, cfg.seed, split, cfg.digits):
                yield 0, Asked(str(row.prompt), (), row.origin, right=row.expected)
        case RowsDataConfig():
            for number, source in enumerate(sources_of(cfg)):
                yield from ((number, row) for row in _of_source(cfg, kind, source.cfg, held_out=held_out))
        case _:
            raise AssertionError(cfg)


def _as(kind: Kind, pair: Any, number: int) -> Asked:
    """Return a pair, its prompt, its chosen answer, or the one of its answers whose turn it is."""
    both = tuple(map(str, pair.answers))
    if kind is Kind.pairs:
        return Asked(str(pair.prompt), both, pair.origin, margin=pair.margin)
    good = kind is not Kind.unpaired or number % 2 == 0
    answers = () if kind is Kind.prompts else (both[0 if good else 1],)
    return Asked(str(pair.prompt), answers, pair.origin, label=good if kind is Kind.unpaired else None)


def _of_source(cfg: RowsDataConfig, kind: Kind, source: SourceConfig, *, held_out: bool) -> Iterator[Asked | Unusable]:
    path, split = source.path, source.split
    if held_out:
        if source.eval_path is None and source.eval_split is None:
            return
        path, split = source.eval_path or source.path, source.eval_split or "train"
    rows = _rows_at(path, source.subset, split, source.revision)[: source.max_samples or cfg.max_samples]
    first = next((frozenset(row) for _, row in rows if isinstance(row, Mapping)), frozenset[str]())
    for origin, row in rows:
        read: Asked | Unusable
        try:
            read = _asked(cfg, kind, source, first, origin, row)
        except Unusable as error:
            read = Unusable(f"{origin}: {error}")
        yield read


# ---- files ----


def _rows_at(path: str, subset: str | None, split: str, revision: str | None) -> list[tuple[str, Any]]:
    """Return the rows of a file, of files that a pattern matches, of a folder or of a set of the hub, with names."""
    place = Path(path).expanduser()
    files = [place] if place.is_file() else sorted(p for p in map(Path, glob.glob(str(place))) if p.is_file())
    if files:
        return [(f"{file}:{number}", row) for file in files for number, row in _in_file(file)]
    import datasets

    datasets.disable_progress_bars()
    if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        rows = _saved(datasets.load_from_disk(str(place)), split)
    else:
        name = str(place) if place.is_dir() else path
        rows = datasets.load_dataset(name, subset, split=split, revision=revision).to_list()
    return [(f"{path}[{split}]:{number}", row) for number, row in enumerate(rows, 1)]


def _saved(saved: Any, split: str) -> list[Any]:
    """Return the rows of a split, or of a part of it: `train[:100]`, `train[10%:]`."""
    named = re.fullmatch(r"([^\[]+)(?:\[([^:]*):([^:]*)\])?", split)
    assert named is not None, split
    rows: list[Any] = (saved[named[1]] if isinstance(saved, dict) else saved).to_list()

    def place(mark: str | None) -> int | None:
        if not mark:
            return None
        return round(len(rows) * int(mark[:-1]) / 100) if mark.endswith("%") else int(mark)

    return rows[place(named[2]) : place(named[3])]


def _in_file(file: Path) -> list[tuple[int, Any]]:
    content = file.read_bytes()
    if content.startswith(b"PAR1"):
        import datasets

        return list(enumerate(datasets.Dataset(pq.read_table(file)).to_list(), 1))
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    elif content.startswith(b"\x28\xb5\x2f\xfd"):
        content = pa.input_stream(str(file), compression="zstd").read()
    if re.match(rb"\s*\[\s*([{\]]|$)", content.removeprefix(codecs.BOM_UTF8)):
        return list(enumerate(json.loads(content.decode("utf-8-sig")), 1))
    return [(number, _of_line(line)) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def _of_line(line: bytes) -> Any:
    """Return the value of a line of JSON; None if it is none, or has half a character."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


# ---- columns ----


def _asked(
    cfg: RowsDataConfig, kind: Kind, source: SourceConfig, first: frozenset[str], origin: str, row: Any
) -> Asked:
    """Read a row. `first` has the columns of the source's first row, which say of what kind all its rows are."""
    if not isinstance(row, Mapping):
        raise Unusable("is no JSON object.")
    names = {ours: (source.columns[ours],) if ours in source.columns else known for ours, known in NAMES.items()}
    own = {ours: next((row[name] for name in known if row.get(name) is not None), None)
           for ours, known in names.items()}  # fmt: skip
    present = {ours for ours, known in names.items() if not first.isdisjoint(known)}
    if "label" in present:  # among rows with an answer, only those without labels may have an input
        own["input"] = None
    prompt: str | Messages
    answers: tuple[str | Messages, ...] = ()
    right = None
    if kind is Kind.prompts:
        prompt, right = _alone(own, present, set(source.columns))
    else:
        prompt, answers = _answered(kind, own)
    if kind is Kind.unpaired and not isinstance(own["label"], bool):
        raise Unusable("the label is neither true nor false.")
    options = _of_json(own["options"]) or {}
    if not isinstance(options, Mapping):
        raise Unusable("the template's options are no mapping.")
    extra = {**cfg.template_options, **{str(name): value for name, value in options.items() if value is not None}}
    tools = _of_json(own["tools"]) or []
    if not isinstance(tools, list):
        raise Unusable("the tools are no list.")
    if tools:
        extra["tools"] = tools
    margin = _margin_of(own["margin"], own["score_chosen"], own["score_rejected"])
    if prompt:
        prompt = _after_system(prompt, own["system"], source.system or cfg.system)
    return Asked(prompt, answers, origin, extra, margin, own["label"] if kind is Kind.unpaired else None, right)


def _answered(kind: Kind, own: Mapping[str, Any]) -> tuple[str | Messages, tuple[str | Messages, ...]]:
    """Return the prompt and the answers of a row."""
    if kind is Kind.pairs or (kind is Kind.supervised and not _supervised(own) and own["chosen"] is not None):
        prompt, *both = _parted(own["prompt"], _answer(own["chosen"]), _answer(own["rejected"]))
        return prompt, tuple(both if kind is Kind.pairs else both[:1])
    if kind is Kind.supervised and own["messages"] is not None:
        before, after = _talk(own["messages"])
        return before, (after,)
    if kind is Kind.supervised and not _supervised(own):
        if not isinstance(own["text"], str) or not own["text"]:
            raise Unusable("the text is none.")
        return "", (own["text"],)
    if kind is Kind.supervised and own["label"] is False:
        raise Unusable("the answer is labelled bad.")
    prompt, answer = _completed(own)
    return prompt, (answer,)


def _alone(own: Mapping[str, Any], present: set[str], declared: set[str]) -> tuple[str | Messages, str | None]:
    """Return what a row asks, and its own answer to that.

    A row with a prompt asks it, whatever else it has, unless columns of another kind are declared. Others ask what
    comes before their last answer: a pair, before the two differ. `present` are the fields of the source's rows.
    """
    others = declared & {"chosen", "rejected", "messages", "completion"}
    if "prompt" in present and not others:
        return _question(_with_input(own) if "completion" in present else own["prompt"]), _right(own["answer"])
    if present >= {"chosen", "rejected"} and not others & {"messages", "completion"}:
        return _parted(own["prompt"], _answer(own["chosen"]), _answer(own["rejected"]))[0], None
    is_talk = "messages" in present and "completion" not in others
    prompt, answer = _talk(own["messages"]) if is_talk else _completed(own)
    if isinstance(answer, str) or len(answer) == 1:
        return prompt, None
    return [*_as_talk(prompt), *answer[:-1]], None


def _right(value: Any) -> str | None:
    """Return a row's own answer, a text or a number, as text."""
    is_number = type(value) is int or (type(value) is float and _counts(value))
    if value is not None and not is_number and not (isinstance(value, str) and value):
        raise Unusable("the right answer is neither a text nor a number.")
    return None if value is None else str(value)


def _talk(value: Any) -> tuple[Messages, Messages]:
    """Return a conversation up to its first answer, and from there to its last one."""
    talk = _text_or_messages(value)
    if isinstance(talk, str):
        raise Unusable("a conversation is a text.")
    places = [place for place, each in enumerate(talk) if each["role"] == ASSISTANT]
    if not places or not places[0]:
        raise Unusable("a conversation needs an answer, and a message before it.")
    return talk[: places[0]], talk[places[0] : places[-1] + 1]


def _completed(own: Mapping[str, Any]) -> tuple[str | Messages, str | Messages]:
    answer = _answer(own["completion"])
    if isinstance(answer, list) and answer[0]["role"] != ASSISTANT:
        raise Unusable("the completion does not begin with an answer.")
    return _after_prompt(_with_input(own), answer)


def _with_input(own: Mapping[str, Any]) -> Any:
    asked, more = own["prompt"], own["input"]
    return f"{asked}\n\n{more}" if isinstance(asked, str) and isinstance(more, str) and more else asked


def _supervised(own: Mapping[str, Any]) -> bool:
    return own["messages"] is not None or (own["prompt"] is not None and own["completion"] is not None)


def _margin_of(margin: Any, better: Any, worse: Any) -> float | None:
    """Return the margin that a row says, or its scores' difference; what is no number is not there."""
    if _counts(margin):
        return float(margin)
    if not (_counts(better) and _counts(worse)):
        return None
    difference = float(better) - float(worse)
    return difference if _counts(difference) else None


def _counts(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST  # false for NaN


def _of_json(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unusable("a text that is no JSON.") from error


def _after_system(prompt: str | Messages, own: Any, of_all: str | None) -> str | Messages:
    if own is not None and not isinstance(own, str):
        raise Unusable("the system prompt is no text.")
    system = own or of_all
    if not system:
        return prompt
    talk = _as_talk(prompt)
    return talk if talk[0]["role"] == "system" else [{"role": "system", "content": system}, *talk]


def _as_talk(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


# ---- prompts and answers ----


def _parted(given: Any, chosen: str | Messages, rejected: str | Messages) -> tuple[str | Messages, ...]:
    """Return the prompt and both answers. If both are whole conversations, the prompt is what they begin with alike."""
    one, other = _conversation(chosen), _conversation(rejected)
    if one is None and other is None:
        if given is None:
            raise Unusable("there is no prompt.")
        prompt, better = _after_prompt(given, chosen)
        return prompt, better, _after_prompt(given, rejected)[1]
    if one is None or other is None:
        raise Unusable("one answer is a whole conversation, and the other is not.")
    shared = [place for place in range(1, min(len(one), len(other))) if one[:place] == other[:place]]
    answered = [place for place in shared if one[place]["role"] == other[place]["role"] == ASSISTANT]
    if not answered:
        raise Unusable("the conversations share nothing before an answer.")
    prompt = one[: answered[-1]]
    if given is not None:
        asked = _text_or_messages(given)
        texts = [asked] if isinstance(asked, str) else [message["content"] for message in asked]
        if {text.strip() for text in texts} - {message["content"].strip() for message in prompt}:
            raise Unusable("the prompt is not what the conversations share.")
    return prompt, _to_its_last_answer(one[len(prompt) :]), _to_its_last_answer(other[len(prompt) :])


def _after_prompt(given: Any, answer: str | Messages) -> tuple[str | Messages, str | Messages]:
    """Return a prompt and the answer that follows it; a dialogue has a space between its last call and the answer."""
    prompt = _question(given)
    is_dialogue = isinstance(given, str) and isinstance(prompt, list)
    if isinstance(answer, list):
        return prompt, _to_its_last_answer(answer)
    return prompt, answer.removeprefix(" " * is_dialogue)


def _question(given: Any) -> str | Messages:
    """Return a prompt: a text, messages, or a dialogue in one text that calls for an answer."""
    called = re.fullmatch(r"(\n\nHuman:.*?)\n\nAssistant:\s*", given, re.DOTALL) if isinstance(given, str) else None
    talk = _conversation(called[1]) if called else None
    return talk or _text_or_messages(given)


def _to_its_last_answer(talk: Messages) -> Messages:
    while talk[-1]["role"] != ASSISTANT:
        talk = talk[:-1]
    if talk[-1] == {"role": ASSISTANT, "content": ""}:
        raise Unusable("the last answer is empty.")
    return talk


def _conversation(answer: str | Messages) -> Messages | None:
    """Return an answer as messages, if it is a conversation from its beginning."""
    if not isinstance(answer, str):
        return None if answer[0]["role"] == ASSISTANT else answer
    before, *turns = re.split(r"\n\n(Human|Assistant):", answer)
    if before or turns[:1] != ["Human"]:
        return None
    return [{"role": "user" if who == "Human" else ASSISTANT, "content": text.removeprefix(" ")}
            for who, text in zip(turns[::2], turns[1::2], strict=True)]  # fmt: skip


def _answer(value: Any) -> str | Messages:
    if value is None or isinstance(value, bool | int | float):
        raise Unusable("an answer is no text.")
    return _text_or_messages(value)


def _text_or_messages(value: Any) -> str | Messages:
    if isinstance(value, str):
        if not value:
            raise Unusable("a text is empty.")
        return value
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, Sequence) or not listed:
        raise Unusable("neither a text nor messages.")
    return [_message(each) for each in listed]


def _message(value: Any) -> dict[str, Any]:
    """Return a message with the texts `role` and `content`; from/value says the same in other words."""
    if not isinstance(value, Mapping):
        raise Unusable("a message is no mapping.")
    message = {str(key): each for key, each in value.items() if each is not None}
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
        text = message.pop("value", None)
        message.setdefault("content", text)
    calls = _of_json(message.pop("tool_calls", None)) or []
    if not isinstance(calls, list) or any(not isinstance(call, Mapping) for call in calls):
        raise Unusable("the calls of tools are no list of mappings.")
    if calls:
        message["tool_calls"] = calls
    content = message.get("content", "" if calls else None)
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise Unusable("a message has no role or no content.")
    return {**message, "role": SPEAKERS.get(message["role"], message["role"]), "content": content}


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise Unusable("a part of a message is no text.")
    return str(part["text"])
