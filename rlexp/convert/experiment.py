"""Write a conversion as an experiment file, and compose it as on GPUs."""

from __future__ import annotations

import re
import shlex
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlexp.base import plain_yaml
from rlexp.base.printable import printable
from rlexp.base.secrets import HIDDEN, masked
from rlexp.config.elsewhere import composed_for
from rlexp.config.options import literal, quoted
from rlexp.config.schema import Config
from rlexp.config.schema.cadence import plural
from rlexp.convert.conversion import UNKNOWN_VARIABLE, ArgumentNote, Conversion, ConvertError, Value
from rlexp.convert.kinds import place
from rlexp.convert.rules import Fate

WIDTH = 116
MOST, LONGEST = 10, 60  # arguments that are trained otherwise, and characters of a value, of the short head
NO_TEXTS = ("true", "false", "null", "nan", "inf")  # in Hydra's overrides, without quotes
# The order of the groups: the one in which people think of a run. Other groups come last.
ORDER = ("seed", "launch", "parallel", "engine", "model", "adapter", "data", "rollout", "reward", "loss", "reference",
         "train", "optim", "memory", "checkpoint", "logger")  # fmt: skip


def text_of(conv: Conversion, name: str, file: str, *, verbose: bool = True) -> str:
    """Return the experiment as yaml. If it is `verbose`, it has a comment for every argument, else for those that
    matter."""
    title = wrapped(f"{conv.framework}'s {conv.trainer} of {file}, by python -m rlexp.convert.")
    lines = ["# @package _global_", *title, f"# Command:  {command(conv, name)}"]
    lines += [*(_all_said(conv) if verbose else _what_matters(conv)), "", "defaults:"]
    for group, option in sorted(conv.choices.items(), key=lambda item: _place(item[0])):
        lines.append(_with_comment(f"  - override /{group}: {option.value}", option.origin))
    lines += ["", *_groups(conv)]
    text = "".join(f"{printable(line)}\n" for line in lines)  # a comment ends at any line break, a value at a plain one
    if set(plain_yaml.load(text) or {}) != {"defaults"} | {key.partition(".")[0] for key in conv.values}:
        raise ConvertError(f"{printable(file)}: has texts that cannot stand in an experiment file. Write it by hand.")
    return text


def _all_said(conv: Conversion) -> Iterator[str]:
    yield from _listed(Fate.INSTEAD, conv.lines[Fate.INSTEAD])
    for note in conv.notes:
        yield from wrapped(note)
    for fate in (Fate.OTHER, Fate.ABSENT, Fate.NEEDLESS):
        yield from _listed(fate, conv.lines[fate], apart=True)
    if conv.off:
        yield from ["#", *wrapped(f"Null, false, empty or 0, and nothing is asked for: {', '.join(conv.off)}.", "    ")]


def _what_matters(conv: Conversion) -> Iterator[str]:
    """Yield what is trained otherwise, then what else differs or is missing; the rest is counted."""
    otherwise, missing = conv.lines[Fate.INSTEAD], [line for line in conv.lines[Fate.ABSENT] if line.known]
    yield from _listed(Fate.INSTEAD, otherwise[:MOST], longest=LONGEST)
    if otherwise[MOST:]:
        yield f"#   and {len(otherwise) - MOST} more: --verbose names them"
    for note in conv.notes:
        yield from wrapped(note)
    variables = [line.name for line in conv.lines[Fate.OTHER] if line.why == UNKNOWN_VARIABLE]
    others = [line for line in conv.lines[Fate.OTHER] if line.why != UNKNOWN_VARIABLE]
    yield from _listed(Fate.OTHER, others, longest=LONGEST)
    if variables:
        yield from wrapped(f"Environment, to be given to `python -m rlexp` too: {', '.join(variables)}.", "  ")
    yield from _listed(Fate.ABSENT, missing, longest=LONGEST)
    unknown = [line.name for line in conv.lines[Fate.ABSENT] if not line.known]
    if unknown:
        yield from wrapped(f"Not known here: {', '.join(unknown)}.", "  ")
    if count := len(conv.lines[Fate.NEEDLESS]) + len(conv.off):
        yield f"# {plural(count, 'other argument')} {'changes' if count == 1 else 'change'} nothing: see --verbose."


