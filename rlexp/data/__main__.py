"""Show what training will see: the rows that are recognised, lengths, packs, and samples token by token.

python -m rlexp.data data=jsonl data.path=FILE model=hf model.path=FOLDER
python -m rlexp.data --html page.html --samples 10 data=hf data.path=FOLDER parallel=ring8

It reads the rows as the run would, and leaves the same tokens in the cache. The overrides are those of
`python -m rlexp`. The exit code is 0 if the run can train on the rows, and 1 if it cannot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlexp.base import plain_json
from rlexp.base.command import Parser, exit_code, refuse_unwritable
from rlexp.base.errors import ConfigError, UserError
from rlexp.base.files import write_text
from rlexp.base.waiting import busy_message
from rlexp.config.explain import explain
from rlexp.config.load import compose_config


def main() -> int:
    return exit_code(shown)


def shown() -> int:
    """Show the data. A mistake in the configuration is one message, as for a run; the rest is as for files."""
    try:
        return show(parse())
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        raise UserError(message) from None


def parse() -> argparse.Namespace:
    parser = Parser("rlexp.data", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as `python -m rlexp` takes them")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="samples to show (default: 3)")
    options = parser.parse_intermixed_args()
    if options.samples < 0:
        raise ConfigError(f"--samples={options.samples}: must be 0 or more.")
    return options


def show(options: argparse.Namespace) -> int:
    cfg = compose_config(options.overrides)  # what is wrong with it is said before torch is imported
    refuse_unwritable(options.json)
    refuse_unwritable(options.html, "--html")
    with busy_message("reads the rows"):
        from rlexp.data import draw, page
        from rlexp.data.answer import preview
        from rlexp.data.facts import plain

        facts = preview(cfg, options.samples)
    draw.show(facts)
    if options.json is not None:
        write_text(options.json, plain_json.dumps(plain(facts), indent=1) + "\n")
    if options.html is not None:
        write_text(options.html, page.render(facts))
    if written := [str(file) for file in (options.json, options.html) if file is not None]:
        sys.stdout.write(f"\nwrote {' and '.join(written)}\n")
    return 1 if facts.problems else 0


if __name__ == "__main__":
    sys.exit(main())
