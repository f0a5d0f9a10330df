"""Starts: a button for each that the model's folder offers, whose state is made when it is used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import Opened, answer, until, wait_for_end, write
from tests.playground.offering import AUSTEN, AUTHORS, DICKENS, STARTS, kept, offering
from tests.service.app.test_access import ALICE, BOB, KEYS


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with offering(tmp_path) as url:
        yield url


def choose(page: Any, id: str) -> None:
    page.click(f"[data-start='{id}']")
    page.wait_for_selector(f"[data-start='{id}'][aria-pressed=true]")


def test_a_state_is_made_when_it_is_first_used(open_page: Opened, url: str) -> None:
    page = open_page(url)
    assert page.locator("#starts button").all_inner_texts() == list(AUTHORS)
    assert kept(url) == {}
    choose(page, AUSTEN)
    text = STARTS[0]["text"]
    assert kept(url) == {AUSTEN: len(text)}
    assert page.evaluate("document.querySelector('#write-before').textContent") == text
    assert "Jane Austen" in page.inner_text(f"[data-state='{AUSTEN}']")
    with page.expect_request("**/v1/generate") as asked:
        write(page, "Emma", max_tokens=5)
    assert asked.value.post_data_json["state"] == AUSTEN
    wait_for_end(page)
    # Later uses begin from the same state, in other tabs as well.
    created = httpx.get(f"{url}/v1/states/{AUSTEN}").json()["created"]
    other = open_page(url)
    choose(other, AUSTEN)
    assert other.evaluate("document.querySelector('#write-before').textContent") == text
    assert httpx.get(f"{url}/v1/states/{AUSTEN}").json()["created"] == created


def test_a_second_press_goes_back_to_the_beginning(open_page: Opened, url: str) -> None:
    page = open_page(url)
    choose(page, AUSTEN)
    page.click(f"[data-start='{AUSTEN}']")
    page.wait_for_selector(f"[data-start='{AUSTEN}'][aria-pressed=false]")
    assert page.get_attribute("[data-state='']", "aria-pressed") == "true"
    assert kept(url) == {AUSTEN: len(STARTS[0]["text"])}


def test_a_state_that_has_gone_is_made_anew(open_page: Opened, url: str) -> None:
    page = open_page(url)
    choose(page, AUSTEN)
    httpx.delete(f"{url}/v1/states/{AUSTEN}")
    write(page, "Emma", max_tokens=5)
    page.wait_for_selector("#write-error [role=alert]")
    page.wait_for_selector(f"[data-start='{AUSTEN}'][aria-pressed=false]")
    choose(page, AUSTEN)
    write(page, "Emma", max_tokens=5)
    wait_for_end(page)
    assert answer(page) and not page.is_visible("#write-error")


def test_among_very_many_states(open_page: Opened, url: str) -> None:
    for id in ("one", "other"):
        httpx.post(f"{url}/v1/states", json={"prompt": "x", "id": id}).raise_for_status()
    page = open_page(url)

    def first(route: Any) -> None:
        route.continue_(url=re.sub("limit=[0-9]+", "limit=1", route.request.url))

    page.route("**/v1/states?*", first)
    page.click("#states-again")
    page.wait_for_selector("text=are shown")
    choose(page, AUSTEN)
    page.wait_for_selector(f"[data-state='{AUSTEN}'][aria-pressed=true]")


def test_what_is_saved_after_a_start_stands_below_it(open_page: Opened, url: str) -> None:
    page = open_page(url)
    choose(page, DICKENS)
    page.fill("#prompt", "Pip.")
    page.click("#save")
    page.wait_for_selector(f"li:has(> [data-state='{DICKENS}']) ul .chip")


def test_a_refusal_is_told_beside_the_buttons(open_page: Opened, url: str) -> None:
    def refuse(route: Any) -> None:
        error = {"message": "too many states", "param": None, "code": "state_quota", "type": "t"}
        headers = {"retry-after": "1", "content-type": "application/json"}
        route.fulfill(status=429, headers=headers, body=json.dumps({"error": error}))

    page = open_page(url)
    page.route("**/v1/states", refuse)
    page.click(f"[data-start='{AUSTEN}']")
    page.wait_for_selector("#starts-error [role=alert]:has-text('too many states')")
    page.unroute("**/v1/states")
    page.wait_for_selector("#starts-error button:text-is('Try again')")
    page.click("#starts-error button")
    page.wait_for_selector(f"[data-start='{AUSTEN}'][aria-pressed=true]")
    assert not page.is_visible("#starts-error")


def test_each_key_has_states_of_its_own(open_page: Opened, tmp_path: Path) -> None:
    with offering(tmp_path, api_keys=KEYS) as url:
        page = open_page(url, ready=False)
        page.fill("#key-value", ALICE)
        page.keyboard.press("Enter")
        until(page, "!document.querySelector('#model').disabled")
        choose(page, AUSTEN)
        assert set(kept(url, authorization=f"Bearer {ALICE}")) == {AUSTEN}
        assert kept(url, authorization=f"Bearer {BOB}") == {}


def test_a_model_without_starts(page: Any, server: Server) -> None:
    assert not page.is_visible("#starts") and page.is_visible("#tab-fork")


def test_a_server_that_keeps_no_states_says_so(open_page: Opened, tmp_path: Path) -> None:
    with offering(tmp_path, max_states=0) as url:
        page = open_page(url)
        assert "--max-states 0" in page.inner_text("#no-states")
        for hidden in ("#starts", "#tab-fork", "#tab-read", "#tree", "#save"):
            assert not page.is_visible(hidden)
        page.focus("#tab-write")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-score"
        page.click("#tab-write")
        write(page, "Emma", max_tokens=5)
        wait_for_end(page)
        assert answer(page)


def test_markup_in_a_title_is_text(open_page: Opened, tmp_path: Path) -> None:
    title = "<img src=x onerror=alert(1)>"
    with offering(tmp_path, [{"name": "x", "title": title, "text": "x"}]) as url:
        page = open_page(url)
        assert page.inner_text("#starts button") == title
        choose(page, "start:x")
        assert title in page.inner_text("[data-state='start:x']")
        assert page.locator("img").count() == 0