def _listed(fate: Fate, lines: Sequence[ArgumentNote], *, apart: bool = False, longest: int | None = None) -> list[str]:
    """Return the lines of one fate, the worst of which are the first lines of the file."""
    head = ["#"] * apart + [f"# {fate.value[0].upper()}{fate.value[1:]}:"]
    return [*head, *(each for line in lines for each in explained(line, longest))] if lines else []


def command(conv: Conversion, name: str) -> str:
    return shlex.join(["python", "-m", "rlexp", f"+experiment={name}", *overrides(conv)])


def overrides(conv: Conversion) -> list[str]:
    """Return the keys that belong on the command line, as Hydra reads them: in quotes where they need some, as 1e3 and
    true do, and with the home folder in place of ~ and $HOME, as a shell does it."""
    words = []
    for key, value in conv.command.items():
        text = str(value.value)
        home = re.sub(r"^\$(?:HOME\b|\{HOME\})", "~", text)
        text = str(Path(home).expanduser()) if home.startswith("~") else text
        plain = re.fullmatch(r"(?:\.{0,2}/)*[A-Za-z_][\w./-]*", text, re.ASCII) and text.lower() not in NO_TEXTS
        words.append(f"{key}={text if plain else quoted(text)}")
    return words


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent=f"# {indent}", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def explained(line: ArgumentNote, longest: int | None = None) -> list[str]:
    """Return what is said of an argument, as comments. A value may be cut to its first characters."""
    value = HIDDEN if line.why == UNKNOWN_VARIABLE else scalar(masked(line.name.rpartition(": ")[2], line.value))
    value = f"{value[:longest]} …" if longest is not None and len(value) > longest else value
    return wrapped(f"  {line.name}: {value}   {line.why}", indent="      ")


class _Dumper(yaml.SafeDumper):
    """A dumper that escapes line breaks: other styles write them as they are."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"'),
)


def scalar(value: Any) -> str:
    """Return a value as yaml writes it in one line."""
    plain = _plain(value)
    for readable in (True, False):  # where a character does not print, all that are not ASCII are escaped
        text = yaml.dump(plain, None, _Dumper, default_flow_style=True, width=10**6, allow_unicode=readable)
        if printable(text.rstrip("\n")) == text.rstrip("\n"):
            break
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """Return a value of the kinds that yaml writes."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else literal(str(value))


def _groups(conv: Conversion) -> Iterator[str]:
    """Yield the keys as nested yaml, group by group."""
    tree: dict[str, Any] = {}
    for key in sorted(conv.values, key=lambda key: place(key, conv.chosen(key.partition(".")[0]))):
        *folders, leaf = key.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = conv.values[key]
    for group in sorted(tree, key=_place):
        yield from _nested(group, tree[group], "")


def _nested(name: str, node: Any, indent: str) -> Iterator[str]:
    if isinstance(node, Value):
        yield _with_comment(f"{indent}{_key(name)}: {scalar(node.value)}", node.origin)
        return
    yield f"{indent}{_key(name)}:"
    for leaf, value in node.items():
        yield from _nested(leaf, value, indent + "  ")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else scalar(name)


def _place(group: str) -> int:
    return ORDER.index(group) if group in ORDER else len(ORDER)


def _with_comment(text: str, comment: str) -> str:
    return f"{text}  # {comment}" if comment else text


def composed(text: str, name: str, words: Sequence[str] = ()) -> Config:
    """Compose the experiment with the words of its command, as on the GPUs that it names. What is wrong with it is an
    error of the configuration."""
    with tempfile.TemporaryDirectory(prefix="rlexp-convert-") as folder:
        file = Path(folder) / "experiment" / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        return composed_for([f"+experiment={name}", *words], Path(folder))
