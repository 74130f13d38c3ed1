"""Open a page from disk in a real browser, and record its console, errors and requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# The browser itself makes no requests either: no updates, no safe-browsing lists, no QUIC.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
OWN_SCHEMES = ("data:", "blob:")
PATIENCE_MS = 20_000


@dataclass
class Opened:
    """An open page. `strangers` are the requests for anything but the file itself."""

    page: Page
    url: str
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def strangers(self) -> list[str]:
        return [url for url in self.requests if url.partition("#")[0] != self.url and not url.startswith(OWN_SCHEMES)]

    def text(self, testid: str) -> str:
        return self.page.get_by_test_id(testid).inner_text()

    def check(self) -> None:
        """Assert that there are no console messages, errors or requests."""
        told = {"console": self.console, "errors": self.errors, "requests": self.strangers}
        assert not any(told.values()), told


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start headless Chromium, or skip the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    paths = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    path = next((each for each in paths if each is not None), None)
    if path is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome on the PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    *,
    width: int = 1440,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
    fragment: str = "",
    javascript: bool = True,
) -> Iterator[Opened]:
    """Open a file in its own window. Leaving the block checks the console and the requests."""
    touch = width < 600
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        has_touch=touch,
        java_script_enabled=javascript,
    )
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        it = Opened(page, path.resolve().as_uri())
        page.on("console", lambda message: it.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: it.errors.append(str(error)))
        page.on("request", lambda request: it.requests.append(request.url))
        page.goto(it.url + (f"#{fragment}" if fragment else ""))
        yield it
        it.check()
    finally:
        context.close()


def colour_at(page: Page, selector: str, name: str) -> Any:
    """Return a computed style of the first element that matches."""
    return page.locator(selector).first.evaluate("(node, name) => getComputedStyle(node)[name]", name)
