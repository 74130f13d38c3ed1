"""Generate answers of a trained model, and beside them those of its start or of its reference.

python -m rlexp.generate RUN                                        to the first held-out rows of a run
python -m rlexp.generate RUN --prompt "Name a prime number."        to a prompt that you type
python -m rlexp.generate RUN/checkpoints/step-00000050 --prompts FILE --jsonl answers.jsonl
python -m rlexp.generate model=hf model.path=FOLDER --prompt "Name a prime number."
python -m rlexp.generate model=hf model.path=NAME adapter=lora adapter.path=FOLDER --prompt "Name a prime number."

A run or a checkpoint brings its model, adapter, template and precision; keys that you give replace them. Each token is
the likeliest one. With --samples N, N answers to each prompt are sampled instead: rollout.temperature, rollout.top_p
and seed then say how. rollout.max_new_tokens limits an answer: 256 by default, or in a run that samples its own answers
the value of that run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rlexp.base.command import Parser, refuse_unwritable
from rlexp.base.errors import ConfigError, UserError
from rlexp.base.waiting import busy_message
from rlexp.config.explain import explained


def main() -> int:
    parser = Parser("rlexp.generate", __doc__)
    parser.add_argument("words", nargs="*", metavar="RUN_OR_CHECKPOINT key=value", help="at most one folder, and "
                        "settings as `python -m rlexp` takes them")  # fmt: skip
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a .txt file with a prompt on each line, or rows "
                        "as training reads them: JSON lines, JSON or Parquet")  # fmt: skip
    parser.add_argument("--rows", type=at_least_1, metavar="N", help="take the first N held-out rows (default: 4), or "
                        "the first N rows of --prompts (default: all)")  # fmt: skip
    parser.add_argument("--samples", type=at_least_1, metavar="N", help="sample N answers to each prompt")
    parser.add_argument("--beside", choices=("start", "reference", "none"), help="whose answers to show too: those of "
                        "the model before training (the default for a run, or an adapter), those of reference.path, or "
                        "none")  # fmt: skip
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="also write a line of JSON for each prompt")
    return explained(lambda: run(parser.parse_intermixed_args()))


def at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def run(options: argparse.Namespace) -> int:
    from rlexp.eval.job import on_ranks
    from rlexp.generate import report
    from rlexp.generate.job import Beside, job_of
    from rlexp.launch.local import Interrupted

    if options.prompt and options.prompts:
        raise ConfigError("--prompt and --prompts: both say what to answer. Give one of them.")
    beside = None if options.beside is None else Beside(options.beside)
    refuse_unwritable(options.jsonl, "--jsonl")
    with tempfile.TemporaryDirectory(prefix="rlexp-generate-") as folder:
        typed = f"{folder}/"  # the folder of typed prompts is not the user's
        try:
            job = job_of(
                options.words, Path(folder), prompts=options.prompt, file=options.prompts, rows=options.rows,
                samples=options.samples, beside=beside,
            )  # fmt: skip
            sys.stdout.write(report.head(job))
            sys.stdout.flush()
            with busy_message("generates"):
                from rlexp.generate.rank import generate_rank

                answers = on_ranks(generate_rank, job)
        except Interrupted as stop:
            return stop.exit_code
        except UserError as error:
            raise UserError(str(error).replace(typed, "")) from None
    answers = [replace(each, origin=each.origin.removeprefix(typed)) for each in answers]
    sys.stdout.write(report.text(job, answers))
    if options.jsonl is not None:
        report.write(answers, options.jsonl)
    return 0


if __name__ == "__main__":
    sys.exit(main())
