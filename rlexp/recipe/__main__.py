"""List the recipes (experiments), show one, or copy one to change it.

python -m rlexp.recipe                                         list them, your own too
python -m rlexp.recipe lora_8b                                 show a file
python -m rlexp.recipe lora_8b --copy conf/experiment/mine.yaml     copy it; then: python -m rlexp +experiment=mine
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rlexp.base.command import Parser, exit_code
from rlexp.base.errors import ConfigError
from rlexp.base.printable import printable, printable_lines
from rlexp.config.options import is_name
from rlexp.config.paths import conf_dir, experiments
from rlexp.config.schema.keys import suggestion

WIDTH = 80


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("rlexp.recipe", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe; without one, all are listed")
    parser.add_argument("--copy", type=Path, metavar="FILE", help="write the recipe to a new file that ends in .yaml")
    return exit_code(lambda: recipe(parser.parse_args(argv)))


def recipe(options: argparse.Namespace) -> int:
    if options.name is None:
        if options.copy is not None:
            raise ConfigError(f"--copy={options.copy}: copies one recipe. Name it: NAME --copy FILE.")
        sys.stdout.write(listing())
        return 0
    known = experiments()
    if options.name not in known:
        near = suggestion(options.name, list(known))
        raise ConfigError(f"{options.name}: no such recipe.{near} Recipes: {', '.join(known)}.")
    text = text_of(known[options.name][-1])
    if options.copy is None:
        sys.stdout.write(printable_lines(text))
        return 0
    copy(text, options.copy)
    sys.stdout.write(f"wrote {options.copy}\n{how_to_train(options.copy)}\n")
    return 0


def listing() -> str:
    """Return each recipe with its first sentence."""
    files_of = experiments()
    width = max(map(len, files_of)) + 2
    lines = []
    for name in files_of:
        indent = " " * width
        first = textwrap.wrap(printable_lines(summary(files_of[name][-1])), WIDTH - width) or [""]
        lines += [f"{printable(name):{width}}{first[0]}", *(f"{indent}{line}" for line in first[1:])]
    how = "python -m rlexp +experiment=NAME trains one; python -m rlexp.recipe NAME shows it."
    return "\n".join([*lines, "", how, ""])


def summary(file: Path) -> str:
    """Return the first comment of a recipe, up to its first line with a name (`# Command:`)."""
    try:
        whole = text_of(file)
    except ConfigError:
        return "(cannot be read)"
    lines = []
    for line in whole.splitlines():
        text = line.removeprefix("#").strip()
        if line.startswith("# @package"):
            continue
        if not line.startswith("#") or text.partition(" ")[0].endswith(":"):
            break
        lines.append(text)
    return " ".join(lines).partition(". ")[0].rstrip(".:")


def text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{file}: cannot be read ({reason}). Correct it, or move it away.") from None


def copy(text: str, file: Path) -> None:
    """Write a copy, and no file that is there already."""
    if file.suffix != ".yaml":
        raise ConfigError(f"--copy={file}: a recipe's file ends in .yaml. Say --copy={file.with_suffix('.yaml')}.")
    if not is_name(file.stem):
        raise ConfigError(f"--copy={file}: +experiment={file.stem} could not name it. Use letters, digits, _ and -.")
    if file.exists():
        raise ConfigError(f"--copy={file}: is there already. Give a new file.")
    if file.stem in experiments():
        raise ConfigError(f"--copy={file}: there is a recipe of this name. Give the copy another one.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        raise ConfigError(f"--copy={file}: cannot be written ({error.strerror}). Give another file.") from None


def how_to_train(file: Path) -> str:
    """Say how to train by a copy."""
    here = Path("conf") / "experiment"
    for folder in (here.resolve(), (conf_dir() / "experiment").resolve()):
        if file.resolve().is_relative_to(folder):
            return f"train by it: python -m rlexp +experiment={file.resolve().relative_to(folder).with_suffix('')}"
    return f"rlexp finds experiments in {here} of the folder where you type: put it there to train by it"


if __name__ == "__main__":
    sys.exit(main())
