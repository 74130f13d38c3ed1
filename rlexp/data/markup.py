"""HTML from elements: every text is escaped, so that no row can become markup."""

from __future__ import annotations

import html

from rlexp.compare.page import utf8


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *children: str | None, **attributes: object) -> Markup:
    """Return an element. Children that are no markup are text; `class_` is the attribute `class`; None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(utf8(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: str | None) -> Markup:
    return Markup("".join(
        child if isinstance(child, Markup) else html.escape(utf8(child)) for child in children if child is not None
    ))  # fmt: skip
