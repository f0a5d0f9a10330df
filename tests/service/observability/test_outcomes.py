"""What came of requests, as `minserve_requests_total` and the access log tell it: alerts are made
of it, so a client's own doing must not look like the server's, nor the other way round."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine import errors
from service.observability.outcomes import OUTCOMES, outcome_of
from tests.service.harness import Service, fake_runner, running, until
from tests.service.inference.test_lifecycle import LONG
from tests.service.inference.test_operation import scrape, value

ENDPOINTS: dict[str, dict[str, Any]] = {
    "generate": {"prompts": ["a"], **LONG},
    "score": {"texts": ["a" * 40_000]},
    "completions": {"prompt": "a", **LONG},
}


async def outcomes(service: Service) -> dict[tuple[str, str], int]:
    """How many of each endpoint had which outcome."""
    samples = (await scrape(service))["minserve_requests"].samples
    return {
        (one.labels["endpoint"], one.labels["outcome"]): int(one.value)
        for one in samples
        if one.name.endswith("_total") and one.value
    }


async def test_what_a_dead_engine_lost_is_an_error(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise RuntimeError("the engine dies")

    runner = fake_runner(byte_folder, step_seconds=0.005)
    async with running(runner) as service:
        asked = [
            asyncio.create_task(service.http.post(f"/v1/{endpoint}", json=body))
            for endpoint, body in ENDPOINTS.items()
        ]
        stream = {**ENDPOINTS["generate"], "stream": True}
        streamed = asyncio.create_task(service.http.post("/v1/generate", json=stream))
        await until(lambda: service.client.stats.running == 4)
        seen = runner.steps
        await until(lambda: runner.steps > seen + 5)
        monkeypatch.setattr(service.engine, "step", die)
        assert [(await one).status_code for one in asked] == [503] * 3
        assert (await streamed).status_code == 200
        assert await outcomes(service) == {
            ("generate", "error"): 2,
            ("score", "error"): 1,
            ("completions", "error"): 1,
        }


async def test_a_clients_own_time_that_is_over_is_no_error(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.05)
    async with running(runner) as service:
        await service.post("/v1/score", {"texts": ["a" * 4096], "timeout": 0.1}, 504)
        await service.post("/v1/generate", {**ENDPOINTS["generate"], "timeout": 0.1})
        assert await outcomes(service) == {("score", "timeout"): 1, ("generate", "ok"): 1}


async def test_what_is_not_taken_is_refused(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder)) as service:
        await service.lifecycle.drain(1)
        await service.post("/v1/score", {"texts": ["ab"]}, 503)
        assert await outcomes(service) == {("score", "refused"): 1}


async def test_what_is_answered_before_it_is_routed_is_counted_where_it_was_sent(
    byte_folder: Path,
) -> None:
    """A key that is wrong, a body that is too large; paths that are none stay without a name."""
    key = {"authorization": "Bearer 0123456789abcdef"}
    wrong = {"authorization": "Bearer somebody-elses-key"}
    settings = {"api_keys": "alice:0123456789abcdef", "max_body_bytes": 100}
    async with running(fake_runner(byte_folder), **settings) as service:
        http = service.http
        body = {"prompt": "a", "max_tokens": 1}
        for path in ("/v1/completions", "/v1/states", "/v1/made/up"):
            assert (await http.post(path, json=body, headers=wrong)).status_code == 401
        assert (await http.get("/v1/completions", headers=wrong)).status_code == 401
        assert (await http.get("/v1/states/x-y", headers=wrong)).status_code == 401
        large = await http.post("/v1/completions", content=bytes(101), headers=key)
        assert large.status_code == 413
        assert await outcomes(service) == {("completions", "invalid"): 2, ("states", "invalid"): 1}
        families = await scrape(service)
    for code, count in (("invalid_api_key", 2), ("body_too_large", 1)):
        assert value(families, "minserve_request_errors_total", code=code) == count
    counted = {
        (one.labels["method"], one.labels["path"], one.labels["status"]): int(one.value)
        for one in families["minserve_http_requests"].samples
        if one.name.endswith("_total") and one.labels["path"] != "/metrics"
    }
    assert counted == {
        ("POST", "/v1/completions", "401"): 1,
        ("GET", "/v1/completions", "401"): 1,
        ("POST", "/v1/completions", "413"): 1,
        ("POST", "/v1/states", "401"): 1,
        ("GET", "/v1/states/{id}", "401"): 1,
        ("POST", "other", "401"): 1,
    }


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (200, None, "ok"),
        (400, "invalid_value", "invalid"),
        (408, "body_too_slow", "invalid"),
        (408, errors.ReaderBehind.code, "cancelled"),
        (429, errors.ShareFull.code, "refused"),
        (429, errors.StateQuota.code, "refused"),
        (499, None, "cancelled"),
        (500, errors.StepFailed.code, "error"),
        (503, errors.Draining.code, "refused"),
        (503, errors.EngineLoading.code, "refused"),
        (503, errors.EngineDead.code, "error"),
        (503, errors.EngineUnavailable.code, "error"),
        (504, errors.TimedOut.code, "timeout"),
    ],
)
def test_by_status_and_code(status: int, code: str | None, outcome: str) -> None:
    assert outcome_of(status, code) == outcome
    assert outcome in OUTCOMES
