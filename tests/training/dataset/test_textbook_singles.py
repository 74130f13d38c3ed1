"""Prompts to which a policy draws its answers, and rows of single answers, read twice: by the product, and by the
second reader."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlexp.base.errors import DataError
from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.data import BadRows, TemplateUse, TooLong
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.world.groups import ALONE, World
from tests.helpers.conversations import SHAPES as PAIRS
from tests.helpers.conversations import Row, hh
from tests.helpers.rows import assistant, cache, read_twice, user, write_lines
from tests.oracles.pairs import examples_of
from tests.training.dataset.test_textbook_rows import TOOLS, Rows, smollm

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


# Each shape of rows with answers, with the loss that is trained on it.
ANSWERS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "conversations": ("sft", [{"messages": talk if at % 2 else talk[:2]} for at, talk in enumerate(TALKS)]),
    "from and value": ("sft", [{"conversations": [{"from": "human" if m["role"] == "user" else "gpt",
                                                   "value": m["content"]} for m in talk]} for talk in TALKS]),
    "prompt and completion": ("sft", [{"prompt": f"Say {word}", "completion": f" {word}"} for word in SAID]),
    "instruction, input and output": ("sft", [{"instruction": f"Say {word}", "input": "loudly" if at % 2 else "",
                                               "output": word} for at, word in enumerate(SAID)]),
    "messages for both": ("sft", [{"prompt": talk[:1], "completion": talk[1:]} for talk in TALKS]),
    "a dialogue": ("sft", [{"prompt": f"\n\nHuman: {word}?\n\nAssistant:", "completion": f" {word}"} for word in SAID]),
    "texts": ("sft", [{"text": f"{word} and {word}"} for word in SAID]),
    "a text of one token": ("sft", [{"text": "x"}, *({"text": word} for word in SAID)]),
    "chosen answers": ("sft", [{"prompt": f"{word}?", "chosen": word, "rejected": "no" if at else word}
                               for at, word in enumerate(SAID)]),
    "whole conversations": ("sft", [{"chosen": talk, "rejected": [*talk[:-1], assistant("no")]} for talk in TALKS]),
    "labelled": ("kto", [{"prompt": f"{word}?", "completion": f" {word}", "label": at % 3 > 0}
                         for at, word in enumerate(SAID)]),
    "labelled, with another column": ("kto", [{"prompt": f"{word}?", "input": "x", "output": word, "label": at % 2 == 0}
                                              for at, word in enumerate(SAID)]),
    "good answers, with another column": ("sft", [{"prompt": f"{word}?", "input": "x", "output": word, "label": True}
                                                  for word in SAID]),
    "labelled messages": ("bco", [{"prompt": talk[:1], "completion": talk[1:], "label": at % 2 == 0}
                                  for at, talk in enumerate(TALKS)]),
    "unpaired": ("kto data.unpair=true", [{"prompt": f"{word}?", "chosen": word, "rejected": "no"} for word in SAID]),
}  # fmt: skip


@functools.cache
def composed(data: str, loss: str) -> Config:
    drawn = ["reward.text=a", "rollout.max_new_tokens=8"] * (loss == "grpo")
    return compose_config(["launch.device=cpu", "logger=none", "train.batch_size=2", *f"loss={loss}".split(), *drawn,
                           f"data={data}", *["data.path=org/name"] * (data == "hf")])  # fmt: skip


def configured(kind: str = "hf", loss: str = "grpo", **data: Any) -> Config:
    """Return a configuration with some values of data."""
    cfg = composed(kind, loss)
    return replace(cfg, data=replace(cfg.data, **data))


def of_lines(folder: Path, rows: Sequence[Any], name: str = "rows", **how: Any) -> Config:
    """Write rows as lines of JSON, and return a configuration that reads them."""
    return configured(path=write_lines(folder, rows, name), **how)


@functools.cache
def tokenizer_of(template: str | None = None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def refused(cfg: Config, tokenizer: Any) -> None:
    """Require that both refuse the rows."""
    with pytest.raises(DataError):
        read_examples(cfg, tokenizer, World(0, 1, ALONE))
    with pytest.raises(DataError):
        examples_of(cfg, tokenizer)


# ---- forms of rows ----


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "template"])
@pytest.mark.parametrize("shape", [*SHAPES, *(f"answers: {shape}" for shape in ANSWERS)])
def test_both_read_the_same(shape: str, template: str | None, tmp_path: Path) -> None:
    """With a system prompt, with rows that are held out, and with sequences that are cut."""
    loss, rows = ANSWERS[shape.removeprefix("answers: ")] if ": " in shape else ("grpo", SHAPES[shape])
    options: tuple[dict[str, Any], ...] = (
        {},
        {"system": "Be brief.", "eval_size": 3},
        {"max_length": 20, "too_long": TooLong.truncate},
    )
    for more in options:
        train, both = read_twice(of_lines(tmp_path, rows, loss=loss, **more), tokenizer_of(template))
        assert len(train) + len(both.held_out) == len(rows) * (2 if "unpair" in loss else 1)


def test_all_of_a_text_is_trained_on_but_its_first_token(tmp_path: Path) -> None:
    (text,), _ = read_twice(of_lines(tmp_path, [{"text": "abc"}], loss="sft"), tokenizer_of())
    assert tokenizer_of().decode([*text.prompt, *text.answers[0]]) == "abc<eos>"
    assert (len(text.prompt), text.masked[0][1]) == (1, None)


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
        assert tokenizer.decode(prompt.prompt) == written
        assert (prompt.text, prompt.right) == (asked[name, None], "4" if name == "plain" else None)


def test_the_input_of_an_instruction_is_asked_too(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Say.", "input": "", "output": ""}]
    train, _ = read_twice(of_lines(tmp_path, rows), tokenizer_of())
    assert [prompt.text for prompt in train] == ["Add.\n\n1, 2", "Say."]
    for without in ({"output": "3", "label": True}, {"answer": 3}):
        train, _ = read_twice(of_lines(tmp_path, [{"prompt": "Add.", "input": "1, 2", **without}]), tokenizer_of())
        assert train[0].text == "Add."


def test_an_answer_has_all_its_digits(tmp_path: Path) -> None:
    cfg = of_lines(tmp_path, [{"prompt": "2 ** 100 =", "answer": 2**100}])
    assert examples_of(cfg, tokenizer_of()).train[0].right == "1267650600228229401496703205376"
    train, _ = read_twice(of_lines(tmp_path, [{"prompt": "2 =", "answer": 2}, {"prompt": "=", "answer": 10**400}]),
                    tokenizer_of())  # fmt: skip
    assert [prompt.expected for prompt in train] == ["2", f"{10**400}"]


@pytest.mark.parametrize("columns", [{"prompt": "q", "answer": "a"}, {"chosen": "one", "rejected": "other"},
                                     {"messages": "talk"}])  # fmt: skip
def test_declared_columns(columns: dict[str, str], tmp_path: Path) -> None:
    """They say which of the columns of a row make its prompt."""
    rows = [{"q": word, "a": at, "prompt": f"{word}?", "talk": talk, "one": talk, "other": [*talk[:3], assistant("no")]}
            for at, (word, talk) in enumerate(zip(SAID, TALKS, strict=True))]  # fmt: skip
    train, _ = read_twice(of_lines(tmp_path, rows, columns=columns), tokenizer_of())
    conversation = "User: tea?\n\nAssistant:  tea. \n\nUser: More.\n\nAssistant: "
    assert (train[0].text, train[0].expected) == (("tea", "0") if "prompt" in columns else (conversation, None))


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
    train, _ = read_twice(of_lines(tmp_path, rows, template_options={"thinks": True}), tokenizer)
    written = [tokenizer.decode(prompt.prompt) for prompt in train]
    assert ["look_up" in text for text in written] == [True, False, True, True]
    assert [text.endswith("<think>") for text in written] == [True, False, False, True]


def test_no_template_although_there_is_one(tmp_path: Path) -> None:
    train, _ = read_twice(of_lines(tmp_path, SHAPES["messages"], template=TemplateUse.never), tokenizer_of(CHATML))
    assert tokenizer_of(CHATML).decode(train[0].prompt) == "User: tea?\n\nAssistant: "


@pytest.mark.parametrize("template", ["smollm", "qwen3", "llama3", None])
def test_real_conversations_by_templates(template: str | None, shared: Path, tmp_path: Path) -> None:
    shapes = [*PAIRS, lambda row: {"messages": [*row["prompt"], assistant(row["chosen"])]}]
    rows = [shapes[place % len(shapes)](row) for place, row in enumerate(hh(shared, 35))]
    sources = {}
    for shape in range(len(shapes)):
        of_lines(tmp_path, rows[shape :: len(shapes)], f"{shape}")
        sources[f"s{shape}"] = {"path": f"{tmp_path}/{shape}.jsonl"}
    train, _ = read_twice(configured(path=None, sources=sources), smollm(shared, template))
    assert len(train) == 35


# ---- rows that cannot be used ----


BAD: tuple[Any, ...] = (
    {"prompt": ""}, {"prompt": None}, {"prompt": 3}, {"prompt": []}, {"prompt": [{"role": "user"}]}, {"question": None},
    {"prompt": "a", "answer": True}, {"prompt": "a", "answer": ""}, {"prompt": "a", "answer": [4]},
    {"prompt": "a", "answer": float("nan")}, {"prompt": "a", "answer": float("inf")}, {"prompt": "a", "system": 3},
    {"prompt": "a", "tools": "x"}, {"prompt": "a", "options": "3"}, {"messages": TALKS[0]}, ["prompt"], 3,
)  # fmt: skip


def test_bad_rows_are_refused_or_left_out(tmp_path: Path) -> None:
    good = {"prompt": "a", "answer": 3}
    train, _ = read_twice(of_lines(tmp_path, [good, *BAD, good], bad_rows=BadRows.drop), tokenizer_of())
    assert [prompt.origin.rpartition(":")[2] for prompt in train] == ["1", f"{len(BAD) + 2}"]
    for row in BAD:
        with pytest.raises(DataError):
            examples_of(of_lines(tmp_path, [good, row]), tokenizer_of())
    talk = {"messages": TALKS[0]}
    bad: tuple[Row, ...] = ({"messages": TALKS[0][:1]}, {"messages": TALKS[0][1:]}, {"messages": None}, {"prompt": "a"})
    train, _ = read_twice(of_lines(tmp_path, [talk, *bad, talk], bad_rows=BadRows.drop), tokenizer_of())
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
        assert len(read_twice(cfg, tokenizer)[0]) > 10


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
    train, both = read_twice(configured(path=None, sources=sources, eval_size=5), tokenizer_of())
    assert (sum(both.sizes), len(both.held_out)) == (19, 5)
    sources["pairs"]["eval_path"] = sources["prompts"]["path"]
    train, both = read_twice(configured(path=None, sources=sources), tokenizer_of())
    assert (both.sizes, len(both.held_out)) == ((8, 8, 8), 8)
    assert sum(prompt.text.startswith("System: Speak.\n\n") for prompt in train) == 8


def test_rows_that_are_held_out(tmp_path: Path) -> None:
    of_lines(tmp_path, SHAPES["questions"], name="held")
    for shape in ("prompts", "whole conversations"):
        cfg = of_lines(tmp_path, SHAPES[shape], eval_path=f"{tmp_path}/held.jsonl")
        _, both = read_twice(cfg, tokenizer_of())
        assert [prompt.right for prompt in both.held_out] == list(SAID)
    import datasets

    datasets.disable_progress_bars()
    parts = {"train": SHAPES["questions"], "test": SHAPES["questions"][:3]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
        tmp_path / "saved"
    )
    _, both = read_twice(configured(path=f"{tmp_path}/saved", eval_split="test"), tokenizer_of())
    assert (len(both.train), len(both.held_out)) == (8, 3)


# ---- generated rows ----


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "template"])
@pytest.mark.parametrize(("kind", "loss"), [("arithmetic", "grpo"), *(("synthetic", loss) for loss in
                                                                      ("grpo", "dpo", "sft", "kto"))])  # fmt: skip
def test_generated_rows(kind: str, loss: str, template: str | None) -> None:
    """As they are, made long and cut, and where those that are too long are left out."""
    long: dict[str, Any] = {"digits": 30} if kind == "arithmetic" else {"fill": True}
    options: tuple[dict[str, Any], ...] = (
        {"seed": 4},
        {"eval_size": 0, "max_length": 70, "too_long": TooLong.truncate, **long},
        {"max_length": 88, "too_long": TooLong.drop},
    )
    for more in options[: None if loss == "grpo" else 2]:
        train, both = read_twice(configured(kind, loss, **{"size": 20, "eval_size": 5, **more}), tokenizer_of(template))
        assert both.sizes == (len(train),)
        right = [str(eval(prompt.text.removesuffix("="))) if kind == "arithmetic" else None for prompt in train]
        assert [prompt.expected for prompt in train] == right
