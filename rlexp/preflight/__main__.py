"""Predict what a run needs on hardware that is not here: memory, time, and the longest sequence that fits.

python -m rlexp.preflight model=hf model.path=FOLDER parallel=ring8 hardware=h100 launch.nproc=8
python -m rlexp.preflight --json answer.json data.max_length=131072 memory.checkpointing=true hardware=h200

python -m rlexp.preflight --longest --verbose …         also the longest sequences, and what the sums are made of

The real training step runs on fake tensors without memory, for one rank, from the model's config.json alone: no
weights, no GPU, and no network but for the config.json of a model on the hub, once. The overrides are those of
`python -m rlexp`; hardware=… names the GPUs. The exit code is 0 if the run fits, and 1 if it does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rlexp.base.command import Parser, refuse_unwritable
from rlexp.base.printable import fitted
from rlexp.config.explain import explained
from rlexp.config.schema import HFModelConfig


def main() -> int:
    parser = Parser("rlexp.preflight", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as `python -m rlexp` takes them")
    parser.add_argument("--longest", action="store_true", help="also search the longest sequences that fit")
    parser.add_argument("--verbose", action="store_true", help="also show what the sums are made of")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the answer to this file")
    return explained(lambda: preflight(parser.parse_intermixed_args()))


def preflight(options: argparse.Namespace) -> int:
    from rlexp.config.elsewhere import compose_elsewhere
    from rlexp.preflight import quietly

    began = time.monotonic()
    cfg = compose_elsewhere(options.overrides)  # what is wrong with it is said before torch is imported
    refuse_unwritable(options.json)
    local = not isinstance(cfg.model, HFModelConfig) or Path(cfg.model.path).expanduser().exists()
    source = "" if local else ", which is on the hub or in its cache"
    sys.stderr.write(f"rlexp preflight: imports torch, and reads config.json of {cfg.model.called}{source}\n")
    quietly()
    from rlexp.preflight import report
    from rlexp.preflight.answer import answer
    from rlexp.preflight.report import Progress

    sharding = options.verbose or options.json is not None
    result = answer(options.overrides, longest=options.longest, sharding=sharding, watch=Progress(began))
    sys.stdout.write(fitted(report.text(result, verbose=options.verbose)))
    if options.json is not None:
        options.json.write_text(json.dumps(report.plain(result), indent=1) + "\n", encoding="utf-8")
    return 0 if result.fits else 1


if __name__ == "__main__":
    sys.exit(main())
