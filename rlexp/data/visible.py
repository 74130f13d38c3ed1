"""Text of unknown origin as text that can be shown: what would move the cursor or turn the line around is spelt out."""

from __future__ import annotations

import unicodedata

NEWLINE = "↵\n"
# Marks that reorder a line (bidirectional controls) or that no one sees; joiners of emoji and scripts stay.
SPELT = {0x00AD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029, 0x2060, 0xFEFF}
SPELT |= {*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080)}


def visible(text: str) -> str:
    """Show newlines and control characters as signs."""
    return "".join(map(_sign, text))


def one_line(text: str) -> str:
    """Show a name or a message, also one that holds newlines, or bytes of a path that are not UTF-8."""
    return visible(text.encode("utf-8", "replace").decode("utf-8")).replace(NEWLINE, "↵")


def _sign(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return NEWLINE
    if char == "\t":
        return "⇥"
    if code < 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    if code in SPELT or unicodedata.category(char) in ("Cc", "Cs"):
        return f"⟨U+{code:04X}⟩"
    return char
