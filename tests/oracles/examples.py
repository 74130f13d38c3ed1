"""The sides of a pair, as the second readers name them."""

from __future__ import annotations

from rlexp.config.schema.row_kinds import SIDES as SIDES_OF
from rlexp.config.schema.row_kinds import Kind

SIDES = SIDES_OF[Kind.pairs]
