"""Tell who waits what is being done, and for how long, or how far it has come."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rlexp.base.command import say
from rlexp.base.durations import duration

EVERY = 8.0  # seconds


@contextlib.contextmanager
def busy_message(doing: str | Callable[[], str | None], tell: Callable[[str], None] = say) -> Iterator[threading.Event]:
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


@contextlib.contextmanager
def progress(shown: bool, **bar: Any) -> Iterator[Callable[[int], Any]]:
    """Show on a terminal how far something has come: yield what is told of each step on the way."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _more: None
        return
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own is shared between processes, and says so when a process fails
    with tqdm(leave=False, **bar) as shown_bar:
        yield shown_bar.update
