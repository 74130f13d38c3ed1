"""Headless Chromium for the report's page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the Chromium that is on the PATH. Needs playwright."""
    from playwright.sync_api import sync_playwright

    path = next(each for name in ("chromium", "chromium-browser", "google-chrome") if (each := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()
