"""Write preference pairs as long as you like, to try training on long sequences. Nothing is downloaded.

python -m rlexp.long_pairs --tokens 128000 --pairs 64 --out long_pairs.jsonl
python -m rlexp.long_pairs model=hf model.path=FOLDER --tokens 32000 --texts BOOK.txt FOLDER
python -m rlexp.long_pairs --check long_pairs.jsonl

A prompt is a long text with a question at its end: which line follows the line «…» in the text above? The chosen answer
is that line, and the rejected one is another line of the text. The places of the questions are spread evenly over the
texts. --check answers all questions of a file again, and compares.

The texts are files and folders of yours, or by default the source of the Python standard library (licence PSF-2.0).
With model=… the tokens are counted with the tokenizer of that model; without, a token is taken for 3 characters. The
same options, texts and seed write the same file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rlexp.base import plain_json
from rlexp.base.byte_counts import size
from rlexp.base.command import Parser, refuse_unwritable
from rlexp.base.errors import ConfigError, DataError
from rlexp.base.files import replacing
from rlexp.config.explain import explained
from rlexp.config.schema import ModelConfig
from rlexp.long_pairs.lengths import CHARACTERS, Pair, Texts, counting, estimated, given, of_python, pairs, wrong

FEWEST = 1000  # tokens of a pair: a question needs about 100
OUT = "long_pairs.jsonl"


def main() -> int:
    parser = Parser("rlexp.long_pairs", __doc__)
    parser.add_argument("words", nargs="*", metavar="model=NAME", help="the model whose tokenizer counts, as `python "
                        "-m rlexp` takes it")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=128_000, metavar="N", help="the most tokens of a prompt with its "
                        "longer answer (default: 128000)")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=64, metavar="N", help="how many pairs (default: 64)")
    parser.add_argument("--out", type=Path, default=Path(OUT), metavar="FILE", help=f"a new file (default: {OUT})")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], metavar="FILE_OR_FOLDER", help="your own texts "
                        "(default: the source of the Python standard library)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other pairs (default: 0)")
    parser.add_argument("--check", type=Path, metavar="FILE", help="check a file that was written before")
    return explained(lambda: run(parser.parse_intermixed_args()))


def run(options: argparse.Namespace) -> int:
    if options.check is not None:
        return check(options.check)
    for name, least in (("tokens", FEWEST), ("pairs", 1)):
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"--{name}={value}: must be at least {least}. Give --{name}={least} or more.")
    if options.out.exists():
        raise ConfigError(f"--out={options.out}: exists. Give a new file, or delete this one.")
    model = model_of(options.words)
    texts = given(options.texts) if options.texts else of_python()
    refuse_unwritable(options.out, "--out")
    try:
        made = write(options, model, texts)
    except BaseException:
        options.out.unlink(missing_ok=True)  # made to see that it can be written
        raise
    tell(options, made, model, texts)
    return 0


def model_of(words: list[str]) -> ModelConfig | None:
    """Return the model whose tokenizer counts."""
    from rlexp.config.load import compose_config

    for word in words:
        if word.partition("=")[0].partition(".")[0] != "model":
            raise ConfigError(f"{word}: only the model decides what a token is. Give model=NAME and its keys alone.")
    return compose_config(words).model if words else None


def write(options: argparse.Namespace, model: ModelConfig | None, texts: Texts) -> list[Pair]:
    """Write the pairs one by one: a file of theirs may be larger than the memory."""
    count, made = estimated if model is None else counting(model), []
    with replacing(options.out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for each in pairs(texts, options.tokens, options.pairs, options.seed, count):
            file.write(json.dumps(each.row(), ensure_ascii=False) + "\n")
            made.append(replace(each, prompt=""))  # what a summary needs, which takes no memory
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{len(made)} of {options.pairs} pairs" + "\n" * (len(made) == options.pairs))
    return made


def tell(options: argparse.Namespace, made: list[Pair], model: ModelConfig | None, texts: Texts) -> None:
    tokens, places = [each.tokens for each in made], [each.place for each in made]
    counted = (f"estimated, {CHARACTERS:g} characters a token. With model=NAME, its tokenizer counts"
               if model is None else f"counted with the tokenizer of {model.called}")  # fmt: skip
    left_out = f"; {texts.no_text} other files are no text" if texts.no_text else ""
    path = shlex.quote(str(options.out))
    model_words = " ".join(map(shlex.quote, options.words)) or "model=NAME"
    sys.stdout.write(
        f"wrote    {options.out}: {len(made)} pairs, {size(options.out.stat().st_size)}\n"
        f"tokens   {min(tokens):,} to {max(tokens):,} in a prompt with its longer answer ({counted})\n"
        f"texts    {texts.named}: {len(texts.files):,} files, {texts.characters / 1e6:.1f} million characters"
        f"{left_out}\n"
        f"answers  at {min(places):.0%} to {max(places):.0%} of the text\n"
        f"check    python -m rlexp.long_pairs --check {path}\n"
        f"train    python -m rlexp {model_words} data=jsonl data.path={path} data.max_length={options.tokens}\n"
    )


def check(path: Path) -> int:
    """Answer the questions of a file again."""
    rows = 0
    try:
        with path.open(encoding="utf-8") as file:
            for rows, line in enumerate(file, 1):
                row = plain_json.loads(line)
                if why := "must be an object" if not isinstance(row, dict) else wrong(row):
                    raise DataError(f"{path}:{rows}: {why}. Write the file again.")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"--check={path}: cannot be read ({reason}). Give a file of this command.") from None
    if not rows:
        raise DataError(f"--check={path}: is empty. Give a file of this command.")
    sys.stdout.write(f"{path}: {rows} pairs, and each chosen answer is the right one, each rejected one another line\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
