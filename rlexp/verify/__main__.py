"""Verify that your own configuration trains the same on its layout as in one process, before you spend days on it.

python -m rlexp.verify parallel=ring4 model=hf model.path=FOLDER data=jsonl data.path=FILE
python -m rlexp.verify --steps 5 --json result.json train.precision=bf16 engine=zero3
python -m rlexp.verify loss=grpo reward.rule=length parallel=ring2

The first optimizer steps run as configured, at their plainest on one rank, and by transformers alone: in float64, and
then in the run's own precision. The exit code is 0 if they agree; otherwise it is 1, and the report shows the first
difference, the settings that make it, and the folder whose code to look at. The overrides are those of `python -m
rlexp`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlexp.base.command import Parser, refuse_unwritable
from rlexp.config.explain import explained
from rlexp.config.load import compose_config

STEPS = "optimizer steps (default: 3; of losses that generate samples, those of a rollout and one more, 17 at most)"
NO_SEARCH = "after a difference, do not look for the settings at fault, which takes further starts"


def main() -> int:
    parser = Parser("rlexp.verify", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as `python -m rlexp` takes them")
    parser.add_argument("--steps", type=int, metavar="N", help=STEPS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.add_argument("--no-search", action="store_true", help=NO_SEARCH)
    return explained(lambda: run(parser.parse_intermixed_args()))


def run(options: argparse.Namespace) -> int:
    from rlexp.launch.local import Interrupted
    from rlexp.verify import report
    from rlexp.verify.verification import refuse

    refuse(options.steps)
    cfg = compose_config(options.overrides)
    refuse_unwritable(options.json)
    try:
        return report.run(cfg, options.steps, options.json, search=not options.no_search)
    except Interrupted as stop:
        return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
