"""Prompts to which a policy draws its answers, read twice: by the product, and by the reference of `verify`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlexp.verify.records import TokenExample, TokenPrompt
from rlexp.verify.reference.pairs import ExampleSet, examples_of
from transformers import AutoTokenizer

from rlexp.base.errors import DataError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.data import BadRows, TemplateUse, TooLong
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, World
from tests.helpers.conversations import SHAPES as PAIRS
from tests.helpers.conversations import Row, hh
from tests.helpers.rows import FILES, FOLDERS, assistant, cache, user
from tests.verify.test_textbook_rows import TOOLS, Rows, smollm

__all__ = ["cache"]  # a fixture of every test here too

CHATML = (
    "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if thinks %}<think>{% endif %}{% endif -%}"
)
SILENT = CHATML.replace("for m in messages", "for m in messages if m.role == 'user'")
SAID = ("tea", "a lamp é", "two\nmaps", "🙂", "the harbour", "ink", "snow", "plums")
TALKS = [[user(f"{word}?"), assistant(f" {word}. "), user("More."), assistant(f"{word} again")] for word in SAID]
# Rows of each shape.
SHAPES: dict[str, list[Row]] = {
    "prompts": [{"prompt": f"{word}?"} for word in SAID],
    "with answers": [{"prompt": f"{word}?", "answer": answer} for word, answer in
                     zip(SAID, ("4", 4, -0.5, 1e22, None, "x y", 0, 2.0), strict=True)],
    "questions": [{"question": f"{word}?", "answer": word} for word in SAID],
    "instructions": [{"instruction": f"Say {word}"} for word in SAID],
    "queries": [{"query": f"{word}?", "prompt": None if at % 2 else word} for at, word in enumerate(SAID)][1::2],
    "messages": [{"prompt": talk[:at % 2 * 2 + 1], "answer": at} for at, talk in enumerate(TALKS)],
    "one message": [{"prompt": user(word)} for word in SAID],
    "messages that end with an answer": [{"prompt": talk} for talk in TALKS],
    "a dialogue": [{"prompt": f"\n\nHuman: {word}?\n\nAssistant:{' ' * (at % 3)}"} for at, word in enumerate(SAID)],
    "a longer dialogue": [{"prompt": f"\n\nHuman: {word}?\n\nAssistant: \n\nAssistant: {word}\n\nHuman:?\n\nAssistant:"}
                          for word in SAID],
    "no dialogue": [{"prompt": f"\n\nHuman: {word}?\n\nAssistant: Well"} for word in SAID],
    "pairs": [{"prompt": f"{word}?", "chosen": word, "rejected": word, "answer": 3} for word in SAID],
    "whole conversations": [{"chosen": talk, "rejected": [*talk[:-1], assistant("no")], "answer": 3} for talk in TALKS],
    "that differ early": [{"chosen": talk, "rejected": [talk[0], assistant("no")]} for talk in TALKS],
    "dialogues": [{side: f"\n\nHuman: {word}?\n\nAssistant: {side}" for side in ("chosen", "rejected")}
                  for word in SAID],
    "labelled": [{"prompt": f"{word}?", "completion": word, "label": at % 2 == 0} for at, word in enumerate(SAID)],
    "completions": [{"prompt": f"{word}?", "completion": f" {word}", "answer": word} for word in SAID],
    "conversations": [{"messages": talk[:(2, 3, 4)[at % 3]], "answer": 3} for at, talk in enumerate(TALKS)],
    "from and value": [{"conversations": [{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]}
                                          for m in talk]} for talk in TALKS],
    "a prompt beside a conversation": [{"prompt": word, "messages": talk}
                                       for word, talk in zip(SAID, TALKS, strict=True)],
    "system prompts": [{"prompt": f"{word}?", "system": system} for word, system in
                       zip(SAID, ("Be kind.", "", None, "Be kind.") * 2, strict=True)],
    "a system message": [{"messages": [{"role": "system", "content": "Be wise."}, *talk]} for talk in TALKS],
}  # fmt: skip


@functools.cache
def composed(data: str) -> Config:
    return compose_config(["launch.device=cpu", "logger=none", "loss=grpo", "reward.text=a", "rollout.max_new_tokens=8",
                           f"data={data}", *["data.path=org/name"] * (data == "hf")])  # fmt: skip


def configured(kind: str = "hf", **data: Any) -> Config:
    """Return a configuration with some values of data."""
    cfg = composed(kind)
    return replace(cfg, data=replace(cfg.data, **data))


def of_lines(folder: Path, rows: Sequence[Any], name: str = "rows", **data: Any) -> Config:
    """Write rows as lines of JSON, and return a configuration that reads them."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return configured(path=str(file), **data)


