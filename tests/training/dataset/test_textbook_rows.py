"""Pairs read twice, by the product and by the second reader: the same tokens and masks, of the same samples."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlexp.config.load import compose_config
from rlexp.config.schema import Config
from rlexp.config.schema.row_kinds import Kind
from rlexp.training.dataset.sampler import Mixture
from rlexp.training.model.loading import byte_tokenizer
from rlexp.training.train.examples import sampler_of
from rlexp.verify import rules as order
from tests.helpers.conversations import SHAPES, Messages, Row, as_question, hh, of_several_turns
from tests.helpers.faults.base import MIXED
from tests.helpers.rows import FILES, FOLDERS, assistant, cache, read_twice, user
from tests.oracles.examples import SIDES

__all__ = ["cache"]  # a fixture of every test here too


def configured(*overrides: str) -> Config:
    return compose_config(["launch.device=cpu", "logger=none", "data=hf", "data.max_length=8192", "train.batch_size=2",
                           *overrides])  # fmt: skip


# ---- conversations ----


@pytest.mark.parametrize("write", [*FILES, *FOLDERS])
def test_real_pairs_in_every_format(write: Callable[[Path, Sequence[Row]], str], shared: Path, tmp_path: Path) -> None:
    """Also with margins, and with marks that end a line elsewhere."""
    odd = [{"prompt": [user("a\u2028b\x85")], "chosen": "c\x1cd", "rejected": "e\r"}] * 2
    margins = (0.5, None, -2.0, 1e300) * 10
    rows = [of_several_turns(row) | {"margin": each}
            for row, each in zip([*odd, *hh(shared, 38)], margins, strict=True)]  # fmt: skip
    path = write(tmp_path, rows)
    cfg = configured(f"data.path='{path}'", "data.eval_size=7", "data.max_length=700", "data.too_long=truncate")
    pairs, _ = read_twice(cfg, AutoTokenizer.from_pretrained(shared / "models" / "stories260K"))
    assert 25 < len(pairs) <= 40 - 7
    assert any(pair.masks[0] is not None and not pair.masks[0].all() for pair in pairs)


# ---- templates ----

MARKS = {  # special tokens that templates write
    "qwen3": ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>", "<|system|>"),
}
BEGINNINGS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}


@functools.cache
def smollm(shared: Path, template: str | None = "smollm") -> Any:
    """Return SmolLM's tokenizer with one of TRL's templates, with its own, or with none."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "smollm2-tokenizer")
    if template is None:
        tokenizer.chat_template = None
    elif template != "smollm":
        trl = importlib.util.find_spec("trl")
        assert trl is not None
        assert trl.origin is not None
        file = Path(trl.origin).parent / "chat_templates" / f"{template}.jinja"
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        marks = [mark for mark in MARKS.get(template, ()) if mark not in tokenizer.get_vocab()]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        tokenizer.bos_token = BEGINNINGS.get(template, tokenizer.bos_token)
    return tokenizer


@pytest.mark.parametrize("template", ["smollm", "qwen3", "llama3", "gemma", None])
def test_real_pairs_by_templates(template: str | None, shared: Path, tmp_path: Path) -> None:
    """Two hundred pairs, each in one of the shapes."""
    shapes = [shape for shape in SHAPES if (template, shape) != ("gemma", as_question)]  # it takes no system prompt
    rows = [shapes[place % len(shapes)](row) for place, row in enumerate(hh(shared))]
    sources = []
    for shape in range(len(shapes)):
        (tmp_path / f"{shape}.jsonl").write_text("\n".join(map(json.dumps, rows[shape :: len(shapes)])))
        sources.append(f"data.sources.s{shape}.path={tmp_path}/{shape}.jsonl")
    pairs = read_twice(configured(*sources), smollm(shared, template))[0]
    assert len(pairs) == 200
    assert sum(pair.masks[0] is not None for pair in pairs) > 5


# ---- rows at random ----

