"""Rules for a pretrained model: its folder or hub name, its GGUF file, its chat template, its new tokens."""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlexp.base import plain_json
from rlexp.base.errors import ConfigError
from rlexp.config.chat_templates import NAMED, NamedTemplate, names_like
from rlexp.config.checks.adapter import check_quantized
from rlexp.config.checks.files import check_model_path, expanded
from rlexp.config.schema import HFModelConfig

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

TEMPLATE_FILES = (".jinja", ".jinja2", ".j2", ".txt")
ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def check_pretrained(model: HFModelConfig, *, here: bool) -> None:
    check_model_path("model.path", model.path)
    folder = Path(model.path).expanduser()
    local = os.path.isdir(folder)
    check_revision("model", model.path, model.revision)
    check_quantized("model.path", model.path)
    _check_gguf(model, folder if local else None, here=here)
    shown = f"model.add_tokens={model.add_tokens}"
    if any(not token.strip() for token in model.add_tokens):
        raise ConfigError(f"{shown}: holds a token that is empty, or blank. Leave it out.")
    twice = [token for token, times in Counter(model.add_tokens).items() if times > 1]
    if twice:
        raise ConfigError(f"{shown}: names {twice[0]!r} twice. Give each token once.")
    if model.add_tokens and local and model.gguf is None:
        refuse_known(model.add_tokens, _vocabulary(folder))
    if model.chat_template is not None:
        check_template("model.chat_template", model.chat_template)
        if local and model.gguf is None and (known := _vocabulary(folder)):
            refuse_missing(model.chat_template, known | {*model.add_tokens}, model.add_tokens)


def check_revision(group: str, path: str, revision: str | None) -> None:
    if revision is None:
        return
    if os.path.isdir(Path(path).expanduser()):
        raise ConfigError(
            f"{group}.revision={revision}: is for hub names, and {group}.path={path} is a folder. "
            f"Leave {group}.revision out."
        )
    if not revision.strip():
        raise ConfigError(f"{group}.revision=: is empty. Give a branch, a tag or a commit, or leave it out.")


# ---- the GGUF file ----


def _check_gguf(model: HFModelConfig, folder: Path | None, *, here: bool) -> None:
    if model.gguf is None:
        files = _gguf_files(folder) if folder is not None and not (folder / "config.json").exists() else []
        if files:
            raise ConfigError(
                f"model.path={model.path}: holds no config.json, but GGUF files. Name the one to train: "
                f"{' or '.join(f'model.gguf={name}' for name in files[:3])}."
            )
        return
    if here and importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model.gguf={model.gguf}: the package gguf, which reads such files, is not installed. Run "
            f"`pip install -e '.[gguf]'` in a checkout."
        )
    if ONE_OF_SEVERAL.search(model.gguf):
        raise ConfigError(
            f"model.gguf={model.gguf}: is one of several parts, and transformers reads one file only. Join them "
            f"with llama.cpp's `llama-gguf-split --merge`."
        )
    if folder is not None and not os.path.isfile(folder / model.gguf):
        files = _gguf_files(folder)
        hint = f"There: {', '.join(files[:5])}" if files else "It has no GGUF file: leave model.gguf out"
        raise ConfigError(f"model.gguf={model.gguf}: no such file in model.path={model.path}. {hint}.")


def _gguf_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.gguf"))


# ---- new tokens ----


def refuse_known(tokens: list[str], vocabulary: set[str]) -> None:
    """Refuse tokens that a tokenizer has already."""
    known = [token for token in tokens if token in vocabulary]
    if known:
        raise ConfigError(
            f"model.add_tokens={tokens}: the tokenizer has {', '.join(map(repr, known[:3]))} already. Leave "
            f"{'it' if len(known) == 1 else 'them'} out."
        )


def _vocabulary(folder: Path) -> set[str]:
    """Read a tokenizer's tokens from tokenizer.json; other tokenizers are asked when the model is prepared."""
    try:
        described = plain_json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        tokens = described["model"]["vocab"]  # a mapping, or a list of pairs
        added = [each["content"] for each in described.get("added_tokens") or []]
        return {*added, *(tokens if isinstance(tokens, dict) else (token for token, _ in tokens))}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


# ---- the chat template ----


def refuse_missing(template: str, vocabulary: Container[str], given: Sequence[str] = ()) -> None:
    """Refuse a template with a name whose tokens the tokenizer would split into pieces; `given` are added already."""
    known = NAMED.get(template, NamedTemplate())
    missing = [token for token in known.tokens if token not in vocabulary]
    if missing:
        written = ",".join(f"'{token}'" for token in (*given, *missing))
        plain = ", ".join(name for name, each in NAMED.items() if not each.tokens)
        raise ConfigError(
            f"model.chat_template={template}: the tokenizer has no {', '.join(missing)}, and would split "
            f"{'it' if len(missing) == 1 else 'them'} into pieces. Give {'it' if len(missing) == 1 else 'them'} to the "
            f'tokenizer with model.add_tokens="[{written}]", or take a template that needs no tokens: {plain}.'
        )


def check_template(key: str, path: str) -> None:
    """Refuse a template that is missing, is no text, or does not compile with what transformers offers to templates."""
    if path in NAMED:
        return
    file = expanded(key, path)
    if re.fullmatch(r"[\w.-]*[\w-]", path) and file.suffix not in TEMPLATE_FILES and not file.exists():
        raise ConfigError(
            f"{key}={path}: is neither a file nor the name of a template. Names, the nearest first: "
            f"{', '.join(names_like(path))}."
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, IsADirectoryError) as error:
        what = "is a folder" if isinstance(error, OSError) else "is no UTF-8 text"
        raise ConfigError(f"{key}={path}: {what}. Give a file with a jinja template.") from None
    except (OSError, ValueError):
        raise ConfigError(
            f"{key}={path}: no such file can be read. Give one that exists; relative paths start at {Path.cwd()}."
        ) from None
    if not text.strip():
        raise ConfigError(f"{key}={path}: is empty. Give a jinja template, or leave {key} out.")
    _compile(key, path, text)


def _compile(key: str, path: str, text: str) -> None:
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}`, by which templates mark what an assistant says."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    extensions: list[Any] = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(extensions=extensions)
    try:
        environment.from_string(text)
    except TemplateSyntaxError as error:
        where, why = f"line {error.lineno} does", (error.message or "").rstrip(".")
    except SyntaxError as error:  # of the Python that jinja2 made, whose lines are others
        where, why = "it does", error.msg
    else:
        return
    raise ConfigError(f"{key}={path}: {where} not compile: {why}. Correct the template.")
