"""Tell who waits what is being done, and for how long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rlexp.base.command import say
from rlexp.base.durations import duration

EVERY = 8.0  # seconds


@contextlib.contextmanager
def told(doing: str | Callable[[], str | None], tell: Callable[[str], None] = say) -> Iterator[threading.Event]:
    """While the block runs, say now and then on a terminal what is being done. It may change; with None, or once the
    event that is returned is set, nothing is said any more.

    A thread says it, since the block may be an import, or wait for a process.
    """
    over, began = threading.Event(), time.monotonic()
    if not sys.stderr.isatty():
        over.set()

    def tell_of_it() -> None:
        while not over.wait(EVERY):
            text = doing if isinstance(doing, str) else doing()
            if text is None or over.is_set():
                return
            tell(f"{text}, {duration(time.monotonic() - began)} so far")

    thread = threading.Thread(target=tell_of_it, name="told", daemon=True)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()
