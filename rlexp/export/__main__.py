"""Export a checkpoint as a model that transformers loads, or as an adapter that peft loads.

python -m rlexp.export RUN                        the newest complete checkpoint, to RUN/model-step-…
python -m rlexp.export RUN/checkpoints/step-00000050 --out FOLDER --dtype bf16
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlexp.base.command import CommandParser, exit_code
from rlexp.config.schema import ExportDtype


def main() -> int:
    parser = CommandParser("rlexp.export", __doc__)
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="the folder of a run or a checkpoint")
    parser.add_argument("--out", type=Path, help="a new or empty folder for the model")
    parser.add_argument("--dtype", choices=[each.value for each in ExportDtype], default=ExportDtype.auto.value,
                        help="of the weights; default: auto, bf16 after a run in bf16, else fp32")  # fmt: skip
    parser.add_argument("--merged", action="store_true", help="of an adapter: the model with the adapter in it")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    options = parser.parse_args()
    return exit_code(lambda: export(options))


def export(options: argparse.Namespace) -> int:
    from rlexp.export.checkpoint import export_checkpoint  # here, since this module imports torch

    dtype, trusted = ExportDtype[options.dtype], options.trust_remote_code
    place = export_checkpoint(options.source, options.out, dtype, merged=options.merged, trusted=trusted)
    sys.stderr.write(f"done: {place}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
