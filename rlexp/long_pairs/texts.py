"""The texts that long pairs are made of: files and folders of text, or the Python standard library's own source."""

from __future__ import annotations

import platform
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlexp.base.errors import DataError

LICENCE = "PSF-2.0"  # of the Python standard library
LEFT_OUT = ("test", "tests", "site-packages", "dist-packages", "__pycache__")  # folders of the standard library
MAKES = "Give files of text (UTF-8), or leave --texts out: the Python standard library is taken then."


@dataclass(frozen=True)
class Texts:
    """Files of text, with their lengths in characters."""

    named: str  # what they are, for the summary
    files: tuple[Path, ...]
    lengths: tuple[int, ...]
    no_text: int = 0  # files of the folders that are no text, and were left out

    @property
    def characters(self) -> int:
        return sum(self.lengths)

    def shuffled(self, draw: random.Random, least: int) -> str:
        """Join files in a random order, until there are so many characters or no file is left."""
        order = draw.sample(range(len(self.files)), len(self.files))
        parts: list[str] = []
        for at in order:
            parts.append(self.files[at].read_text(encoding="utf-8"))
            least -= self.lengths[at]
            if least <= 0:
                break
        return "\n".join(parts)


def given(places: Sequence[Path]) -> Texts:
    """Read the files, and all files of the folders; a file of a folder may be something else than text."""
    lengths: dict[Path, int] = {}
    no_text = 0
    for place in places:
        if not place.is_file() and not place.is_dir():
            raise DataError(f"--texts={place}: no such file or folder. {MAKES}")
        for file in [place] if place.is_file() else sorted(_files(place)):
            length = _characters(file)
            if length is None and place.is_file():
                raise DataError(f"--texts={place}: is not a text in UTF-8. {MAKES}")
            if length is None:
                no_text += 1
            else:
                lengths[file] = length
    if not sum(lengths.values()):
        raise DataError(f"--texts={' '.join(map(str, places))}: holds no text. {MAKES}")
    return Texts(", ".join(map(str, places)), tuple(lengths), tuple(lengths.values()), no_text)


def of_python() -> Texts:
    """Return the source of the standard library of this Python, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    lengths = {file: length for file in sorted(_files(folder)) if file.suffix == ".py"
               and not {*file.relative_to(folder).parts} & {*LEFT_OUT} and (length := _characters(file))}  # fmt: skip
    if not lengths:
        raise DataError("--texts: the source of this Python's standard library is not here. Give files of text.")
    named = f"the source of Python {platform.python_version()}'s standard library (licence {LICENCE})"
    return Texts(named, tuple(lengths), tuple(lengths.values()))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, but for hidden ones."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _characters(file: Path) -> int | None:
    """Count the characters of a text; None for a file that is something else."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"--texts: {file}: cannot be read ({error.strerror}). Leave it out.") from None
    return None if "\0" in text else len(text)
