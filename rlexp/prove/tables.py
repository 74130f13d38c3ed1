"""Tables that a program writes into a page of docs/, between two markers."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def put(page: Path, text: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"{page}: has no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
