"""Forking: one sentence goes on after up to three states, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import Opened, until
from tests.playground.offering import (
    AUSTEN,
    AUTHORS,
    CARROLL,
    DICKENS,
    SENTENCE,
    TWAIN,
    kept,
    offering,
)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with offering(tmp_path) as url:
        yield url


@pytest.fixture
def page(open_page: Opened, url: str) -> Any:
    page = open_page(url)
    page.click("#tab-fork")
    return page


def fork(page: Any, sentence: str = SENTENCE, **sampling: Any) -> None:
    page.fill("#sentence", sentence)
    for name, value in {"seed": 7, "max_tokens": 40, **sampling}.items():
        page.fill(f"#sampling-{name}", str(value))
    page.click("#run-fork")


def wait_for_all(page: Any) -> None:
    page.wait_for_selector("#stop-fork", state="hidden")


def column(page: Any, number: int) -> Any:
    return page.locator("#fork-columns .column").nth(number)


def text(page: Any, number: int) -> str:
    return str(column(page, number).locator(".text").evaluate("(one) => one.textContent"))


def expected(url: str, state: str | None, prompt: str = SENTENCE, tokens: int = 40) -> str:
    body = {"prompts": [prompt], "max_tokens": tokens, "seed": 7, "temperature": 0.8}
    if state is not None:
        body["state"] = state
    said = httpx.post(f"{url}/v1/generate", json=body, timeout=60).json()
    return str(said["results"][0]["text"])


def test_three_authors_go_on_with_one_sentence(page: Any, url: str) -> None:
    asked: list[Any] = []
    page.on("request", lambda one: asked.append(one) if "generate" in one.url else None)
    fork(page)
    wait_for_all(page)
    authors = (AUSTEN, DICKENS, TWAIN)
    assert {one.post_data_json["state"] for one in asked} == set(authors)
    assert set(kept(url)) == set(authors)
    for number, id in enumerate(authors):
        assert text(page, number) == expected(url, id)
        assert column(page, number).locator("h2").inner_text() == AUTHORS[number]
        assert column(page, number).locator(".said").inner_text() == SENTENCE
        assert "40 tokens" in column(page, number).locator(".note").inner_text()
    assert page.locator("#fork .token").count() == 120 and page.is_visible("#legend")
    page.locator("#fork .token").nth(50).hover()
    assert page.is_visible("#token-card")
    # The states that were made are in the tree.
    page.wait_for_selector(f"[data-state='{TWAIN}']")


def test_a_column_goes_on_is_copied_and_saved(page: Any, url: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    fork(page)
    wait_for_all(page)
    second = column(page, 1)
    first = text(page, 1)
    second.get_by_text("Continue").click()
    wait_for_all(page)
    assert text(page, 1) == first + expected(url, DICKENS, SENTENCE + first)
    second.get_by_text("Copy").click()
    page.wait_for_selector("text=Copied, with the sentence.")
    assert page.evaluate("navigator.clipboard.readText()") == SENTENCE + text(page, 1)
    with page.expect_response("**/v1/states") as made:
        second.get_by_text("Save", exact=True).click()
    id = made.value.json()["id"]
    page.wait_for_selector(f"li:has(> [data-state='{DICKENS}']) [data-state='{id}']")
    assert kept(url)[id] == kept(url)[DICKENS] + len((SENTENCE + text(page, 1)).encode())
    # It can be chosen from now on.
    column(page, 2).locator("select").select_option(id)
    assert column(page, 2).locator("select").input_value() == id


def test_a_column_is_stopped_alone(open_page: Opened, server: Server) -> None:
    page = open_page(server.url)
    page.click("#tab-fork")
    for number in range(2):
        column(page, number).locator("select").select_option("")
    fork(page, max_tokens=500_000)
    for number in range(2):
        until(
            page,
            f"document.querySelectorAll('.column')[{number}]"
            ".querySelector('.text').textContent.length > 20",
        )
    column(page, 0).get_by_text("Stop").click()
    column(page, 0).get_by_text("Continue").wait_for()
    stopped, other = text(page, 0), len(text(page, 1))
    until(
        page,
        "document.querySelectorAll('.column')[1].querySelector('.text').textContent.length"
        f" > {other + 20}",
    )
    assert text(page, 0) == stopped
    assert "ended by you" in column(page, 0).locator(".note").inner_text()
    page.keyboard.press("Escape")
    wait_for_all(page)
    assert page.is_visible("#run-fork") and not page.is_visible("#fork .notice")


def test_columns_are_chosen(page: Any, url: str) -> None:
    httpx.post(f"{url}/v1/states", json={"prompt": "By hand.", "id": "mine"})
    page.click("#states-again")
    page.wait_for_selector("[data-state=mine]")
    for number, value in enumerate(("mine", "", "/none")):
        column(page, number).locator("select").select_option(value)
    fork(page)
    wait_for_all(page)
    assert text(page, 0) == expected(url, "mine") and text(page, 1) == expected(url, None)
    assert not column(page, 2).locator("h2").is_visible()
    assert set(kept(url)) == {"mine"}
    for number in (0, 1):
        column(page, number).locator("select").select_option("/none")
    page.click("#run-fork")
    page.wait_for_selector("#fork-error [role=alert]")


def test_what_is_refused_is_told_in_its_column(page: Any, url: str) -> None:
    column(page, 1).locator("select").select_option("")
    fork(page, sentence="")  # may be empty after a state alone
    wait_for_all(page)
    assert "at least one token" in column(page, 1).locator(".notice").inner_text()
    assert text(page, 0) and text(page, 2)
    assert not column(page, 0).locator(".notice").is_visible()


def test_a_state_that_has_gone(page: Any, url: str) -> None:
    httpx.post(f"{url}/v1/states", json={"prompt": "By hand.", "id": "mine"})
    page.click("#states-again")
    page.wait_for_selector("[data-state=mine]")
    column(page, 0).locator("select").select_option("mine")
    column(page, 1).locator("select").select_option(CARROLL)
    fork(page)
    wait_for_all(page)
    httpx.delete(f"{url}/v1/states/mine")
    httpx.delete(f"{url}/v1/states/{CARROLL}")
    page.click("#run-fork")
    column(page, 0).locator("[role=alert]").wait_for()
    wait_for_all(page)
    assert "mine" in column(page, 0).locator(".notice").inner_text()
    assert column(page, 0).locator("select").input_value() == "/none"
    assert text(page, 1) == expected(url, CARROLL)  # made anew


def test_without_starts_named_states_are_there(open_page: Opened, tmp_path: Path) -> None:
    with offering(tmp_path, None) as url:
        httpx.post(f"{url}/v1/states", json={"prompt": "By hand.", "id": "mine"})
        page = open_page(url)
        page.wait_for_selector("[data-state=mine]")
        page.click("#tab-fork")
        chosen = [column(page, i).locator("select").input_value() for i in range(3)]
        assert chosen == ["mine", "", "/none"]
        fork(page)
        wait_for_all(page)
        assert text(page, 0) == expected(url, "mine") and text(page, 1) == expected(url, None)
