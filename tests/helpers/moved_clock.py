"""A clock that the watches of several ranks share, and that one of them moves."""

from __future__ import annotations

import math
import mmap
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from rlexp.launch import watch

SIZE = struct.calcsize("d")


class MovedClock(watch.Clock):
    """The time, and until when the watch of each rank pauses, in a file that all ranks map."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        with path.open("r+b") as file:
            self._times = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def file(path: Path, ranks: int) -> Path:
        """Make the file: the time is 0, and no watch pauses yet."""
        path.write_bytes(struct.pack(f"{1 + ranks}d", 0.0, *[-math.inf] * ranks))
        return path

    def now(self) -> float:
        return self._at(0)

    def pause(self, ended: threading.Event, seconds: float) -> bool:
        self._set(1 + self.rank, self.now() + seconds)
        while self.now() < self._at(1 + self.rank) and not ended.is_set():
            time.sleep(0.001)
        return ended.is_set()

    def move(self, seconds: float, ranks: Iterable[int]) -> None:
        """Let so many seconds pass, as the watches of these ranks see them: each looks as often as it wants to."""
        end = self.now() + seconds
        while self.now() < end:
            self._set(0, min(end, *self._pauses(ranks)))
        self._pauses(ranks)

    def jump(self, seconds: float, ranks: Iterable[int]) -> None:
        """Let so many seconds pass at once, as for ranks that all stand still meanwhile."""
        self._pauses(ranks)
        self._set(0, self.now() + seconds)
        self._pauses(ranks)

    def _pauses(self, ranks: Iterable[int]) -> list[float]:
        """Wait until all these watches pause, and return until when."""
        while min(until := [self._at(1 + rank) for rank in ranks]) <= self.now():
            time.sleep(0.001)
        return until

    def _at(self, place: int) -> float:
        return float(struct.unpack_from("d", self._times, place * SIZE)[0])

    def _set(self, place: int, value: float) -> None:
        struct.pack_into("d", self._times, place * SIZE, value)
