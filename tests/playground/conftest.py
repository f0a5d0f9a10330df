"""The playground in a real browser, before a real service. Every page is watched: whatever a test
does, no script may fail, no policy may be violated, and nothing may be asked of another origin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser import executable
from tests.e2e.conftest import Server

HERE = Path(__file__).parent
PROMPT = "ROMEO:\nBut soft, what light through yonder window breaks?\n"
VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => {
  violations.push(`${event.violatedDirective}: ${event.blockedURI}`);
});
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="package")  # its event loop is in the way of other packages' tests
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, in a container, it has no sandbox of its own.
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A bundled model that offers no starts."""
    running = Server("--device", "cpu", "--threads", "1", model="shakespeare-mingru")
    yield running
    assert running.stop() == 0


Opened = Callable[..., Any]


@contextmanager
def opening(chromium: Any) -> Iterator[Opened]:
    """Opens watched pages; what was seen of them is judged at the end."""
    contexts, pages, wrong = [], [], []

    def open_page(
        url: str,
        *,
        path: str = "/",
        ready: bool = True,
        route: Any = None,
        before: str = "",
        **options: Any,
    ) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.add_init_script(VIOLATIONS + before)
        page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
        page.on("console", lambda said: wrong.extend(_complaints(said)))
        page.on("request", lambda asked: wrong.extend(_foreign(asked.url, url)))
        if route is not None:
            page.route(*route)
        page.goto(f"{url}{path}")
        if ready:
            until(page, "!document.querySelector('#model').disabled")
        pages.append(page)
        return page

    try:
        yield open_page
        for page in pages:
            wrong += page.evaluate("violations")
        assert wrong == []
    finally:
        for context in contexts:
            context.close()


def _complaints(said: Any) -> list[str]:
    # An answer that is an error is told there too; it is what some tests are about.
    told = said.type in ("error", "warning") and "Failed to load resource" not in said.text
    return [f"console: {said.text}"] if told else []


def _foreign(asked: str, url: str) -> list[str]:
    return [] if urlsplit(asked).netloc == urlsplit(url).netloc else [f"asked for {asked}"]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Opened]:
    with opening(chromium) as opened:
        yield opened


@pytest.fixture
def page(open_page: Opened, server: Server) -> Any:
    return open_page(server.url)


def until(page: Any, condition: str, seconds: float = 20) -> None:
    """Waits for an expression to be true; the page's policy forbids playwright's own way."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never: {condition}"
        page.wait_for_timeout(20)


def write(page: Any, prompt: str = PROMPT, **sampling: Any) -> None:
    """Fills in a prompt and parameters, and generates."""
    page.fill("#prompt", prompt)
    for name, value in {"seed": 7, "max_tokens": 40, **sampling}.items():
        page.fill(f"#sampling-{name}", str(value))
    page.click("#generate")


def wait_for_end(page: Any) -> None:
    page.wait_for_selector("#stop", state="hidden")


def answer(page: Any) -> str:
    """The answer's text as it stands in the document."""
    return str(page.evaluate("document.querySelector('#answer').textContent"))
