"""Draw the terminal of `rlexp.data`: what it shows of real preferences, in the colours of a terminal.

    python -m bench.data_picture --write docs/data.png

Needs the model of `+experiment=smollm_hh` (see conf/experiment/smollm_hh.yaml), playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from bench.browser import chromium
from bench.pictures import mark
from rlexp.config.load import compose_config
from rlexp.data import draw
from rlexp.data.answer import preview

ROWS = Path(__file__).resolve().parent.parent / "conf" / "experiment" / "hh_helpful.jsonl.gz"
SAMPLES = 1
WORDS = ("+experiment=smollm_hh", f"data.path={ROWS.name}")  # a relative path, so that no folder of a machine is shown
COMMAND = f"python -m rlexp.data {' '.join(WORDS)} --samples {SAMPLES}"
WIDTH = 88
PIXELS = 800
THEME = TerminalTheme(
    (22, 24, 29),
    (222, 224, 230),
    [(22, 24, 29), (224, 108, 117), (120, 200, 110), (229, 192, 123), (97, 175, 239), (214, 130, 230), (86, 182, 194),
     (222, 224, 230)],
    [(120, 124, 134), (224, 108, 117), (120, 200, 110), (229, 192, 123), (97, 175, 239), (214, 130, 230),
     (86, 182, 194), (255, 255, 255)],
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data_picture", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--write", type=Path, required=True, help="the picture, a PNG")
    picture = parser.parse_args().write.resolve()
    console = drawn()
    text = console.export_text(clear=False)
    folders = [word for word in text.split() if word.startswith("/") and word != "/"]
    photograph(console.export_svg(title="", theme=THEME), picture)
    mark(picture, text.splitlines())
    print(f"{picture.name}: {COMMAND}")
    sys.exit(f"it shows folders of this machine: {', '.join(folders)}" if folders else None)


def drawn() -> Console:
    """Return the terminal with the command and what it shows."""
    with contextlib.chdir(ROWS.parent):
        facts = preview(compose_config(list(WORDS)), SAMPLES)
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      highlight=False)  # fmt: skip
    console.print(Text.assemble(("$ ", "bold cyan"), (COMMAND, "bold")), "")
    console.print(draw.page(facts, WIDTH, colours=True))
    return console


def photograph(svg: str, picture: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rlexp-data-") as place, chromium() as browser:
        page = Path(place) / "page.html"
        style = "body {margin: 0} svg {display: block; width: 100%}"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{svg}", encoding="utf-8")
        window = browser.new_page(viewport={"width": PIXELS, "height": 10}, device_scale_factor=1.25)
        window.goto(page.as_uri())
        window.screenshot(path=picture, full_page=True)


if __name__ == "__main__":
    main()
