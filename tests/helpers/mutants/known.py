"""Changes that are active and that nothing has to find, and why.

By the file below rlexp/, the line of the source, and the text before and after, as tests/files/mutants_known.tsv lists
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.helpers.paths import FILES


def read() -> Mapping[tuple[str, ...], str]:
    _head, *rows = (FILES / "mutants_known.tsv").read_text(encoding="utf-8").splitlines()
    return {tuple(place): why for *place, why in (row.split("\t") for row in rows)}


KNOWN = read()
