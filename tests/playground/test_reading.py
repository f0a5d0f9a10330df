"""Reading: a long text becomes a state, piece by piece, and is gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.playground.conftest import Opened, answer, until, wait_for_end, write
from tests.playground.offering import AUSTEN, STARTS, kept, offering

LINE = "Alles neu macht der Mai, sagt man; caf\u00e9 \U0001f600.\n"
BOOK = LINE * 2000  # 92 kB


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with offering(tmp_path) as url:
        yield url


@pytest.fixture
def page(open_page: Opened, url: str) -> Any:
    page = open_page(url)
    page.click("#tab-read")
    return page


def give(page: Any, raw: bytes, name: str = "The Caf\u00e9, 2.txt") -> None:
    file = {"name": name, "mimeType": "text/plain", "buffer": raw}
    page.set_input_files("#read-file", files=[file])


def read(page: Any) -> None:
    page.click("#run-read")
    page.wait_for_selector("#ask-on")


def same_as(url: str, state: str, text: str) -> bool:
    """Whether a state knows what one that has read `text` in one piece does."""
    httpx.post(f"{url}/v1/states", json={"prompt": text, "id": "whole"}).raise_for_status()
    body = {"prompts": [""], "max_tokens": 20, "temperature": 0}
    answers = [
        httpx.post(f"{url}/v1/generate", json={**body, "state": id}).json()["results"][0]["text"]
        for id in (state, "whole")
    ]
    return kept(url)[state] == kept(url)["whole"] and answers[0] == answers[1]


def test_a_file_is_read_and_asked_on(page: Any, url: str) -> None:
    asked: list[Any] = []
    page.on("request", lambda one: asked.append(one) if "/text?" in one.url else None)
    raw = b"\xef\xbb\xbf" + BOOK.replace("\n", "\r\n").encode()
    give(page, raw)
    assert page.input_value("#read-name") == "The-Cafe-2"
    assert "The Caf\u00e9, 2.txt" in page.inner_text("#read-source")
    read(page)
    assert len(asked) > 2
    assert set(kept(url)) == {"The-Cafe-2"}  # what was between two pieces has gone
    assert same_as(url, "The-Cafe-2", BOOK)
    expires = httpx.get(f"{url}/v1/states/The-Cafe-2").json()["expires"]
    created = httpx.get(f"{url}/v1/states/The-Cafe-2").json()["created"]
    assert expires - created > 80_000
    assert page.evaluate("document.querySelector('#read-progress').position") == 1
    page.click("#ask-on")
    page.wait_for_selector("[data-state='The-Cafe-2'][aria-pressed=true]")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.inner_text("#write-before").endswith(LINE)
    answers = []
    for question in ("Who?", "Who?", "Why?"):
        with page.expect_request("**/v1/generate") as one:
            write(page, question, max_tokens=10)
        assert one.value.post_data_json["state"] == "The-Cafe-2"
        wait_for_end(page)
        answers.append(answer(page))
    assert answers[0] == answers[1] and answers[0]


def test_a_pasted_text_is_read_after_the_chosen_state(page: Any, url: str) -> None:
    page.click(f"[data-start='{AUSTEN}']")
    page.wait_for_selector(f"[data-state='{AUSTEN}'][aria-pressed=true]")
    page.fill("#book", "She was handsome.")
    page.fill("#read-name", "emma")
    read(page)
    page.wait_for_selector(f"li:has(> [data-state='{AUSTEN}']) [data-state='emma']")
    page.click("#ask-on")
    page.wait_for_selector("[data-state=emma][aria-pressed=true]")
    before = page.evaluate("document.querySelector('#write-before').textContent")
    assert before == STARTS[0]["text"] + "She was handsome."
    assert same_as(url, "emma", STARTS[0]["text"] + "She was handsome.")


def test_a_long_paste_is_kept_out_of_the_field(page: Any, url: str) -> None:
    page.evaluate(
        "(text) => { const data = new DataTransfer(); data.setData('text/plain', text);"
        "document.querySelector('#book').dispatchEvent(new ClipboardEvent('paste',"
        "{clipboardData: data, bubbles: true, cancelable: true})); }",
        BOOK,
    )
    assert page.inner_text("#read-source").startswith("What was pasted")
    assert not page.is_visible("#book")
    page.fill("#read-name", "pasted")
    read(page)
    assert same_as(url, "pasted", BOOK)
    page.click("#read-other")
    assert page.evaluate("document.activeElement.id") == "book"
    assert page.input_value("#book") == ""


def test_without_a_name_the_server_makes_one_up(page: Any, url: str) -> None:
    page.fill("#book", "A tale.")
    read(page)
    [id] = kept(url)
    assert id.startswith("st_") and id in page.inner_text("#read-note")


def test_what_is_stopped_leaves_nothing(page: Any, url: str) -> None:
    give(page, BOOK.encode())
    pieces = []

    def slow(route: Any) -> None:
        pieces.append(route.request.url)
        if len(pieces) < 3:
            route.continue_()  # the third one is not answered

    page.route("**/v1/states/text?*", slow)
    page.click("#run-read")
    until(page, "document.querySelector('#read-progress').position > 0")
    assert page.locator("#tree .chip").count() == 1  # half-read texts are no states to choose
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Nothing was kept")
    page.unroute("**/v1/states/text?*")
    until(page, "fetch('v1/states').then((one) => one.json()).then((all) => !all.data.length)")
    assert page.is_visible("#run-read") and not page.is_visible("#ask-on")
    read(page)  # and the same text can be read whole
    assert set(kept(url)) == {"The-Cafe-2"}


def test_a_full_server_goes_on_where_it_was(page: Any, url: str) -> None:
    pieces = []

    def refuse_third(route: Any) -> None:
        pieces.append(route.request.url)
        if len(pieces) != 3:
            return route.continue_()
        error = {"message": "the queue is full", "type": "t", "param": None, "code": "queue_full"}
        headers = {"retry-after": "1", "content-type": "application/json"}
        route.fulfill(status=429, headers=headers, body=json.dumps({"error": error}))

    page.route("**/v1/states/text?*", refuse_third)
    give(page, BOOK.encode())
    page.click("#run-read")
    page.wait_for_selector("#read-error button:text-is('Try again')")
    page.click("#read-error button")
    page.wait_for_selector("#ask-on")
    assert same_as(url, "The-Cafe-2", BOOK)
    assert sum("state=" not in one for one in pieces) == 1  # it did not begin anew


@pytest.mark.parametrize(
    ("raw", "name", "message"),
    [
        (b"", "x", "There is nothing to read"),
        (b"abc", "no blanks", "without spaces"),
        (b"abc", "there", "named there already"),
        (BOOK.encode("utf-16"), "x", "is not UTF-8"),
        (BOOK.encode() + b"\xff", "x", "is not UTF-8"),
    ],
)
def test_what_cannot_be_read(page: Any, url: str, raw: bytes, name: str, message: str) -> None:
    httpx.post(f"{url}/v1/states", json={"prompt": "By hand.", "id": "there"})
    give(page, raw)
    page.fill("#read-name", name)
    page.click("#run-read")
    page.wait_for_selector("#read-error [role=alert]")
    assert message in page.inner_text("#read-error")
    assert page.is_visible("#run-read") and not page.is_visible("#ask-on")
    until(page, "fetch('v1/states').then((one) => one.json()).then((all) => all.data.length === 1)")
