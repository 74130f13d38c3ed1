"""Convert the settings of another trainer into an experiment of rlexp.

python -m rlexp.convert recipe.yaml --trainer dpo --gpus 8        TRL, axolotl, LLaMA-Factory
python -m rlexp.convert train.sh --name mine                      a command of any of them, OpenRLHF, ms-swift
python -m rlexp.convert train.sh --set LR=1e-6 -- ARGUMENT        as `LR=1e-6 bash train.sh ARGUMENT` would run

It prints an experiment file. Its first lines say what is trained otherwise, means something else or is missing; with
--verbose, what became of every argument. With --name it is written to conf/experiment/NAME.yaml, where
`python -m rlexp +experiment=NAME` finds it. The exit code is 0 if the experiment composes, else 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from rlexp.base.command import Parser, exit_code
from rlexp.base.errors import ConfigError
from rlexp.base.files import write_text
from rlexp.base.printable import fitted, printable, printable_lines
from rlexp.convert.conversion import Conversion
from rlexp.convert.rules import Fate
from rlexp.convert.shell import ScriptCall

FIRST = "mine"  # the name in the printed command, if none is given


def main() -> int:
    parser = Parser("rlexp.convert", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="a yaml file, or a shell script with the command")
    parser.add_argument(
        "--trainer", action="append", metavar="NAME", help="dpo, sft, kto, reward, grpo, …, where the file does not "
        "say it (TRL); or the version whose defaults it means: trl==0.15"
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, metavar="N", help="all GPUs of the run, where the file does not say it")
    parser.add_argument("--name", metavar="NAME", help="write it to conf/experiment/NAME.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE", help="a variable of the "
                        "script, whatever it sets itself; may be repeated")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="say of every argument what became of it")
    parser.add_argument("--line", type=int, metavar="N", help="the line of the command, where a script has several")
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    arguments = words[place + 1 :] if "--" in words else None  # of the script
    return exit_code(lambda: run(parser.parse_args(words[:place]), arguments))


def run(options: argparse.Namespace, arguments: list[str] | None = None) -> int:
    from rlexp.config.explain import explain
    from rlexp.config.paths import experiments
    from rlexp.convert.experiment import command, composed, overrides, text_of
    from rlexp.convert.frameworks import converted

    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"--gpus={options.gpus}: must be at least 1.")
    if options.name is not None and not re.fullmatch(r"[A-Za-z_][\w-]*", options.name):
        raise ConfigError(f"--name={options.name}: must be letters, digits, _ and -. For example: --name mine.")
    if files := experiments().get(options.name):
        where = ", ".join(map(str, files))
        raise ConfigError(f"--name={options.name}: there is such an experiment, {where}. Give another name.")
    for each in options.set:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", each, re.S):
            raise ConfigError(f"--set {each}: must be a name, = and a value. For example: --set LR=1e-6.")
    call = ScriptCall(arguments, dict(each.split("=", 1) for each in options.set), options.line)
    conv = converted(options.file, options.trainer, options.gpus, call)
    name = options.name or FIRST
    text = text_of(conv, name, options.file.name, verbose=options.verbose)
    if options.name is None:
        sys.stdout.write(text)
    else:
        file = Path("conf/experiment") / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    summarize(conv)
    if options.name is not None:
        sys.stderr.write(f"wrote {file}\ntrain by it: {printable(command(conv, name))}\n")
    try:
        composed(text, name, overrides(conv))
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        sys.stderr.write(f"rlexp: as it is, it does not run: {printable_lines(message)}\n")
        return 1
    return 0


def summarize(conv: Conversion) -> None:
    """Say on the terminal what is trained otherwise, and name what else was not taken over."""
    from rlexp.convert.experiment import LONGEST, MOST, explained

    if lines := conv.lines[Fate.INSTEAD]:
        texts = [each.removeprefix("#") for line in lines[:MOST] for each in explained(line, LONGEST)]
        sys.stderr.write(fitted("\n".join([f"{Fate.INSTEAD.value}:", *map(printable, texts), ""]), sys.stderr))
    for fate in (Fate.OTHER, Fate.ABSENT):
        if lines := conv.lines[fate]:
            names = ", ".join(dict.fromkeys(line.name for line in lines))
            sys.stderr.write(fitted(f"{fate.value}: {printable(names)}\n", sys.stderr))
    for note in conv.notes:
        sys.stderr.write(fitted(f"{printable(note)}\n", sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
