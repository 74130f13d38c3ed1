"""Save the pictures of docs/ with the data that they show, so that a test can tell when one is out of date."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
CHUNK = "rlexp shows"  # of the PNG: a text, JSON
FLOATS = 1e-3  # relative: numbers that training computes differ by rounding from machine to machine


def save(figure: Any, path: Path, shows: Any, dpi: int = 120) -> None:
    """Save a figure of matplotlib with what it shows: lists, mappings, texts and numbers."""
    figure.savefig(path, dpi=dpi)
    mark(path, shows)


def mark(path: Path, shows: Any) -> None:
    """Write what a picture shows into its file."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt(CHUNK, json.dumps(shows, ensure_ascii=False), zip=True)
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=info, optimize=True)


def shown(path: Path) -> Any:
    """Return what a picture says that it shows; None if it does not say."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        text = getattr(image, "text", {}).get(CHUNK)
    return None if text is None else json.loads(text)


def same(one: Any, other: Any) -> bool:
    """Return whether two pictures would show the same, up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=FLOATS)
    return bool(one == other)


def numbers_of(text: str, first: str) -> list[list[str]]:
    """Return the cells of a text's table whose head begins so, row by row; no table: no rows."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith(first)), len(lines))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows][2:]


def numbers_on_page(first: str) -> list[list[str]]:
    """Return the cells of the table whose head begins so, on whichever page it is."""
    found = (numbers_of(page.read_text(encoding="utf-8"), first) for page in sorted(DOCS.rglob("*.md")))
    return next(filter(None, found), [])
