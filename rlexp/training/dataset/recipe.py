"""From a part of a source's rows to a block of examples: what every process that tokenizes does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlexp.training.dataset.messages import FieldError
from rlexp.training.dataset.row_files import FilePart, Unreadable, parsed
from rlexp.training.dataset.row_shapes import Shape
from rlexp.training.dataset.store import Block, Origin, StoreFacts, block_of, labels_of
from rlexp.training.dataset.tokens import Encoder, Refused, notes_of
from rlexp.training.types import Example, Row

UNUSABLE = "unusable, and left out by data.bad_rows=drop"
Place = tuple[int, int]  # a file's number and a row's


def name_of_row(files: Sequence[str], file: int, row: int) -> str:
    """Name a row by the file it stands in: `pairs.jsonl:17`, the line, or the row where a file has no lines."""
    return f"{files[file]}:{row}"


@dataclass(frozen=True)
class Recipe:
    """How rows of one shape become examples."""

    shape: Shape
    encoder: Encoder
    names: Origin
    drop_bad: bool
    system: str | None
    options: Mapping[str, Any]

    def block(self, file: int, part: FilePart) -> tuple[Block, list[Refused]]:
        """Tokenize a part. A row that cannot be used is refused, which stops the run, or left out and noted."""
        read = list(self._rows(file, part))
        refused = [(place, row) for place, row in read if isinstance(row, Refused)]
        rows = [(place, row) for place, row in read if isinstance(row, Row)]
        kept: list[tuple[int, int, Example]] = []
        counts: Counter[str] = Counter()
        firsts: dict[str, Sequence[int]] = {}
        for (place, _), outcome in zip(rows, self.encoder.encode([row for _, row in rows]), strict=True):
            if isinstance(outcome, Example):
                kept.append((*place, outcome))
            elif isinstance(outcome, Refused):
                refused.append((place, outcome))
            for note in notes_of(outcome):
                counts[note] += 1
                firsts.setdefault(note, place)
        refused.sort(key=lambda each: each[0])
        bad = [(place, each) for place, each in refused if self.drop_bad and each.bad]
        problems = [each for _, each in refused if not (self.drop_bad and each.bad)]
        if bad:
            counts[UNUSABLE] += len(bad)
            firsts[UNUSABLE] = bad[0][0]
        lines = [{"file": place[0], "row": place[1], "said": each.text} for place, each in bad]
        without = [(file, row) for file, row, example in kept if example.margin is None]
        no_margin = (len(without), *without[0]) if without else (0, 0, 0)
        labels = labels_of(example for _, _, example in kept)
        facts = StoreFacts(len(read), dict(counts), firsts, _highest(kept), no_margin, labels)
        return block_of(kept, lines, facts), problems

    def _rows(self, file: int, part: FilePart) -> Iterator[tuple[Place, Row | Refused]]:
        for number, fields in parsed(part):
            origin = self.names(file, number)
            if isinstance(fields, Unreadable):
                yield (file, number), Refused(origin, fields.rule)
                continue
            try:
                row: Row | Refused = self.shape.row(fields, origin, self.system, self.options)
            except FieldError as error:
                row = Refused(origin, str(error))
            yield (file, number), row


def _highest(kept: Sequence[tuple[int, int, Example]]) -> Sequence[int]:
    return max(((example.highest(), file, row) for file, row, example in kept), default=(-1, 0, 0), key=lambda t: t[0])
