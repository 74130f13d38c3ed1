"""Where the pages of docs/ are: in a checkout, or in the installed package. Messages name them as docs/NAME.md."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")
_PACKAGE = Path(__file__).resolve().parent.parent


def addressed(text: str) -> str:
    """Return a text in which each page that is not below the current folder has its whole path."""
    return _PAGE.sub(lambda match: _address(match[0]), text)


def _address(page: str) -> str:
    file = next((path for root in (_PACKAGE, _PACKAGE.parent) if (path := root / page).is_file()), None)
    here = Path(page)
    return page if file is None or (here.is_file() and here.samefile(file)) else str(file)