BITS = ("Hi", "there ", " \n", "\n\n", "é", "漢字", "🙂", "<think>a</think>b", "<|im_end|>", "Human: x", "x" * 9, "1 2",
        "\t", " ", "ok.", "\n\nHuman: q", "<eos>", "\n\nAssistant: z", "</think>", "\u200d")  # fmt: skip


TOOLS: tuple[Any, ...] = ([{"type": "function", "function": {"name": "f"}}], [{"name": "Hi"}], "[]", None, "x",
                          [{"type": "web_search"}], [{"type": "function", "function": None}])  # fmt: skip
CALLS: tuple[Any, ...] = ([{"function": {"name": "f", "arguments": {"a": 1}}}], [{"name": "Hi", "arguments": {}}], [],
                          '[{"function": {"name": "f", "arguments": {}}}]', "f", True, ["f"], None)  # fmt: skip

MARGINS: tuple[Any, ...] = (*(n / 10 for n in range(30)), 3, -1, 0, 1e308, -1e308, None, "1", True, float("nan"),
                            10**400)  # fmt: skip


class Rows:
    """Draws rows that a run must take, leave out or cut."""

    def __init__(self, seed: int) -> None:
        self.draw, self.margins = random.Random(seed), random.Random(f"margins-{seed}")

    def text(self) -> str:
        return "".join(self.draw.choices(BITS, k=self.draw.choice((0, 1, 1, 2, 3, 4))))

    def talk(self, first: str, length: int) -> Messages:
        roles = ("user", "assistant") if first == "user" else ("assistant", "user")
        talk = [{"role": roles[place % 2], "content": self.text()} for place in range(length)]
        for message in talk:
            if self.draw.random() < 0.1:
                message |= self.draw.choice(({"name": None}, {"reasoning_content": self.text()},
                                             {"content": [{"type": "text", "text": self.text()}]},
                                             {"tool_calls": self.draw.choice(CALLS)}))  # fmt: skip
        if self.draw.random() < 0.1:
            talk.insert(self.draw.randrange(length + 1), {"role": self.draw.choice(("system", "user", "assistant")),
                                                          "content": self.text()})  # fmt: skip
        return talk

    def row(self) -> Row:
        turns, other = self.draw.choice((1, 3, 5)), self.draw.choice((1, 3))
        match self.draw.randrange(4):
            case 0:
                row: Row = {"prompt": self.text(), "chosen": self.text(), "rejected": self.text()}
            case 1:
                row = {"prompt": self.talk("user", other), "chosen": self.talk("assistant", turns),
                       "rejected": self.talk("assistant", other)}  # fmt: skip
            case 2:
                before = self.talk("user", other)
                row = {"chosen": before + self.talk("assistant", turns), "rejected": before + self.talk("assistant", 1)}
            case _:
                before = f"\n\nHuman: {self.text()}"
                row = {side: f"{before}\n\nAssistant: {self.text()}" for side in SIDES}
        if self.draw.random() < 0.2:
            row["system"] = self.draw.choice(("Be brief.", "", None, 3))
        if self.draw.random() < 0.1:
            row["tools"] = self.draw.choice(TOOLS)
        if self.draw.random() < 0.1:
            row["chat_template_kwargs"] = self.draw.choice(({"enable_thinking": False}, '{"a": 1}', None, 4))
        if self.draw.random() < 0.1:
            row[self.draw.choice(("prompt", *SIDES))] = self.draw.choice((None, 3, [], "", [{"role": "user"}]))
        for name, share in (("margin", 0.3), ("score_chosen", 0.5), ("score_rejected", 0.5)):
            if self.margins.random() < share:
                row[name] = self.margins.choice(MARGINS)
        return row