@functools.cache
def tokenizer_of(template: str | None = None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def plain(prompts: Sequence[Example]) -> list[tuple[list[int], str, str | None, str]]:
    return [(each.prompt.tolist(), each.text, each.expected, each.origin) for each in prompts]


def meant(prompts: Sequence[TokenExample]) -> list[tuple[list[int], str, str | None, str]]:
    said = []
    for each in prompts:
        assert isinstance(each, TokenPrompt)
        assert each.tokens == 0  # it has no answer to train on
        said.append((each.prompt.tolist(), each.text, each.right, each.origin))
    return said


def hold(cfg: Config, tokenizer: Any) -> tuple[Sequence[Example], ExampleSet]:
    """Read the prompts twice, and require that they are the same."""
    tokenizer.model_max_length = 1 << 60
    ours, theirs = read_examples(cfg, tokenizer, World(0, 1, ALONE)), examples_of(cfg, tokenizer)
    assert plain(ours.train) == meant(theirs.train)
    assert plain(ours.held_out) == meant(theirs.held_out)
    assert ours.mixture is None or ours.mixture.sizes == theirs.sizes
    return ours.train, theirs


def refused(cfg: Config, tokenizer: Any) -> None:
    """Require that both refuse the rows."""
    with pytest.raises(DataError):
        read_examples(cfg, tokenizer, World(0, 1, ALONE))
    with pytest.raises(DataError):
        examples_of(cfg, tokenizer)


# ---- forms of rows ----


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "template"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_read_the_same(shape: str, template: str | None, tmp_path: Path) -> None:
    """With a system prompt, with rows that are held out, and with prompts that are cut."""
    rows = SHAPES[shape]
    options: tuple[dict[str, Any], ...] = (
        {},
        {"system": "Be brief.", "eval_size": 3},
        {"max_length": 20, "too_long": TooLong.truncate},
    )
    for more in options:
        train, both = hold(of_lines(tmp_path, rows, **more), tokenizer_of(template))
        assert len(train) == len(rows) - len(both.held_out)


def test_what_a_policy_is_asked(tmp_path: Path) -> None:
    """A few rows, written out by hand."""
    rows = {"plain": {"prompt": "2 + 2 =", "answer": 4}, "talk": {"messages": TALKS[0]}}
    asked = {
        ("plain", None): "2 + 2 =",
        ("talk", None): "User: tea?\n\nAssistant:  tea. \n\nUser: More.\n\nAssistant: ",
        ("plain", CHATML): "<|im_start|>user\n2 + 2 =<|im_end|>\n<|im_start|>assistant\n",
        ("talk", CHATML): "<|im_start|>user\ntea?<|im_end|>\n<|im_start|>assistant\n tea. <|im_end|>\n"
                          "<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n",
    }  # fmt: skip
    for (name, template), written in asked.items():
        tokenizer = tokenizer_of(template)
        (prompt,) = examples_of(of_lines(tmp_path, [rows[name]]), tokenizer).train
        assert isinstance(prompt, TokenPrompt)
        assert tokenizer.decode(prompt.prompt) == written
        assert (prompt.text, prompt.right) == (asked[name, None], "4" if name == "plain" else None)


def test_the_input_of_an_instruction_is_asked_too(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Say.", "input": "", "output": ""}]
    train, _ = hold(of_lines(tmp_path, rows), tokenizer_of())
    assert [prompt.text for prompt in train] == ["Add.\n\n1, 2", "Say."]
    for without in ({"output": "3", "label": True}, {"answer": 3}):
        train, _ = hold(of_lines(tmp_path, [{"prompt": "Add.", "input": "1, 2", **without}]), tokenizer_of())
        assert train[0].text == "Add."


def test_an_answer_has_all_its_digits(tmp_path: Path) -> None:
    cfg = of_lines(tmp_path, [{"prompt": "2 ** 100 =", "answer": 2**100}])
    ((_, _, right, _),) = meant(examples_of(cfg, tokenizer_of()).train)
    assert right == "1267650600228229401496703205376"
    train, _ = hold(of_lines(tmp_path, [{"prompt": "2 =", "answer": 2}, {"prompt": "=", "answer": 10**400}]),
                    tokenizer_of())  # fmt: skip
    assert [prompt.expected for prompt in train] == ["2", f"{10**400}"]


@pytest.mark.parametrize("columns", [{"prompt": "q", "answer": "a"}, {"chosen": "one", "rejected": "other"},
                                     {"messages": "talk"}])  # fmt: skip
def test_declared_columns(columns: dict[str, str], tmp_path: Path) -> None:
    """They say which of the columns of a row make its prompt."""
    rows = [{"q": word, "a": at, "prompt": f"{word}?", "talk": talk, "one": talk, "other": [*talk[:3], assistant("no")]}
            for at, (word, talk) in enumerate(zip(SAID, TALKS, strict=True))]  # fmt: skip
    train, _ = hold(of_lines(tmp_path, rows, columns=columns), tokenizer_of())
    conversation = "User: tea?\n\nAssistant:  tea. \n\nUser: More.\n\nAssistant: "
    assert (train[0].text, train[0].expected) == (("tea", "0") if "prompt" in columns else (conversation, None))


@pytest.mark.parametrize("write", [*FILES, *FOLDERS])
def test_every_format(write: Callable[[Path, Sequence[Row]], str], tmp_path: Path) -> None:
    rows = [{"prompt": talk[:1], "answer": at / 2, "system": None if at % 2 else "Be brief."}
            for at, talk in enumerate(TALKS)]  # fmt: skip
    train, both = hold(configured(path=write(tmp_path, rows), eval_size=2), tokenizer_of())
    assert (len(train), len(both.held_out)) == (6, 2)


# ---- templates ----


def test_options_and_tools_reach_the_template(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look_up"}}
    rows: list[Row] = [
        {"prompt": "Hi", "tools": [tool]},
        {"prompt": "Hi", "chat_template_kwargs": {"thinks": False}},
        {"prompt": "Hi", "tools": json.dumps([tool]), "chat_template_kwargs": '{"thinks": false}'},
    ]
    rows.append({"prompt": [user("Hi"), assistant("") | {"tool_calls": [tool]}, {"role": "tool", "content": "12"}]})
    tokenizer = tokenizer_of(CHATML)
    train, _ = hold(of_lines(tmp_path, rows, template_options={"thinks": True}), tokenizer)
    written = [tokenizer.decode(prompt.prompt) for prompt in train]
    assert ["look_up" in text for text in written] == [True, False, True, True]
    assert [text.endswith("<think>") for text in written] == [True, False, False, True]


def test_no_template_although_there_is_one(tmp_path: Path) -> None:
    train, _ = hold(of_lines(tmp_path, SHAPES["messages"], template=TemplateUse.never), tokenizer_of(CHATML))
    assert tokenizer_of(CHATML).decode(train[0].prompt) == "User: tea?\n\nAssistant: "


def test_what_no_template_writes_is_refused(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "Hi"}}
    kinds: dict[str, Row] = {"tools": {"prompt": "Hi", "tools": [tool]}, "system": {"prompt": "Hi", "system": "Be it."},
                             "calls": {"prompt": [user("Hi"), assistant("") | {"tool_calls": [tool]}]}}  # fmt: skip
    for name, row in kinds.items():
        silent = SILENT.replace("if tools", "if false")
        for template in (silent, *([None] if name != "system" else [])):
            refused(of_lines(tmp_path, [{"prompt": "a"}, row]), tokenizer_of(template))
            cfg = of_lines(tmp_path, [{"prompt": "a"}, row], bad_rows=BadRows.drop)
            train, _ = hold(cfg, tokenizer_of(template))
            assert len(train) == 1


@pytest.mark.parametrize("template", ["smollm", "qwen3", "llama3", None])
def test_real_conversations_by_templates(template: str | None, shared: Path, tmp_path: Path) -> None:
    shapes = [*PAIRS, lambda row: {"messages": [*row["prompt"], assistant(row["chosen"])]}]
    rows = [shapes[place % len(shapes)](row) for place, row in enumerate(hh(shared, 35))]
    sources = {}
    for shape in range(len(shapes)):
        of_lines(tmp_path, rows[shape :: len(shapes)], f"{shape}")
        sources[f"s{shape}"] = {"path": f"{tmp_path}/{shape}.jsonl"}
    train, _ = hold(configured(path=None, sources=sources), smollm(shared, template))
    assert len(train) == 35


# ---- lengths, and rows that cannot be used ----


def test_room_is_left_to_the_answer(tmp_path: Path) -> None:
    """A prompt has data.max_length − rollout.max_new_tokens tokens, here 12."""
    rows = [{"prompt": "x" * length} for length in range(9, 17)]
    lengths = {TooLong.drop: [9, 10, 11, 12], TooLong.truncate: [9, 10, 11, *[12] * 5]}
    for too_long, left in lengths.items():
        train, _ = hold(of_lines(tmp_path, rows, max_length=20, too_long=too_long), tokenizer_of())
        assert [len(prompt.prompt) for prompt in train] == left
    refused(of_lines(tmp_path, rows, max_length=20, bad_rows=BadRows.drop), tokenizer_of())


def test_a_first_token_stays_first(shared: Path, tmp_path: Path) -> None:
    """Llama 3's template writes a begin-of-sequence token, which a cut leaves there."""
    rows = [{"prompt": "one two three " * 8}, {"prompt": "no"}]
    tokenizer = smollm(shared, "llama3")
    for length in (9, 12, 500):
        cut, _ = hold(of_lines(tmp_path, rows, max_length=length, too_long=TooLong.truncate), tokenizer)
        assert len(cut[0].prompt) == length - 8 or length == 500
        assert cut[0].prompt[0] == tokenizer.bos_token_id


BAD: tuple[Any, ...] = (
    {"prompt": ""}, {"prompt": None}, {"prompt": 3}, {"prompt": []}, {"prompt": [{"role": "user"}]}, {"question": None},
    {"prompt": "a", "answer": True}, {"prompt": "a", "answer": ""}, {"prompt": "a", "answer": [4]},
    {"prompt": "a", "answer": float("nan")}, {"prompt": "a", "answer": float("inf")}, {"prompt": "a", "system": 3},
    {"prompt": "a", "tools": "x"}, {"prompt": "a", "options": "3"}, {"messages": TALKS[0]}, ["prompt"], 3,
)  # fmt: skip


def test_bad_rows_are_refused_or_left_out(tmp_path: Path) -> None:
    good = {"prompt": "a", "answer": 3}
    train, _ = hold(of_lines(tmp_path, [good, *BAD, good], bad_rows=BadRows.drop), tokenizer_of())
    assert [prompt.origin.rpartition(":")[2] for prompt in train] == ["1", f"{len(BAD) + 2}"]
    for row in BAD:
        with pytest.raises(DataError):
            examples_of(of_lines(tmp_path, [good, row]), tokenizer_of())
    talk = {"messages": TALKS[0]}
    bad: tuple[Row, ...] = ({"messages": TALKS[0][:1]}, {"messages": TALKS[0][1:]}, {"messages": None}, {"prompt": "a"})
    train, _ = hold(of_lines(tmp_path, [talk, *bad, talk], bad_rows=BadRows.drop), tokenizer_of())
    assert len(train) == 2
    refused(of_lines(tmp_path, [{"text": "a plain text"}]), tokenizer_of())


class Asked(Rows):
    """Draws rows with a prompt, of one form."""

    def asked(self, form: str) -> Row:
        talk = self.talk("user", self.draw.choice((1, 2, 3, 4)))
        match form:
            case "messages":
                row: Row = {"messages": talk}
            case "pair":
                row = {"chosen": [*talk, *self.talk("assistant", 1)], "rejected": [*talk, *self.talk("assistant", 3)]}
            case _:
                dialogue = f"\n\nHuman: {self.text()}\n\nAssistant:{self.text()}"
                row = {"prompt": self.draw.choice((self.text(), talk, dialogue)), "answer": self.draw.choice(
                    (None, "", self.text(), 3, 0.1, -1e300, True, float("nan"), [], 1 << 60))}  # fmt: skip
        more = {"system": ("Be brief.", "", None, 3), "tools": TOOLS,
                "chat_template_kwargs": ({"enable_thinking": False}, '{"a": 1}', None, 4)}  # fmt: skip
        return row | {name: self.draw.choice(values) for name, values in more.items() if self.draw.random() < 0.15}


@pytest.mark.parametrize("template", ["smollm", "qwen3", "llama3", "phi3", None, "tiny", "stories260K"])
def test_rows_at_random(template: str | None, shared: Path, tmp_path: Path) -> None:
    """The same rows are left out, and the others have the same tokens."""
    match template:
        case "tiny":
            tokenizer = tokenizer_of()
        case "stories260K":  # it puts a begin-of-sequence token before a text
            tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
        case _:
            tokenizer = smollm(shared, template)
    for seed, form in enumerate(("prompt", "messages", "pair")):
        rows = Asked(seed)
        firsts: dict[str, Row] = {"prompt": {"prompt": "a"}, "messages": {"messages": TALKS[0]},
                                  "pair": {"chosen": TALKS[0], "rejected": TALKS[0]}}  # fmt: skip
        drawn = [firsts[form], *(rows.asked(form) for _ in range(60))]
        cfg = of_lines(tmp_path, drawn, bad_rows=BadRows.drop, too_long=TooLong.truncate, eval_size=4,
                       max_length=rows.draw.choice((40, 70, 4096)))  # fmt: skip
        assert len(hold(cfg, tokenizer)[0]) > 10


# ---- sources, and rows that are held out ----


def test_sources_with_weights(tmp_path: Path) -> None:
    """A mixture of three kinds of rows, of which one source has a system prompt and held-out rows of its own."""
    sources: dict[str, dict[str, Any]] = {
        "prompts": {"weight": 3.0},
        "conversations": {"weight": 1.0, "system": "Speak."},
        "pairs": {"weight": 0.5},
    }
    for shape, keys in sources.items():
        of_lines(tmp_path, SHAPES[shape], shape)
        keys["path"] = f"{tmp_path}/{shape}.jsonl"
    train, both = hold(configured(path=None, sources=sources, eval_size=5), tokenizer_of())
    assert (sum(both.sizes), len(both.held_out)) == (19, 5)
    sources["pairs"]["eval_path"] = sources["prompts"]["path"]
    train, both = hold(configured(path=None, sources=sources), tokenizer_of())
    assert (both.sizes, len(both.held_out)) == ((8, 8, 8), 8)
    assert sum(prompt.text.startswith("System: Speak.\n\n") for prompt in train) == 8


def test_rows_that_are_held_out(tmp_path: Path) -> None:
    of_lines(tmp_path, SHAPES["questions"], name="held")
    for shape in ("prompts", "whole conversations"):
        cfg = of_lines(tmp_path, SHAPES[shape], eval_path=f"{tmp_path}/held.jsonl")
        _, both = hold(cfg, tokenizer_of())
        assert [right for _, _, right, _ in meant(both.held_out)] == list(SAID)
    import datasets

    datasets.disable_progress_bars()
    parts = {"train": SHAPES["questions"], "test": SHAPES["questions"][:3]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
        tmp_path / "saved"
    )
    _, both = hold(configured(path=f"{tmp_path}/saved", eval_split="test"), tokenizer_of())
    assert (len(both.train), len(both.held_out)) == (8, 3)


# ---- generated rows ----


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "template"])
@pytest.mark.parametrize("kind", ["arithmetic", "synthetic"])
def test_generated_rows(kind: str, template: str | None) -> None:
    """As they are, made long and cut, and where those that are too long are left out."""
    long: dict[str, Any] = {"digits": 30} if kind == "arithmetic" else {"fill": True}
    options: tuple[dict[str, Any], ...] = (
        {"seed": 4},
        {"eval_size": 0, "max_length": 70, "too_long": TooLong.truncate, **long},
        {"max_length": 88, "too_long": TooLong.drop},
    )
    for more in options:
        train, both = hold(configured(kind, **{"size": 20, "eval_size": 5, **more}), tokenizer_of(template))
        assert both.sizes == (len(train),)
        right = [str(eval(prompt.text.removesuffix("="))) if kind == "arithmetic" else None for prompt in train]
        assert [prompt.expected for prompt in train] == right
