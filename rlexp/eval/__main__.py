"""Evaluate a model or a checkpoint on held-out rows, as a run of the same keys does, and train nothing.

python -m rlexp.eval loss=sft model=hf model.path=FOLDER data=jsonl data.eval_path=FILE
python -m rlexp.eval RUN parallel=ring4 eval.buckets=[512,2048]         the newest checkpoint of a run
python -m rlexp.eval RUN/checkpoints/step-00000050 --json result.json

A checkpoint brings the keys of its run that a curve depends on (model, data, loss), and its precision; those that are
given replace them. Layout and engine are the command's own. The values are those of the run's row of that step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlexp.base.command import Parser, refuse_unwritable
from rlexp.base.printable import fitted
from rlexp.base.waiting import busy_message
from rlexp.config.explain import explained


def main() -> int:
    parser = Parser("rlexp.eval", __doc__)
    parser.add_argument("words", nargs="*", metavar="RUN_OR_CHECKPOINT key=value", help="at most one folder, and "
                        "settings as `python -m rlexp` takes them")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the values to this file")
    return explained(lambda: run(parser.parse_intermixed_args()))


def run(options: argparse.Namespace) -> int:
    from rlexp.eval import report
    from rlexp.eval.job import job_of, on_ranks
    from rlexp.launch.local import Interrupted

    job = job_of(options.words)
    refuse_unwritable(options.json)
    sys.stdout.write(fitted(report.head(job)))
    sys.stdout.flush()
    try:
        with busy_message("evaluates"):
            from rlexp.eval.rank import evaluate_rank

            result = on_ranks(evaluate_rank, job)
    except Interrupted as stop:
        return stop.exit_code
    sys.stdout.write(fitted(report.text(job, result)))
    if options.json is not None:
        report.write(job, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
