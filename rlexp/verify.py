"""Prove on your own configuration that the layout moves nothing, before days are spent on it.

python -m rlexp.verify parallel=ring4 model=hf model.path=FOLDER data=jsonl data.path=FILE
python -m rlexp.verify --steps 5 --json verdict.json train.precision=bf16 engine=zero3

The first optimizer steps run on the chosen layout and on a plain one-process reference, in float64 and then in the
run's own precision. Exit code 0 if they agree, 1 if not, with the first difference and where to look. The overrides
are those of `python -m rlexp`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlexp.config.explain import explain
from rlexp.config.load import compose_config
from rlexp.errors import ConfigError


def main() -> int:
    parser = Parser(
        prog="python -m rlexp.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    from rlexp.launch.local import Interrupted

    try:
        options = parser.parse_intermixed_args()
        from rlexp.prove.report import run

        cfg = compose_config(options.overrides)
        refuse_unwritable(options.json)
        return run(cfg, options.steps, options.json)
    except Interrupted as stop:
        return stop.exit_code
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        sys.stderr.write(f"rlexp: {message}\n")
        return 1


def refuse_unwritable(file: Path | None) -> None:
    """Before the minutes are spent that its content takes."""
    if file is None:
        return
    try:
        file.touch()
    except OSError as error:
        raise ConfigError(f"--json={file}: cannot be written ({error.strerror}). Give a file that can.") from None


class Parser(argparse.ArgumentParser):
    """A wrong option is a user's mistake like any other."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}. See python -m rlexp.verify --help.")


if __name__ == "__main__":
    sys.exit(main())
