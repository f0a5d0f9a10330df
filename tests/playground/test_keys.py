"""Where the service asks for a key, the page asks its user, and keeps it as long as the tab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import Opened, answer, until, wait_for_end, write
from tests.service.app.test_access import ADMIN, ALICE, BOB, KEYS
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

FORBIDDEN = """Object.defineProperty(window, "sessionStorage", {
  get() { throw new DOMException("no storage here", "SecurityError"); },
});"""


@pytest.fixture(params=["open", "key", "admin"])
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    options: Any = {"api_keys": KEYS, "admin_key": ADMIN, "metrics_access": request.param}
    with listening(fake_runner(save_byte_tokenizer(tmp_path)), **options) as (url, _):
        yield url, request.param


def test_a_key_is_asked_for_and_kept(open_page: Opened, guarded: tuple[str, str]) -> None:
    url, metrics = guarded
    page = open_page(url, ready=False)
    page.wait_for_selector("#key-dialog[open]")
    assert "no API key" in page.inner_text("#key-message")
    assert page.evaluate("document.activeElement.id") == "key-value"
    page.keyboard.type("wrong-0123456789abcdef")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=the API key is not valid")
    page.fill("#key-value", "ключ")
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelector('#key-value').validity.customError")
    page.fill("#key-value", f" {ALICE} ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog", state="hidden")
    until(page, "!document.querySelector('#model').disabled")
    write(page, "abc", max_tokens=5)
    wait_for_end(page)
    assert len(answer(page)) > 0
    assert page.evaluate("Object.values(sessionStorage)[0]") == ALICE
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.reload()
    until(page, "!document.querySelector('#model').disabled")
    assert not page.is_visible("#key-dialog")
    if metrics == "admin":
        page.wait_for_selector("#load-error:not([hidden])")
        assert "No metrics:" in page.inner_text("#load-error")
    else:
        until(page, "document.querySelector('#load b').textContent === '0'")
        assert not page.is_visible("#load-error")


def test_a_key_that_is_no_longer_good(open_page: Opened, guarded: tuple[str, str]) -> None:
    url, _ = guarded

    def expired(route: Any) -> None:
        headers = {**route.request.headers, "x-api-key": "old-0123456789abcdef"}
        route.continue_(headers=headers)

    page = open_page(url, ready=False)
    page.fill("#key-value", BOB)
    page.keyboard.press("Enter")
    until(page, "!document.querySelector('#model').disabled")
    page.route("**/v1/generate", expired)
    write(page, "abc", max_tokens=5)
    page.wait_for_selector("#key-dialog[open]")
    assert "not valid" in page.inner_text("#key-message")
    page.keyboard.press("Escape")
    assert "not valid" in page.inner_text("#write-error")
    page.unroute("**/v1/generate")
    page.click("#key")
    page.click("#key-forget")
    page.wait_for_selector("text=no API key")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_tab_that_may_not_remember(open_page: Opened, server: Server) -> None:
    """Where browsers forbid storage, the page works until it is left."""
    page = open_page(server.url, before=FORBIDDEN)
    write(page, "abc", max_tokens=5)
    wait_for_end(page)
    assert len(answer(page)) > 0
    with page.expect_response("**/v1/states") as made:
        page.click("#save")
    id = made.value.json()["id"]
    page.wait_for_selector(f"[data-state='{id}']")
    page.click(f"[data-state='{id}']")
    assert page.inner_text("#write-before").startswith("abc")
    page.evaluate("document.querySelector('#key').hidden = false")
    page.click("#key")
    page.fill("#key-value", ALICE)
    with page.expect_request("**/v1/models") as asked:
        page.keyboard.press("Enter")
    assert asked.value.headers["x-api-key"] == ALICE
