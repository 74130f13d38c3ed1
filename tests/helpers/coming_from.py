"""The pages of docs/convert/, from the rules of `rlexp.convert`. `python -m tests.helpers.coming_from` writes them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlexp.convert.frameworks import FRAMEWORKS
from rlexp.convert.rules import Fate, Rule
from tests.helpers.paths import ROOT

FOLDER = ROOT / "docs" / "convert"
WIDTH = 120
FIRST = "TRL"  # its page has the rules that others share with it
# The topics of a page, and the keys of ours that belong to each. The first one that fits a rule has it.
TOPICS = {
    "Batch and length of the run": r"train\.(micro_)?batch_size|train\.(epochs|max_steps)",
    "Optimizer": r"optim",
    "Adapter": r"adapter",
    "Data": r"data|model\.chat_template",
    "Rollout and reward": r"rollout|reward",
    "Loss": r"loss|reference",
    "Other": r"",
}
EXAMPLES = {"TRL": "recipe.yaml --trainer dpo --gpus 8", "OpenRLHF": "train.sh", "ms-swift": "train.sh",
            "axolotl": "config.yaml --gpus 8", "LLaMA-Factory": "config.yaml --gpus 8"}  # fmt: skip
REMARKS = {
    "OpenRLHF": "Versions before 0.10.2 have flat names, which the command reads too. This page shows them only if "
    "they differ in more than the dotted prefix: `train.batch_size` is also `batch_size` and `train_batch_size`."
}


def name_of(framework: str) -> str:
    """Return the file of a trainer's page."""
    return framework.lower().replace("-", "_") + ".md"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with its text."""
    for framework in FRAMEWORKS:
        yield FOLDER / name_of(framework), page_of(framework)


def page_of(framework: str) -> str:
    rules = merged(rule for rule in FRAMEWORKS[framework].rules if rule.fate is not Fate.NEEDLESS)
    first = set() if framework == FIRST else {shown(rule) for rule in FRAMEWORKS[FIRST].rules}
    shared = [rule for rule in rules if shown(rule) in first]
    own = [rule for rule in rules if rule not in shared]
    several = {name for name in names_of(own) if names_of(own).count(name) > 1}
    parts = [
        f"# What became of {framework}'s arguments?",
        "**Start** · [Configure](../README.md#configure) · [Operate](../README.md#operate) · "
        "[Inside](../README.md#inside)",
        filled(f"For each argument of {framework}: rlexp's key, and what differs. [The command](../coming_from.md) "
               "writes the keys for you:"),
        f"```bash\npython -m rlexp.convert {EXAMPLES[framework]} --name mine\n```",
    ]  # fmt: skip
    parts += [filled(REMARKS[framework])] if framework in REMARKS else []
    here = [rule for rule in own if rule.key]
    for topic in TOPICS:
        if of_topic := [rule for rule in here if topic_of(rule) == topic]:
            parts += [f"## {topic}", *section(of_topic, several)]
    missing = [rule for rule in own if not rule.key]
    parts += ["## Missing", bullets(missing, several)]
    if shared:
        listed = ", ".join(sorted({f"`{name}`" for rule in shared for name in rule.names}))
        parts += ["## As in TRL", filled(f"[TRL's page]({name_of(FIRST)}) has these: {listed}.")]
    return "\n\n".join(parts) + "\n"


def shown(rule: Rule) -> tuple[tuple[str, ...], Fate, str, str]:
    """Return what a page shows of a rule, besides its trainers."""
    return telling(rule.names), rule.fate, rule.key, rule.why


def merged(rules: Iterable[Rule]) -> list[Rule]:
    """Join rules that differ only in their trainers."""
    found: dict[tuple[tuple[str, ...], Fate, str, str], list[Rule]] = {}
    for rule in rules:
        found.setdefault(shown(rule), []).append(rule)
    return [
        Rule(*parts, trainers=tuple(dict.fromkeys(each for rule in group for each in rule.trainers))
             if all(rule.trainers for rule in group) else ())
        for parts, group in found.items()
    ]  # fmt: skip


def telling(names: Sequence[str]) -> tuple[str, ...]:
    """Leave out the older names that only lack the dotted prefix of another one."""
    parts = [name.split(".") for name in names if "." in name]
    flat = {"_".join(each[start:]) for each in parts for start in range(len(each))}
    return tuple(name for name in names if name not in flat)


def names_of(rules: Sequence[Rule]) -> list[str]:
    return [name for rule in rules for name in rule.names]


def topic_of(rule: Rule) -> str:
    return next(topic for topic, keys in TOPICS.items() if re.match(keys, rule.key))


def section(rules: Sequence[Rule], several: set[str]) -> Iterator[str]:
    """Yield the arguments with a remark as a table, and the others in lines below it."""
    if remarked := [rule for rule in rules if rule.why]:
        rows = [f"| {called(rule, several)} | {quoted(rule.key)} | {rule.why} |" for rule in remarked]
        yield "\n".join(["| theirs | rlexp | |", "| --- | --- | --- |", *rows])
    if plain := together({quoted(rule.key): called(rule, several)} for rule in rules if not rule.why):
        yield filled("; ".join(f"{names}: {key}" for key, names in plain.items()) + ".")


def bullets(rules: Sequence[Rule], several: set[str]) -> str:
    """Return what is missing, with one bullet for all arguments of the same reason."""
    why = together({rule.why: called(rule, several)} for rule in rules)
    return "\n".join(filled(f"- {names}: {reason}", "  ") for reason, names in why.items())


def together(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join the names that have the same key or reason."""
    joined: dict[str, list[str]] = {}
    for part in parts:
        for key, names in part.items():
            joined.setdefault(key, []).append(names)
    return {key: ", ".join(names) for key, names in joined.items()}


def called(rule: Rule, several: set[str]) -> str:
    """Return the names of an argument, with its trainers if others have another one of this name."""
    names = ", ".join(f"`{name}`" for name in rule.names)
    return f"{names} ({', '.join(rule.trainers)})" if rule.trainers and several & {*rule.names} else names


def quoted(key: str) -> str:
    """Quote each key that a rule names: `data.path` or `data.sources`."""
    parts = re.split(r"(, or |, | or )", key)
    return "".join(f"`{part}`" if place % 2 == 0 else part for place, part in enumerate(parts))


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages():
        page.write_text(text, encoding="utf-8")
