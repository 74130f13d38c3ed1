"""Token ids and masks of conversations, beside TRL's own, for the templates and tokenizers of five families."""

from __future__ import annotations

import functools
import gzip
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlexp.base.errors import DataError
from rlexp.training.dataset.chat import TODAY, Chat
from rlexp.training.dataset.seam import Seam, Text
from rlexp.training.dataset.tokens import APART, Refused, RowTokenizer
from rlexp.training.types import Example, Row
from tests.helpers.paths import ROOT
from tests.helpers.rows import assistant, user

trl = pytest.importorskip("trl", reason="needs trl: pip install -e .[dev]")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
GPT = (  # how Llama 3 and Qwen cut words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
MISTRAL = (  # v0.3, for users and assistants that take turns
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "'[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (  # SmolLM2's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family's special tokens, template, and how its tokenizer cuts and joins words."""

    bos: str
    eos: str
    others: tuple[str, ...]
    template: str  # a file of TRL's, or the template itself
    cut: str  # gpt: byte-level by a regular expression; space: SentencePiece, whose words begin with a space
    with_markers: str | None = None  # TRL's own template for training on the assistant's turns alone


FAMILIES = {
    "llama3": Family("<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), "llama3", "gpt",
                     "llama3_training"),
    "qwen3": Family("<|endoftext|>", "<|im_end|>", ("<|im_start|>",), "qwen3", "gpt", "qwen3_training"),
    "qwen2_5": Family("<|endoftext|>", "<|im_end|>", ("<|im_start|>",), "qwen2_5", "gpt", "qwen2_5_training"),
    "mistral": Family("<s>", "</s>", ("[INST]", "[/INST]"), MISTRAL, "space"),
    "smollm": Family("<|im_start|>", "<|im_end|>", ("<|endoftext|>",), CHATML, "gpt"),
    "gemma": Family("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), "gemma", "spaces", "gemma_training"),
}  # fmt: skip


@functools.cache
def texts() -> tuple[str, ...]:
    """Texts to learn a tokenizer from, which do not change with the pages of docs/."""
    with gzip.open(ROOT / "conf" / "experiment" / "hh_helpful.jsonl.gz", "rt", encoding="utf-8") as pairs:
        return ((ROOT / "LICENSE").read_text(encoding="utf-8"), pairs.read())


def template(name: str) -> str:
    file = TEMPLATES / f"{name}.jinja"
    return file.read_text(encoding="utf-8") if "{" not in name else name


@functools.cache
def trained(family: str) -> Tokenizer:
    """Train a small tokenizer that cuts text as the family's does."""
    kind = FAMILIES[family]
    special = [AddedToken(each, special=True, normalized=False) for each in (kind.bos, kind.eos, *kind.others)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind.cut != "gpt", unk_token=None if kind.cut == "gpt" else "<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind.cut == "gpt":
        split = pre_tokenizers.Split(Regex(GPT), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        scheme = "first" if kind.cut == "space" else "never"  # whether a space is put before every text
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # no word has a space inside
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    first = [] if kind.cut == "gpt" else ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[*first, *special], initial_alphabet=alphabet, show_progress=False,
        max_token_length=12,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts(), trainer)
    if kind.cut != "gpt":  # as converted SentencePiece models have it
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if kind.cut == "space":
        bos = tokenizer.token_to_id(kind.bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{kind.bos} $A", special_tokens=[(kind.bos, bos)]
        )
    return tokenizer


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    kind = FAMILIES[family]
    made = PreTrainedTokenizerFast(
        tokenizer_object=trained(family), bos_token=kind.bos, eos_token=kind.eos, pad_token=kind.eos,
        additional_special_tokens=list(kind.others),
    )  # fmt: skip
    made.chat_template = template(kind.template)
    return made


PROMPTS = [
    [user("What is a ring?")],
    [user("Hi"), assistant("Hello. Which?"), user("This one: naïve 日本 🙂")],
    [user("A list:\n- one\n- two\n\n  end"), assistant("Done."), user("Again?"), assistant("No."), user("Why")],
]
ANSWERS = [
    ("A closed curve.", "Nothing"),
    ("x", "y y"),
    ("Ja, é. 🙂\n\nThen", "```python\nprint(1)\n```"),
    ("12345", "a b  c"),
]
CASES = [(prompt, *answers) for prompt in PROMPTS for answers in ANSWERS]


def trl_pairs(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """Let TRL's DPOTrainer tokenize pairs, by its own code."""
    from datasets import Dataset, disable_progress_bars
    from trl import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer, logger

    disable_progress_bars()
    logger.logger.setLevel(logging.ERROR)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode=DPOConfig.truncation_mode)
    made = DPOTrainer._prepare_dataset(
        SimpleNamespace(_tokenizer=tokenizer), Dataset.from_list(list(rows)), tokenizer, args, "rows"
    )
    return [{name: made[at][name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for at in range(len(made))]


def ours(tokenizer: Any, row: Row, *, use_template: bool = True) -> Example:
    (made,) = RowTokenizer(tokenizer, use_template=use_template).sequences([row])
    assert isinstance(made, Example), made
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_have_trl_s_tokens(family: str) -> None:
    """Every token of both sequences, and where training begins."""
    tokenizer = tokenizer_of(family)
    rows = [{"prompt": p, "chosen": [assistant(c)], "rejected": [assistant(r)]} for p, c, r in CASES]
    for row, theirs in zip(rows, trl_pairs(tokenizer, rows), strict=True):
        made = ours(tokenizer, Row(row["prompt"], (row["chosen"], row["rejected"]), "here"))
        assert made.prompt.tolist() == theirs["prompt_ids"]
        assert [answer.tolist() for answer in made.answers] == [theirs["chosen_ids"], theirs["rejected_ids"]]
        assert made.masks == (None, None)
        assert made.notes == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_of_plain_text_have_trl_s_tokens(family: str) -> None:
    """Text is text to TRL, even for a tokenizer with a template; ours says so by data.template=never."""
    tokenizer = tokenizer_of(family)
    rows = [{"prompt": "Once upon", "chosen": " a time.", "rejected": " a moon,"},
            {"prompt": "Q: why?\nA:", "chosen": " because é", "rejected": " no\n\nreason"}]  # fmt: skip
    for row, theirs in zip(rows, trl_pairs(tokenizer, rows), strict=True):
        made = ours(tokenizer, Row(row["prompt"], (row["chosen"], row["rejected"]), "here"), use_template=False)
        assert made.prompt.tolist() == theirs["prompt_ids"]
        assert [answer.tolist() for answer in made.answers] == [theirs["chosen_ids"], theirs["rejected_ids"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_would_span_the_edge_is_cut_there_and_said(family: str) -> None:
    """TRL ends the prompt before such a token, and trains on it: the model never sees that prompt when it is asked."""
    tokenizer = tokenizer_of(family)
    (theirs,) = trl_pairs(tokenizer, [{"prompt": "a rin", "chosen": "g is", "rejected": "se"}])
    made = ours(tokenizer, Row("a rin", ("g is", "se"), "here"), use_template=False)
    alone = [*RowTokenizer(tokenizer).seam.leading, *tokenizer("a rin", add_special_tokens=False)["input_ids"]]
    assert made.prompt.tolist() == alone
    assert tokenizer.decode(made.answers[0][:-1]) == "g is"
    assert made.notes == (APART,)
    assert len(theirs["prompt_ids"]) < len(alone)
    assert tokenizer.decode(np.concatenate((made.prompt, made.answers[0]))) == tokenizer.decode(
        [*theirs["prompt_ids"], *theirs["chosen_ids"]]
    )


def trl_conversation(
    tokenizer: Any, messages: Sequence[dict[str, Any]], marked: str, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Let TRL's SFTTrainer tokenize a conversation, with the marks of its own template for training."""
    from datasets import Dataset, disable_progress_bars
    from trl.trainer.sft_trainer import SFTTrainer

    disable_progress_bars()
    stub = SimpleNamespace(_tokenizer=tokenizer, chat_template=template(marked), completion_only_loss=False)
    args = SimpleNamespace(dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=True, max_length=None,
                           truncation_mode="keep_start", shuffle_dataset=False, eos_token=None)  # fmt: skip
    made = SFTTrainer._prepare_dataset(
        stub, Dataset.from_list([{"messages": list(messages), "tools": json.dumps(tools)}]), tokenizer, args,
        packing=False, formatting_func=None,
        dataset_name="rows",
    )  # fmt: skip
    return made[0]["input_ids"], [int(label != -100) for label in made[0]["labels"]]


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.with_markers])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_assistant_s_turns_are_those_that_trl_s_own_templates_mark(family: str, prompt: Any) -> None:
    """But for Qwen2.5, where TRL marks the newline after `assistant` too, which the template puts there by itself."""
    tokenizer = tokenizer_of(family)
    tokenizer.chat_template = template(str(FAMILIES[family].with_markers))
    talk = [*prompt, assistant("A closed curve."), user("And then?"), assistant("Nothing: naïve.")]
    theirs, labels = trl_conversation(tokenizer, talk, str(FAMILIES[family].with_markers))
    first = next(place for place, message in enumerate(talk) if message["role"] == "assistant")
    made = ours(tokenizer, Row(talk[:first], (talk[first:],), "here"))
    assert [*made.prompt.tolist(), *made.answers[0].tolist()] == theirs
    (mask,) = made.masks
    assert mask is not None
    both = np.array([*[0] * len(made.prompt), *mask.astype(int)])
    apart = np.flatnonzero(both != labels)
    turns = sum(message["role"] == "assistant" for message in talk)
    assert len(apart) == (turns if family == "qwen2_5" else 0)
    assert all(tokenizer.decode([theirs[place]]) == "\n" and not both[place] for place in apart)


def test_tools_and_thinking_are_written_by_a_template_that_takes_them() -> None:
    """A call and what was thought are the assistant's own words; the tool's answer is not."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk = [
        {"role": "system", "content": "Be exact."},
        user("1 + 2?"),
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "I call it."},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "Three."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for family in ("qwen3", "qwen2_5"):
        tokenizer = tokenizer_of(family)
        marked = str(FAMILIES[family].with_markers)
        theirs, labels = trl_conversation(tokenizer, talk, marked, tools)
        tokenizer.chat_template = template(marked)
        made = ours(tokenizer, Row(talk[:2], (talk[2:],), "here", tools=tools))
        both = [*made.prompt.tolist(), *made.answers[0].tolist()]
        assert both == theirs
        (mask,) = made.masks
        assert mask is not None
        trained = tokenizer.decode(made.answers[0][mask])
        assert '"name": "add"' in trained
        assert "tool_response" not in trained
        assert ("I call it." in trained) == (family == "qwen3")
        apart = np.flatnonzero(np.array([*[0] * len(made.prompt), *mask]) != labels)
        assert all(tokenizer.decode([both[place]]) == "\n" for place in apart)
        assert len(apart) == (2 if family == "qwen2_5" else 0)


def test_what_a_template_leaves_out_is_refused() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    silent = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    for row, said in (
        (
            Row([{"role": "system", "content": "Be brief."}, user("a")], ("b",), "x"),
            "leaves out the system prompt 'Be br",
        ),
        (Row("a", ([call, {"role": "tool", "content": "3"}, assistant("b")],), "x"), "leaves out the call of 'add'"),
        (Row("a", ("b",), "x", tools=[{"function": {"name": "add"}}]), "leaves out the tool 'add'"),
    ):
        tokenizer = tokenizer_of("qwen3")
        (kept,) = RowTokenizer(tokenizer).sequences([row])
        assert isinstance(kept, Example)
        tokenizer.chat_template = silent
        (refused,) = RowTokenizer(tokenizer).sequences([row])
        assert isinstance(refused, Refused)
        assert said in refused.text


CALLED: list[dict[str, Any]] = [
    {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
]
ADD = {"type": "function", "function": {"name": "add", "description": "It adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "1"},
                                     "b": {"type": "integer", "description": "2"}}, "required": ["a"]}}}  # fmt: skip
CALLING = [
    {"role": "assistant", "content": "", "tool_calls": CALLED},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"},
    assistant("It is 3."),
]


@pytest.mark.parametrize(("name", "left_out"), [
    *((name, None) for name in ("llama3_1", "llama3_2", "qwen2_5", "qwen3", "gemma4", "gptoss", "glm4moe")),
    ("lfm2", "call of"), ("llama3", "tool"), ("phi3", "tool"), ("gemma3", "tool"), (CHATML, "tool"),
])  # fmt: skip
def test_a_name_that_stands_in_the_text_by_chance_is_no_tool(name: str, left_out: str | None) -> None:
    """The question has the tool's name, and a template that writes tools, but no calls, writes it too."""
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = template(name)
    row = Row([user("Please add 1 and 2.")], (CALLING,), "x", tools=[ADD])
    if left_out is None:
        (text,) = Chat(tokenizer).texts(row)
        assert "add" in text.parts[0][0]
        return
    with pytest.raises(DataError, match=f"leaves out the {left_out} 'add'"):
        Chat(tokenizer).texts(row)


def test_a_switch_that_a_template_takes_out_of_the_system_prompt_is_not_left_out() -> None:
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content.replace('/no_think', '').rstrip() }}{% endfor %}"
    )
    talk = [{"role": "system", "content": "Be brief. /no_think"}, user("a")]
    assert Chat(tokenizer).texts(Row(talk, ("b",), "x"))[0].prompt == "[system]Be brief.[user]a"


def test_of_several_templates_none_may_be_for_a_row() -> None:
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = {"tool_use": CHATML, "other": CHATML}
    with pytest.raises(DataError, match="the tokenizer has no chat template for it"):
        Chat(tokenizer).texts(Row("a", ("b",), "x"))


def test_the_day_is_written_in_every_way_as_python_writes_it() -> None:
    asked = " ".join(TODAY)
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = f"{{% set f = '{asked}' %}}{{{{ strftime_now(f) }}}}"
    assert Chat(tokenizer).texts(Row("a", (), "x"))[0].prompt == datetime(2024, 7, 26).strftime(asked)


@pytest.mark.parametrize("before", ["", "\n", "  \n ", "  {% if true %}\n", "\n{%- if true -%} "])
def test_a_template_that_asks_for_the_day_gets_the_same_on_every_day(before: str) -> None:
    """And nothing else of it changes, as the first spaces of a template, which mean what stands before them."""
    template = before + "{{ DAY }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% endif %}" if "if true" in before else ""
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = template.replace("DAY", "'26 Jul 2024, 2024-07-26'")
    expected = ours(tokenizer, Row("a", ("b",), "x"))
    tokenizer.chat_template = template.replace("DAY", "strftime_now('%d %b %Y, %F')")
    made = ours(tokenizer, Row("a", ("b",), "x"))
    assert tokenizer.decode(made.prompt) == tokenizer.decode(expected.prompt)
    assert "26 Jul 2024, 2024-07-26[user]a" in tokenizer.decode(made.prompt)


@pytest.mark.parametrize(("answer", "ends"), [("b<|im_end|>", True), ("b<|im_end|>\n", True), ("<|im_end|>b", False),
                                              ("b", False)])  # fmt: skip
def test_an_answer_ends_with_a_special_token_or_gets_the_end_of_sequence(answer: str, ends: bool) -> None:
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    plain = tokenizer(answer, add_special_tokens=False)["input_ids"]
    made = ours(tokenizer, Row("a\n", (answer,), "x")).answers[0].tolist()
    assert made == (plain if ends else [*plain, tokenizer.eos_token_id])


def test_spaces_that_offsets_leave_out_belong_to_their_token() -> None:
    """As GPT-2's and RoBERTa's tokenizers leave them out."""
    tokenizer = tokenizer_of("smollm")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    (made,) = Seam(tokenizer).tokens([Text("Q:", ((" a", True), (" b ", False), ("c", True)))], leading=False)
    assert made.apart
    assert made.mask is not None
    assert tokenizer.decode(made.answer[made.mask]) == " ac"


# ---- the seam itself ----


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_on_is_the_text_that_was_meant(family: str) -> None:
    """Whatever the parts are, the tokens spell the whole text, and those with a mark spell the trained parts."""
    tokenizer = tokenizer_of(family)
    seam = Seam(tokenizer)
    pieces = ["a", " b", "\n", "ring ", " the", "é", "日", "\n\n", "x  ", "the ring"]
    random_ = np.random.default_rng(0)
    for _ in range(200):
        chosen = [pieces[at] for at in random_.integers(len(pieces), size=4)]
        text = Text("Q: " + chosen[0], tuple((piece, bool(random_.integers(2))) for piece in chosen[1:]))
        (made,) = seam.tokens([text], leading=False)
        mask = np.ones(len(made.answer), bool) if made.mask is None else made.mask
        assert spelled(tokenizer, made.prompt) == text.prompt
        assert spelled(tokenizer, np.concatenate((made.prompt, made.answer))) == text.whole
        if text.whole.isascii():  # bytes of one character may lie in several tokens
            trained = "".join(part for part, is_trained in text.parts if is_trained)
            assert spelled(tokenizer, made.answer[mask], inside=True) == trained


def spelled(tokenizer: Any, ids: Any, *, inside: bool = False) -> str:
    """Decode tokens, without the space that SentencePiece puts before a text."""
    text = str(tokenizer.decode(ids))
    return text.removeprefix(" ") if tokenizer.decode(tokenizer("x")["input_ids"][-2:]) == " x" and not inside else text
