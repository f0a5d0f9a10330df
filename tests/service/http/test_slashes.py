"""Paths with slashes too many lead to the path that was meant, all in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.slashes import plain
from tests.service.app.test_access import ADMIN, ALICE, KEYS, bearer
from tests.service.harness import Service, error_message, fake_runner, running, save_byte_tokenizer
from tests.service.http.test_refusals import said_to
from tests.service.inference.test_operation import scrape, value
from tests.service.live import listening

HTTP = "minserve_http_requests_total"
GENERATE: dict[str, Any] = {"prompts": ["a"], "max_tokens": 1}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/", "/"), ("//", "/"), ("///", "/"), ("", ""), ("/a", "/a"), ("/a/", "/a"),
        ("/a//", "/a"), ("//a", "/a"), ("/a//b///c", "/a/b/c"), ("a/", "a"),
    ],
)  # fmt: skip
def test_which_path_is_meant(given: str, meant: str) -> None:
    assert plain(given) == meant
    assert plain(meant) == meant


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("GET", "/v1/models/", "/v1/models"),
        ("HEAD", "/v1/models/", "/v1/models"),
        ("GET", "//v1/models", "/v1/models"),
        ("GET", "/v1//models//", "/v1/models"),
        ("GET", "/v1/models/fake/", "/v1/models/fake"),
        ("GET", "/v1/models//fake", "/v1/models/fake"),
        ("GET", "/v1/states/", "/v1/states"),
        ("GET", "/v1/states/x/", "/v1/states/x"),
        ("GET", "/v1/states//x/content", "/v1/states/x/content"),
        ("DELETE", "/v1/states/x/", "/v1/states/x"),
        ("GET", "/health/", "/health"),
        ("GET", "//health", "/health"),
        ("GET", "/metrics/", "/metrics"),
        ("GET", "/docs/", "/docs"),
        ("GET", "/openapi.json/", "/openapi.json"),
        ("GET", "//", "/"),
        ("GET", "//playground/style.css", "/playground/style.css"),
        ("POST", "/v1/generate/", "/v1/generate"),
        ("POST", "//v1/generate", "/v1/generate"),
        ("POST", "//v1//chat/completions/", "/v1/chat/completions"),
        ("POST", "/tokenize/", "/tokenize"),
        ("POST", "/v1/states/text/", "/v1/states/text"),
    ],
)
async def test_all_are_redirected_with_their_method_and_query(
    service: Service, method: str, path: str, meant: str
) -> None:
    url = f"http://test{path}?after=a%20b&limit=1"
    response = await service.http.request(method, httpx.URL(url))
    assert response.status_code == 307, response.text
    assert response.headers["location"] == f"http://test{meant}?after=a%20b&limit=1"
    assert response.headers["x-request-id"]
    there = await service.http.request(method, response.headers["location"])
    assert there.status_code != 307


async def test_who_follows_is_served(service: Service) -> None:
    for path in ("/v1/generate/", "//v1/generate"):
        response = await service.http.post(
            httpx.URL(f"http://test{path}"), json=GENERATE, follow_redirects=True
        )
        assert response.status_code == 200
    families = await scrape(service)
    labels = {"method": "POST", "path": "/v1/generate"}
    assert value(families, HTTP, **labels, status="307") == 2
    assert value(families, HTTP, **labels, status="200") == 2
    outcomes = {"endpoint": "generate", "outcome": "ok"}
    assert value(families, "minserve_requests_total", **outcomes) == 2, "a redirect is no request"


@pytest.mark.parametrize("path", ["/no/", "//no", "/v1//no/", "/v1/generate/no/", "/%2F%2Fno%2F"])
async def test_what_leads_nowhere_is_not_found(service: Service, path: str) -> None:
    response = await service.http.get(httpx.URL(f"http://test{path}"))
    assert response.status_code == 404
    error_message(response.json(), None)
    families = await scrape(service)
    assert value(families, HTTP, method="GET", path="other", status="404") == 1


async def test_a_redirect_does_not_lead_to_itself_or_elsewhere(service: Service) -> None:
    for path, meant in (
        ("/v1/models/a%3Fb%23c%25/", "/v1/models/a%3Fb%23c%25"),
        ("/v1/models/a%2F", "/v1/models/a"),
        ("/v1/models/%2F%2Fother.example", "/v1/models/other.example"),
        ("//v1/models/%C3%A9", "/v1/models/%C3%A9"),
        ("/v1/models/a%0Db/", "/v1/models/a%0Db"),
    ):
        response = await service.http.get(httpx.URL(f"http://test{path}"))
        assert response.status_code == 307
        assert response.headers["location"] == f"http://test{meant}"


async def test_keys_are_asked_for_by_the_path_that_was_meant(byte_folder: Path) -> None:
    options = {"api_keys": KEYS, "admin_key": ADMIN, "metrics_access": "admin"}
    async with running(fake_runner(byte_folder), **options) as service:

        async def status(path: str, key: str | None) -> int:
            headers = {} if key is None else bearer(key)
            url = httpx.URL(f"http://test{path}")
            return (await service.http.post(url, headers=headers)).status_code

        for path in ("/v1/generate/", "//v1/generate", "//v1/models", "/no/"):
            assert await status(path, None) == 401
        for path in ("/v1/generate/", "//v1/generate"):
            assert await status(path, ALICE) == 307
        for path in ("/admin/reload/", "//admin/reload", "//admin//reload", "/metrics/"):
            assert await status(path, None) == 401
            assert await status(path, ALICE) in (401, 403)
            assert await status(path, ADMIN) == 307


async def test_limits_of_bodies_are_those_of_the_path_that_was_meant(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), max_body_bytes=100) as service:
        for path, status in (("/v1/states/text/", 307), ("/tokenize/", 413)):
            response = await service.http.post(path, content=b"a" * 101)
            assert response.status_code == status


def test_on_a_connection(tmp_path: Path) -> None:
    """As a parser of HTTP reads such paths; without a host the redirect names none."""
    with listening(fake_runner(save_byte_tokenizer(tmp_path)), keep_alive=600) as (url, _):
        for head, location in (
            (
                b"GET //v1/models HTTP/1.1\r\nhost: here\r\nconnection: close",
                b"http://here/v1/models",
            ),
            (b"GET //v1/models HTTP/1.0", b"/v1/models"),
        ):
            answer = said_to(url, head + b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 307 ")
            assert b"\r\nlocation: " + location + b"\r\n" in answer
