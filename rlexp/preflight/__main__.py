"""Predict what a run needs on hardware that is not here: memory, time, and the longest sequence that fits.

python -m rlexp.preflight model=hf model.path=FOLDER parallel=ring8 hardware=h100 launch.nproc=8
python -m rlexp.preflight --json answer.json data.max_length=131072 memory.checkpointing=true hardware=h200

The real training step runs on fake tensors without memory, for one rank, from the model's config.json alone: no
weights, no GPU, no network. The overrides are those of `python -m rlexp`; hardware=… names the GPUs. The exit code is 0
if the run fits, and 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rlexp.base.command import Parser, refuse_unwritable
from rlexp.config.explain import explained


def main() -> int:
    parser = Parser(
        prog="python -m rlexp.preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as `python -m rlexp` takes them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the answer to this file")
    return explained(lambda: preflight(parser.parse_intermixed_args()))


def preflight(options: argparse.Namespace) -> int:
    from rlexp.config.elsewhere import compose_elsewhere
    from rlexp.preflight.quiet import quietly

    compose_elsewhere(options.overrides)  # what is wrong with it is said before torch is imported
    refuse_unwritable(options.json)
    quietly()
    from rlexp.preflight import report
    from rlexp.preflight.answer import answer

    found = answer(options.overrides)
    sys.stdout.write(report.text(found))
    if options.json is not None:
        options.json.write_text(json.dumps(report.plain(found), indent=1) + "\n", encoding="utf-8")
    return 0 if found.fits else 1


if __name__ == "__main__":
    sys.exit(main())
