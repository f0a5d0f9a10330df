"""HEAD, as probes ask it (`wget --spider`, `curl -I`): GET's answer without its body."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

PATHS = (
    "/health", "/ready", "/version", "/load", "/metrics", "/v1/models", "/v1/models/fake", "/docs",
    "/openapi.json",
)  # fmt: skip


def test_it_is_answered_as_get_is(tmp_path: Path) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path))
    with listening(runner) as (url, service), httpx.Client(base_url=url) as client:
        for path in PATHS:
            got, told = client.get(path), client.head(path)
            assert told.status_code == got.status_code == 200 and not told.content
            assert told.headers["content-type"] == got.headers["content-type"]
            if path != "/metrics":  # which has counted meanwhile
                assert told.headers["content-length"] == got.headers["content-length"]
        assert client.head("/v1/models/none").status_code == 404
        service.lifecycle.draining = True
        assert client.head("/ready").status_code == client.get("/ready").status_code == 503
        described = client.get("/openapi.json").json()["paths"]
        lines = client.get("/metrics").text
    assert not [path for path, operations in described.items() if "head" in operations]
    assert 'minserve_http_requests_total{method="HEAD",path="/ready",status="503"} 1.0' in lines
