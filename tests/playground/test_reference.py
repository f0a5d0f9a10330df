"""The API's reference at /docs in a browser that reaches nothing but the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server
from tests.playground.conftest import Opened
from tests.service.app.test_access import ADMIN, ALICE, KEYS
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

GENERATE = "#operations-inference-generate_v1_generate_post"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    options: Any = {"api_keys": KEYS, "admin_key": ADMIN}
    with listening(fake_runner(save_byte_tokenizer(tmp_path)), **options) as (url, _):
        yield url


def open_reference(open_page: Opened, url: str, path: str = "/docs", **options: Any) -> Any:
    page = open_page(url, path=path, ready=False, **options)
    page.wait_for_selector(".opblock")
    return page


def try_generating(page: Any, *, status: int) -> Any:
    """What the first example brings."""
    page.click(f"{GENERATE} .opblock-summary-control")
    page.click(f"{GENERATE} .try-out__btn")
    page.click(f"{GENERATE} .execute")
    shown = page.wait_for_selector(f"{GENERATE} .live-responses-table tbody .response-col_status")
    assert shown.inner_text().startswith(str(status))
    return page.inner_text(f"{GENERATE} .live-responses-table tbody .highlight-code code")


def test_it_shows_every_operation_and_its_words(open_page: Opened, server: Server) -> None:
    page = open_reference(open_page, server.url)
    spec = page.evaluate("fetch('openapi.json').then((answer) => answer.json())")
    shown = page.eval_on_selector_all(
        ".opblock-summary-path", "all => all.map(e => e.dataset.path)"
    )
    assert set(shown) == set(spec["paths"])
    assert page.inner_text(".info .title").startswith("minserve")
    # Descriptions are text, with code in them.
    codes = page.eval_on_selector_all(".info code", "all => all.map(e => e.textContent)")
    assert codes == ['{"error": {"message", "type", "param", "code"}}']
    assert "`" not in page.inner_text(".info")


def test_every_part_opens_without_asking_for_what_is_forbidden(
    open_page: Opened, server: Server
) -> None:
    """The page is watched: see the conftest."""
    page = open_reference(open_page, server.url)
    for block in page.query_selector_all(".opblock .opblock-summary-control"):
        block.click()
    page.wait_for_selector(f"{GENERATE} .highlight-code")
    for button in page.query_selector_all(".models .json-schema-2020-12-expand-deep-button")[:5]:
        button.click()
    for tab in page.query_selector_all(".tablinks")[:12]:
        tab.click()
    page.wait_for_timeout(200)


def test_an_example_runs_as_it_stands(open_page: Opened, server: Server) -> None:
    page = open_reference(open_page, server.url)
    (result,) = json.loads(try_generating(page, status=200))["results"]
    assert result["finish_reason"] == "length"


def test_it_loads_without_a_key_and_sends_the_one_that_it_is_given(
    open_page: Opened, guarded: str
) -> None:
    page = open_reference(open_page, guarded)
    assert "no API key" in try_generating(page, status=401)
    page.click(".auth-wrapper .authorize")
    page.fill(".auth-container input >> nth=0", ALICE)
    page.click(".auth-btn-wrapper .authorize >> nth=0")
    page.click(".auth-btn-wrapper .btn-done")
    page.click(f"{GENERATE} .execute")
    page.wait_for_selector(f"{GENERATE} .live-responses-table :text('200')")
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def below(prefix: str) -> tuple[str, Callable[[Any], None]]:
    """A proxy that serves the server below a path of its own, and nothing else."""

    def pass_on(route: Any) -> None:
        origin, path = re.fullmatch(r"(https?://[^/]+)(/.*)", route.request.url).groups()
        if not path.startswith(prefix):
            return route.fulfill(status=418)
        route.fulfill(response=route.fetch(url=origin + path.removeprefix(prefix)))

    return "**/*", pass_on


def test_it_lies_below_a_path_of_a_proxy(open_page: Opened, server: Server) -> None:
    page = open_reference(open_page, server.url, "/some/where/docs", route=below("/some/where"))
    (result,) = json.loads(try_generating(page, status=200))["results"]
    assert result["finish_reason"] == "length"


def test_a_description_that_cannot_be_had_is_told(open_page: Opened, server: Server) -> None:
    def refuse(route: Any) -> None:
        route.fulfill(status=503, body="{}")

    page = open_page(server.url, path="/docs", ready=False, route=("**/openapi.json", refuse))
    page.wait_for_selector("#reference:has-text('cannot be loaded: openapi.json: 503')")
