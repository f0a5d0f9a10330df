"""Scoring a text of one's own: the service's sums, and each token's probability under it."""

from __future__ import annotations

import math
from typing import Any

import httpx

from tests.e2e.conftest import Server
from tests.playground.conftest import until

TEXT = "To be, or not to be: 😀\nthat is <b>the</b> question."


def score(page: Any, text: str) -> None:
    page.click("#tab-score")
    page.fill("#own", text)
    page.click("#run-score")
    until(page, "!document.querySelector('#run-score').hasAttribute('aria-disabled')")


def number(page: Any, name: str) -> float:
    return float(page.inner_text(f"#total-{name}").split()[0].replace(",", ""))


def test_the_sums_are_the_services(page: Any, server: Server) -> None:
    score(page, TEXT)
    said = httpx.post(f"{server.url}/v1/score", json={"texts": [TEXT]}, timeout=60).json()
    (expected,) = said["results"]
    assert number(page, "tokens") == expected["num_scored_tokens"]
    for name, field in (
        ("logprob", "total_logprob"),
        ("perplexity", "perplexity"),
        ("bits", "bits_per_byte"),
    ):
        assert math.isclose(number(page, name), expected[field], rel_tol=0.006), name
    assert page.evaluate("document.querySelector('#scored').textContent") == TEXT
    first = page.locator("#scored .token").first
    assert "first" in (first.get_attribute("class") or "")
    assert "😀" in page.locator("#scored .token").all_inner_texts()  # four tokens, one character
    page.locator("#scored .token", has_text="😀").hover()
    assert page.locator("#token-card .token-name").count() == 4


def test_after_a_state_the_first_token_has_a_probability_too(page: Any, server: Server) -> None:
    body = {"prompt": "ROMEO:\nBut soft, what light ", "id": "light"}
    httpx.post(f"{server.url}/v1/states", json=body)
    page.click("#states-again")
    page.click("[data-state=light]")
    text = "through yonder window breaks?"
    score(page, text)
    said = httpx.post(
        f"{server.url}/v1/score", json={"texts": [text], "state": "light"}, timeout=60
    ).json()
    assert number(page, "tokens") == said["results"][0]["num_scored_tokens"] == len(text)
    assert "first" not in (page.locator("#scored .token").first.get_attribute("class") or "")
    httpx.delete(f"{server.url}/v1/states/light")


def test_an_empty_text_is_refused_by_the_service(page: Any) -> None:
    score(page, "")
    assert "texts[0]" in page.inner_text("#score-error [role=alert]")
    score(page, "a")
    assert number(page, "tokens") == 0
