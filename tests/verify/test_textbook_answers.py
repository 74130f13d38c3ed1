"""Rows of single answers, read twice: by the product, and by the reference of `verify` from the documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rlexp.verify.reference.pairs import examples_of

from rlexp.config.load import compose_config
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import read_examples
from rlexp.training.types import Example
from rlexp.training.world.groups import ALONE, World
from tests.helpers.rows import assistant, cache
from tests.verify.test_textbook_prompts import CHATML, SAID, TALKS, tokenizer_of

__all__ = ["cache"]  # a fixture of every test here too

# Each shape, with the loss that is trained on it.
SHAPES: dict[str, tuple[str, list[dict[str, Any]]]] = {
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


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "template"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_read_the_same(shape: str, template: str | None, tmp_path: Path) -> None:
    """With a system prompt, rows that are held out, and sequences that are cut."""
    loss, rows = SHAPES[shape]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = tokenizer_of(template)
    for more in ((), ("data.system=Be brief.", "data.eval_size=3"), ("data.max_length=24", "data.too_long=truncate")):
        cfg = compose_config(["launch.device=cpu", "data=jsonl", f"data.path={tmp_path}/rows.jsonl",
                              "train.batch_size=2", *f"loss={loss}".split(), *more])  # fmt: skip
        ours = read_examples(cfg, tokenizer, World(0, 1, ALONE))
        meant = examples_of(cfg, tokenizer)
        assert plain(ours.train) == [parts(each) for each in meant.train]
        assert plain(ours.held_out) == [parts(each) for each in meant.held_out]
        assert len(ours.train) + len(ours.held_out) == len(rows) * (2 if "unpair" in loss else 1)


def parts(example: Any) -> tuple[list[int], list[int], list[bool], bool | None]:
    return example.prompt.tolist(), example.ids("answer").tolist(), example.trained("answer").tolist(), example.label


def plain(examples: Sequence[Example]) -> list[tuple[list[int], list[int], list[bool], bool | None]]:
    return [
        (each.prompt.tolist(), answer.tolist(), [True] * len(answer) if mask is None else mask.tolist(), each.label)
        for each in examples for answer, mask in each.masked
    ]  # fmt: skip


def test_all_of_a_text_is_trained_on_but_its_first_token(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n', encoding="utf-8")
    cfg = compose_config(["launch.device=cpu", "data=jsonl", f"data.path={tmp_path}/rows.jsonl", "train.batch_size=1",
                          "loss=sft"])  # fmt: skip
    tokenizer = byte_tokenizer()
    (text,) = read_examples(cfg, tokenizer, World(0, 1, ALONE)).train
    assert tokenizer.decode([*text.prompt, *text.answers[0]]) == "abc<eos>"
    assert (len(text.prompt), text.masked[0][1]) == (1, None)
