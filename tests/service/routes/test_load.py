"""GET /version and GET /load, and the metrics that say the same."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.events import Stats
from service.schemas.operation import LoadReport
from tests.service.app.test_access import ADMIN, BOB, KEYS, bearer
from tests.service.harness import Service, fake_runner, running, until
from tests.service.inference.test_operation import scrape, value
from tests.service.inference.test_several_engines import together

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


async def load_of(service: Service) -> Any:
    response = await service.http.get("/load")
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_version_is_told_even_while_a_model_loads(service: Service) -> None:
    service.lifecycle.current = None
    response = await service.http.get("/version")
    assert (response.status_code, response.json()) == (200, {"version": version("minserve")})


async def test_the_load_is_that_of_the_metrics(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, slots=2, step_seconds=0.002)) as service:
        idle = dict.fromkeys(LoadReport.model_fields, 0) | {"state_slots_total": 2}
        assert await load_of(service) == idle
        held = [asyncio.create_task(service.post("/v1/completions", LONG)) for _ in range(3)]
        await until(lambda: service.client.stats.waiting == 1)
        load = await load_of(service)
        assert load == {
            "server_load": 3,
            "requests_running": 2,
            "requests_waiting": 1,
            "waiting_prompt_tokens": 1,
            "state_slots_used": 2,
            "state_slots_total": 2,
            "state_usage_ratio": 1.0,
        }
        families = await scrape(service)
        for name, number in load.items():
            if name != "server_load":
                assert value(families, f"minserve_{name}") == number
        await asyncio.gather(*held)
        await until(lambda: service.client.stats.running == 0)
        assert await load_of(service) == idle


async def test_several_engines_are_summed(byte_folder: Path) -> None:
    async with together(byte_folder, 3, slots=4, step_seconds=0.002) as (service, script):
        held = [asyncio.create_task(service.post("/v1/completions", LONG)) for _ in range(3)]
        await until(lambda: sum(client.stats.running for client in script.clients) == 3)
        load = await load_of(service)
        assert (load["server_load"], load["state_slots_total"]) == (3, 12)
        assert load["state_usage_ratio"] == pytest.approx(0.25)
        families = await scrape(service)
        assert value(families, "minserve_state_usage_ratio") == pytest.approx(0.25)
        await asyncio.gather(*held)


def test_without_slots_nothing_is_used() -> None:
    assert Stats().state_usage == 0.0
    assert Stats(slots_used=3, slots_total=4).state_usage == 0.75


async def test_a_server_that_takes_nothing_tells_no_load(service: Service) -> None:
    """Zeros would draw requests to it."""
    service.lifecycle.draining = True
    response = await service.http.get("/load")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    service.lifecycle.draining, service.lifecycle.current = False, None
    response = await service.http.get("/load")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_loading")
    assert response.headers["retry-after"]


@pytest.mark.parametrize(
    ("access", "statuses"),
    [("open", (200, 200, 200)), ("key", (401, 200, 200)), ("admin", (401, 403, 200))],
)
async def test_it_is_open_to_whom_the_metrics_are(
    byte_folder: Path, access: str, statuses: tuple[int, ...]
) -> None:
    options: Any = {"api_keys": KEYS, "admin_key": ADMIN, "metrics_access": access}
    async with running(fake_runner(byte_folder), **options) as service:
        for headers, status in zip(({}, bearer(BOB), bearer(ADMIN)), statuses, strict=True):
            assert (await service.http.get("/load", headers=headers)).status_code == status
            assert (await service.http.get("/version", headers=headers)).status_code == 200
