"""Make the pictures of the pages from the running product.

    python -m tests.docs.screenshots [--only NAME]

It starts `minserve serve` with the default model, drives the playground in Chromium, load-tests
that server, and writes the files of PICTURES over those in the checkout. Needs Chromium and
`pip install -e '.[test,browser]'`; exit code 2 where one is missing. The answer's seed is fixed,
so only figures of speed differ from one run to the next.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import browser
from tests.docs.pages import ROOT
from tests.e2e.conftest import Server

SENTENCE = "It was a dark night, and the rain"
ENDINGS = (" fell without a sound.", " had driven every one indoors.")
WAIT = 60_000  # ms for an answer


def save(page: Any, text: str) -> str:
    """Save the state after a text; return the selector of its chip."""
    page.fill("#prompt", text)
    with page.expect_response("**/v1/states") as made:
        page.click("#save")
    chip = f"[data-state='{made.value.json()['id']}']"
    page.wait_for_selector(chip)
    return chip


def playground(page: Any, server: Server) -> None:
    """Show a sentence forked under three authors, a tree of states, the inspector of one token.

    A model that offers no starts goes on after the states that are saved here.
    """
    page.goto(server.url)
    page.wait_for_selector("#generate:not([disabled])")
    page.wait_for_selector("#model:not([disabled])")
    author = page.locator("#starts button").first
    if author.is_visible():
        author.click()
        page.wait_for_selector("#starts [aria-pressed=true]")
    opening = save(page, SENTENCE)
    page.click(opening)
    page.fill("#state-card input", "a-dark-night")
    page.click("#state-card >> text=Fork")
    page.wait_for_selector("[data-state='a-dark-night']")
    for ending in ENDINGS:
        page.click(opening)
        save(page, ending)
    page.click("[data-state='a-dark-night']")
    page.click("#tab-fork")
    page.fill("#sentence", SENTENCE)
    for name, value in (("temperature", "0.7"), ("max_tokens", "160"), ("seed", "6")):
        page.fill(f"#sampling-{name}", value)
    page.click("#run-fork")
    page.wait_for_selector("#stop-fork", state="visible")
    page.wait_for_selector("#stop-fork", state="hidden", timeout=WAIT)
    page.locator(".column .token").nth(30).hover()
    page.wait_for_selector("#token-card:not([hidden])")


def load_test(page: Any, server: Server) -> None:
    """Show the page that `python -m loadtest.http --html` writes after a short run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "run.html"
        subprocess.run(
            [
                *(sys.executable, "-m", "loadtest.http", "--url", server.url, "--rate", "4"),
                *("--requests", "120", "--slo", "ttft=200ms,itl=50ms", "--html", str(report)),
            ],
            check=True,
            cwd=ROOT,
        )
        page.goto(report.as_uri())
        page.wait_for_load_state("load")


# File in the checkout: who prepares the page, its size in pixels.
PICTURES: dict[str, tuple[Callable[[Any, Server], None], int, int]] = {
    "service/playground/screenshot.png": (playground, 1280, 1300),
    "loadtest/results/load-test.png": (load_test, 1100, 1120),
}


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PICTURES, help="make one picture (default: all)")
    only = parser.parse_args().only
    if reason := browser.missing():
        print(reason, file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    server = Server("--device", "cpu", "--threads", "1", model=None)
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=browser.executable(), args=["--no-sandbox"]
            )
            for name, (prepare, width, height) in PICTURES.items():
                if only in (None, name):
                    page = chromium.new_page(viewport={"width": width, "height": height})
                    prepare(page, server)
                    page.screenshot(path=ROOT / name)
                    print(f"wrote {name}")
            chromium.close()
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