@pytest.mark.parametrize("template", ["smollm", "qwen3", "llama3", "phi3", "glm4moe", None, "tiny", "stories260K"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_rows_at_random(template: str | None, seed: int, shared: Path, tmp_path: Path) -> None:
    """The same rows are left out, and the others have the same tokens and masks."""
    match template:
        case "tiny":
            tokenizer = byte_tokenizer()
        case "stories260K":
            tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
        case _:
            tokenizer = smollm(shared, template)
    rows = Rows(seed)
    first = {"prompt": "a", "chosen": "b", "rejected": "c", "system": None, "tools": None}
    drawn = [first, *(rows.row() for _ in range(150))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, drawn)), encoding="utf-8")
    how = ("data.bad_rows=drop", "data.too_long=truncate", f"data.max_length={rows.draw.choice((40, 70, 4096))}",
           f"data.template={rows.draw.choice(('auto', 'auto', 'never'))}", "data.eval_size=9")  # fmt: skip
    assert len(read_twice(configured(f"data.path={tmp_path}/rows.jsonl", *how), tokenizer)[0]) > 30


# ---- what the two writings once disagreed on ----

TURNS = {"prompt": "Hi", "chosen": [assistant("yes"), user("more"), assistant("Fine then")],
         "rejected": [assistant("no"), user("why?"), assistant("I say so")]}  # fmt: skip


def test_rows_that_differ_are_not_read_as_their_json(shared: Path, tmp_path: Path) -> None:
    """`datasets` writes a column as JSON if its values differ: a prompt as text here and as messages there."""
    tools = [[{"name": "f", "args": {"x": 1}}], [{"name": "g", "args": {"y": "2"}}]]
    rows = [{**TURNS, "tools": tools[0]}, {**TURNS, "prompt": [user("Hi")], "tools": tools[1]}]
    import datasets

    folder, tokenizer = tmp_path / "set", smollm(shared, "qwen3")
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.load_dataset(str(folder), split="train").to_parquet(str(tmp_path / "rows.parquet"))
    for place in (folder, tmp_path / "rows.parquet"):
        text, messages = read_twice(configured(f"data.path={place}"), tokenizer)[0]
        asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        for pair, name in ((text, "f"), (messages, "g")):
            prompt = tokenizer.decode(pair.prompt)
            assert prompt.endswith(asked)
            assert f'"name": "{name}"' in prompt


# ---- mixtures ----


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 12))])
def test_mixtures_at_random(seed: int) -> None:
    """Sizes, weights, epochs and batches at random: every step takes the same samples."""
    draw = random.Random(seed)
    sizes = [draw.randint(5, 40) for _ in range(draw.randint(1, 4))]
    weights = [draw.choice((0.1, 0.3, 1.0, 2.5, 7.0)) for _ in sizes]
    sources = [f"data.sources.s{n}={{path: org/name, weight: {weight}}}" for n, weight in enumerate(weights)]
    flags = (f"data.shuffle={draw.random() < 0.7}".lower(), f"data.drop_last={draw.random() < 0.5}".lower())
    cfg = configured(*sources, *flags, f"seed={seed}", "train.batch_size=1", "train.epochs=3")
    sampler = sampler_of(cfg, Kind.pairs, sum(sizes), Mixture(tuple(sizes), tuple(weights)))
    assert sampler.steps_per_epoch == order.steps_per_epoch(cfg, sizes)
    for step in range(1, 3 * order.steps_per_epoch(cfg, sizes) + 1):
        assert sampler.batch(step).indices == order.samples_of(cfg, sizes, step), step


@pytest.mark.parametrize("template", ["bytes", "qwen3", None])
def test_a_mixture_is_read_and_ordered_as_it_is_meant(template: str | None, shared: Path) -> None:
    """Two sources with weights: messages and dialogues of several turns, a system prompt and held-out rows."""
    tokenizer = byte_tokenizer() if template == "bytes" else smollm(shared, template)
    cfg = compose_config([*MIXED])
    train, meant = read_twice(cfg, tokenizer)
    mixture = Mixture(meant.sizes, tuple(map(float, order.weights_of(cfg))))
    sampler = sampler_of(cfg, Kind.pairs, len(train), mixture)
    for step in (1, 2):
        assert sampler.batch(step).indices == order.samples_of(cfg, meant.sizes, step)
