"""Pages of other origins: nothing is allowed to them unless the settings name them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings
from tests.service.app.test_access import ALICE, KEYS, bearer
from tests.service.harness import Service, fake_runner, running
from tests.service.inference.test_operation import scrape, value

PAGE = "https://page.example"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_off_by_default(service: Service) -> None:
    response = await service.http.options("/v1/generate", headers=ASKS)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers
    response = await service.http.get("/v1/models", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in response.headers


async def test_a_named_origin_may_ask_and_read_errors(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), cors_origin=[PAGE], api_keys=KEYS) as service:
        preflight = await service.http.options("/v1/generate", headers=ASKS)
        assert preflight.status_code == 200  # browsers send no key with it
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in preflight.headers
        for headers, status in (({}, 401), (bearer(ALICE), 200)):
            response = await service.http.get("/v1/models", headers={"origin": PAGE, **headers})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        other = await service.http.options(
            "/v1/generate", headers={**ASKS, "origin": "https://other.example"}
        )
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        http = "minserve_http_requests_total"
        families = await scrape(service)
        assert value(families, http, method="OPTIONS", path="/v1/generate", status="200") == 1


async def test_pages_may_send_what_clients_and_traces_send(byte_folder: Path) -> None:
    """The openai package tells of itself, OpenTelemetry whose child a request is."""
    asked = "authorization,content-type,traceparent,tracestate,x-stainless-lang"
    async with running(fake_runner(byte_folder), cors_origin=[PAGE]) as service:
        preflight = await service.http.options(
            "/v1/chat/completions", headers={**ASKS, "access-control-request-headers": asked}
        )
        assert preflight.status_code == 200
        allowed = preflight.headers["access-control-allow-headers"].lower()
        assert {name.strip() for name in allowed.split(",")} >= set(asked.split(","))


PRIVATE = {"access-control-request-private-network": "true"}
ALLOWS_PRIVATE = "access-control-allow-private-network"


@pytest.mark.parametrize("named", [[PAGE], ["*", PAGE], ["https://first.example", PAGE]])
async def test_a_named_origin_may_ask_a_private_network(
    byte_folder: Path, named: list[str]
) -> None:
    async with running(fake_runner(byte_folder), cors_origin=named, api_keys=KEYS) as service:
        preflight = await service.http.options("/v1/generate", headers={**ASKS, **PRIVATE})
        assert preflight.status_code == 200, preflight.text
        assert preflight.headers[ALLOWS_PRIVATE] == "true"
        assert preflight.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert (
            preflight.headers["vary"].lower().count("access-control-request-private-network") == 1
        )
        unasked = await service.http.options("/v1/generate", headers=ASKS)
        assert unasked.status_code == 200 and ALLOWS_PRIVATE not in unasked.headers
        wrong = {**ASKS, **PRIVATE, "access-control-request-method": "PATCH"}
        refused = await service.http.options("/v1/generate", headers=wrong)
        assert refused.status_code == 400 and ALLOWS_PRIVATE not in refused.headers


@pytest.mark.parametrize(
    ("named", "origin"),
    [(["*"], PAGE), (["*"], "*"), ([PAGE], "https://other.example"), (["*", PAGE], "https://x.y")],
)
async def test_no_other_origin_may(byte_folder: Path, named: list[str], origin: str) -> None:
    async with running(fake_runner(byte_folder), cors_origin=named) as service:
        asks = {**ASKS, **PRIVATE, "origin": origin}
        preflight = await service.http.options("/v1/generate", headers=asks)
        assert ALLOWS_PRIVATE not in preflight.headers


async def test_any_origin(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), cors_origin=["*"]) as service:
        response = await service.http.get("/v1/models", headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"


def test_origins_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().cors_origin == ()
    monkeypatch.setenv("MINSERVE_CORS_ORIGIN", f"{PAGE}, http://localhost:3000")
    assert Settings().cors_origin == (PAGE, "http://localhost:3000")
    for wrong in ("page.example", f"{PAGE}/", "HTTPS://page.example", "https://Page.example", ""):
        monkeypatch.setenv("MINSERVE_CORS_ORIGIN", wrong)
        with pytest.raises(ValidationError, match="cors_origin"):
            Settings()
