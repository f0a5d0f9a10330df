"""Who may ask for what: API keys, the admin key, and what keys have apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ConfigError
from service.settings import Settings
from tests.service.harness import Service, error_message, fake_runner, running
from tests.service.inference.test_operation import scrape, value

ALICE, BOB, ADMIN = "alice-0123456789abcdef", "bob-0123456789abcdef", "admin-0123456789abcdef"
KEYS = f"alice:{ALICE},bob:{BOB}"
GENERATE = {"prompts": ["a"], "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder), api_keys=KEYS, admin_key=ADMIN) as service:

        async def sweep() -> dict[str, str]:
            return {"swept": "all"}

        service.app.add_api_route("/admin/sweep", sweep, methods=["POST"])
        yield service


def refused(response: httpx.Response, status: int, code: str) -> None:
    assert response.status_code == status, response.text
    error_message(response.json(), None)
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "headers",
    [
        bearer(ALICE),
        {"authorization": f"bearer   {BOB}"},
        {"x-api-key": ALICE},
        {"authorization": "Basic eDp5", "x-api-key": ALICE},
    ],
)
async def test_a_known_key_is_served(guarded: Service, headers: dict[str, str]) -> None:
    response = await guarded.http.post("/v1/generate", json=GENERATE, headers=headers)
    assert response.status_code == 200
    assert (await guarded.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": f"Bearer {ALICE} {BOB}"},
        bearer("nobody-0123456789abcdef"),
        bearer(ALICE[:-1]),
        bearer("alice"),
        bearer(ADMIN),  # administration is another thing
        {"x-api-key": ""},
        {"x-api-key": "é" * 20},
        {**bearer("nobody-0123456789abcdef"), "x-api-key": ALICE},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/generate"),
        ("POST", "/v1/score"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake"),
        ("GET", "/no/such/path"),
        ("GET", "/health/"),
        ("OPTIONS", "/v1/generate"),
    ],
)
async def test_without_a_known_key_nothing_is(
    guarded: Service, method: str, path: str, headers: dict[str, str]
) -> None:
    coded = [(name.encode(), text.encode("latin-1")) for name, text in headers.items()]
    response = await guarded.http.request(method, path, json=GENERATE, headers=coded)
    refused(response, 401, "invalid_api_key")
    assert response.headers["www-authenticate"].startswith('Bearer realm="minserve"')
    assert guarded.runner.steps == 0


async def test_refusals_read_no_body(guarded: Service) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was asked for")
        yield b""

    response = await guarded.http.post("/v1/generate", content=body())
    refused(response, 401, "invalid_api_key")


async def test_what_is_open(guarded: Service) -> None:
    for path in ("/health", "/ready", "/version", "/load", "/docs", "/openapi.json", "/metrics"):
        assert (await guarded.http.get(path)).status_code == 200, path
    families = await scrape(guarded)
    http = "minserve_http_requests_total"
    assert value(families, http, method="GET", path="/health", status="200") == 1


async def test_keys_and_names_are_in_no_metric(guarded: Service) -> None:
    await guarded.http.post("/v1/generate", json=GENERATE, headers=bearer(ALICE))
    await guarded.http.post("/v1/generate", json=GENERATE, headers=bearer("wrong" * 5))
    text = (await guarded.http.get("/metrics")).text
    for word in ("alice", "bob", "wrongwrong"):
        assert word not in text
    assert (
        'minserve_http_requests_total{method="POST",path="/v1/generate",status="401"} 1.0' in text
    )


async def test_the_openai_packages_way_of_sending_a_key(guarded: Service) -> None:
    import openai

    for key, fits in ((ALICE, True), ("none", False)):
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=key, http_client=guarded.http, max_retries=0
        )
        if fits:
            await client.completions.create(model="fake", prompt="a", max_tokens=1)
        else:
            with pytest.raises(openai.AuthenticationError, match="not valid"):
                await client.completions.create(model="fake", prompt="a", max_tokens=1)


async def test_administration_asks_for_the_admin_key(guarded: Service) -> None:
    async def post(path: str, headers: dict[str, str]) -> httpx.Response:
        return await guarded.http.post(path, headers=headers)

    assert (await post("/admin/sweep", bearer(ADMIN))).json() == {"swept": "all"}
    assert (await post("/admin/sweep", {"x-api-key": ADMIN})).status_code == 200
    refused(await post("/admin/sweep", bearer(ALICE)), 403, "not_admin")
    refused(await post("/admin/sweep", bearer("wrong" * 5)), 401, "invalid_api_key")
    refused(await post("/admin/sweep", {}), 401, "invalid_api_key")
    refused(await post("/admin/nothing", bearer(ALICE)), 403, "not_admin")
    refused(await post("/admin/nothing", bearer(ADMIN)), 404, "not_found")


@pytest.mark.parametrize("keys", [KEYS, None])
async def test_without_an_admin_key_there_is_no_administration(
    byte_folder: Path, keys: str | None
) -> None:
    async with running(fake_runner(byte_folder), api_keys=keys) as service:

        async def sweep() -> None:
            raise AssertionError("reached")

        service.app.add_api_route("/admin/sweep", sweep)
        for headers in ({}, bearer(ALICE), bearer(ADMIN)):
            response = await service.http.get("/admin/sweep", headers=headers)
            refused(response, 404, "not_found")


async def test_without_api_keys_anybody_is_served(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), admin_key=ADMIN) as service:
        for headers in ({}, bearer("anything"), bearer(ADMIN)):
            response = await service.http.post("/v1/generate", json=GENERATE, headers=headers)
            assert response.status_code == 200
        refused(await service.http.get("/admin/x"), 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("access", "statuses"),
    [("open", (200, 200, 200)), ("key", (401, 200, 200)), ("admin", (401, 403, 200))],
)
async def test_who_may_read_metrics(
    byte_folder: Path, access: str, statuses: tuple[int, ...]
) -> None:
    options: Any = {"api_keys": KEYS, "admin_key": ADMIN, "metrics_access": access}
    async with running(fake_runner(byte_folder), **options) as service:
        for headers, status in zip(({}, bearer(BOB), bearer(ADMIN)), statuses, strict=True):
            assert (await service.http.get("/metrics", headers=headers)).status_code == status


async def test_what_one_key_has_read_is_not_found_by_another(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), api_keys=KEYS) as service:
        item = {"context": "a long context", "continuations": ["x", "y"]}

        async def hits_of(key: str) -> float:
            before = value(await scrape(service), "minserve_prefix_cache_hits_tokens_total")
            response = await service.http.post(
                "/v1/score", json={"items": [item]}, headers=bearer(key)
            )
            assert response.status_code == 200
            after = value(await scrape(service), "minserve_prefix_cache_hits_tokens_total")
            return after - before

        shared = len("a long context") - 1
        assert await hits_of(ALICE) == shared  # the second continuation's
        assert await hits_of(ALICE) == 2 * shared
        assert await hits_of(BOB) == shared
        assert await hits_of(BOB) == 2 * shared


async def test_samples_of_one_key_share_their_prompt_with_no_other(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), api_keys=KEYS) as service:
        body = {"prompt": "a long prompt", "n": 2, "max_tokens": 1}
        hits = []
        for key in (ALICE, BOB, ALICE):
            response = await service.http.post("/v1/completions", json=body, headers=bearer(key))
            assert response.status_code == 200
            hits.append(value(await scrape(service), "minserve_prefix_cache_hits_tokens_total"))
        assert hits == [13, 26, 52]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics_access": "key"}, "metrics-access"),
        ({"metrics_access": "admin", "api_keys": KEYS}, "metrics-access"),
        ({"admin_key": "short"}, "MINSERVE_ADMIN_KEY is not a valid key"),
        ({"admin_key": ADMIN, "admin_key_file": "x"}, "both"),
        ({"admin_key_file": "/no/such/file"}, "/no/such/file cannot be read"),
        ({"api_keys": "alice"}, "MINSERVE_API_KEYS, entry 1"),
    ],
)
async def test_settings_that_cannot_be(
    byte_folder: Path, options: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        async with running(fake_runner(byte_folder), **options):
            pass
    assert "short" not in caught.value.message


async def test_keys_from_files(byte_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice:{ALICE}\n")
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    files: Any = {"api_keys_file": tmp_path / "keys", "admin_key_file": tmp_path / "admin"}
    async with running(fake_runner(byte_folder), **files) as service:
        for path, key, status in (("/v1/models", ALICE, 200), ("/admin/x", ADMIN, 404)):
            response = await service.http.get(path, headers=bearer(key))
            assert response.status_code == status


def test_settings_show_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_API_KEYS", KEYS)
    monkeypatch.setenv("MINSERVE_ADMIN_KEY", ADMIN)
    assert Settings().api_keys is not None and Settings().admin_key is not None
    for key in (ALICE, BOB, ADMIN):
        assert key not in repr(Settings()) and key not in str(Settings())


async def test_the_schema_tells_who_needs_a_key(guarded: Service, service: Service) -> None:
    schema = (await guarded.http.get("/openapi.json")).json()
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            closed = path not in ("/health", "/ready", "/version", "/load", "/metrics")
            assert ("security" in operation) == closed, path
            assert ("401" in operation["responses"]) == closed
            assert ("403" in operation["responses"]) == path.startswith("/admin")
    plain = (await service.http.get("/openapi.json")).json()
    assert "securitySchemes" not in plain["components"]
    assert not any(
        "security" in operation for path in plain["paths"].values() for operation in path.values()
    )
