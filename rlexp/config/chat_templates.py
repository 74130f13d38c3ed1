"""The chat templates that have a name: `model.chat_template=chatml`. Their texts are in `assets/chat_templates/`.

A named template also decides which token ends an answer, so that a base model learns to stop where the template says.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rlexp.config.content_ids import of_file


@dataclass(frozen=True)
class NamedTemplate:
    tokens: tuple[str, ...] = ()  # what the tokenizer must have as single tokens, for the text to mean what it should
    end: str | None = None  # the token that ends an answer; None: the tokenizer's own end of sequence


IM = ("<|im_start|>", "<|im_end|>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
INST = ("[INST]", "[/INST]")
NAMED = {
    "chatml": NamedTemplate(IM, "<|im_end|>"),
    "qwen": NamedTemplate(IM, "<|im_end|>"),
    "qwen3": NamedTemplate(IM, "<|im_end|>"),
    "llama3": NamedTemplate(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "llama2": NamedTemplate(),
    "mistral": NamedTemplate(INST),
    "mistral_nemo": NamedTemplate(INST),
    "mistral_small": NamedTemplate((*INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
    "gemma": NamedTemplate(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "phi3": NamedTemplate(PHI, "<|end|>"),
    "phi4_mini": NamedTemplate(PHI, "<|end|>"),
    "phi4": NamedTemplate((*IM, "<|im_sep|>"), "<|im_end|>"),
    "deepseek_v3": NamedTemplate(("<｜User｜>", "<｜Assistant｜>")),
    "zephyr": NamedTemplate(),
    "tulu": NamedTemplate(),
    "vicuna": NamedTemplate(),
    "alpaca": NamedTemplate(),
}


def template_text(value: str) -> str:
    """Return the text of a template: of a name, or of a file."""
    if value in NAMED:
        return (files("rlexp.config") / "assets" / "chat_templates" / f"{value}.jinja").read_text(encoding="utf-8")
    return Path(value).expanduser().read_text(encoding="utf-8")


def end_of(value: str | None) -> str | None:
    """Return the token by which a named template ends an answer; None where that is the tokenizer's choice."""
    return NAMED[value].end if value in NAMED else None


def contents_of_template(value: str) -> str:
    """Hash what a template decides: its text and, with a name, also the token that ends an answer."""
    if value not in NAMED:
        return of_file(Path(value).expanduser())
    return hashlib.sha256(f"{template_text(value)}\n{NAMED[value].end}".encode()).hexdigest()[:16]


def names_like(word: str) -> list[str]:
    """Return all names, the one most like `word` first."""
    return sorted(NAMED, key=lambda name: (-difflib.SequenceMatcher(None, word.lower(), name).ratio(), name))
