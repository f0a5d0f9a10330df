"""Bodies in a content encoding are refused by its name: none is decoded, since a small one can
become as large as it likes."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.service.harness import Service, error_message
from tests.service.inference.test_operation import scrape, value

BODY = json.dumps({"prompts": ["a"], "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/generate",
        "/v1/score",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/v1/states",
        "/v1/states/text",
        "/v1/states/import",
    ],
)
@pytest.mark.parametrize("encoding", ["gzip", "GZip", "br", "identity, gzip"])
async def test_an_encoded_body_is_refused(service: Service, path: str, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = await service.http.post(path, content=gzip.compress(BODY), headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "identity"
    message = error_message(response.json(), None)
    assert message.startswith(f"content-encoding: {encoding} is not supported; allowed: ")
    assert response.json()["error"]["code"] == "unsupported_content_encoding"


async def test_it_counts_as_the_clients_mistake(service: Service) -> None:
    await service.http.post("/v1/generate", content=BODY, headers={"content-encoding": "gzip"})
    families = await scrape(service)
    assert value(families, "minserve_requests_total", endpoint="generate", outcome="invalid") == 1
    code = "unsupported_content_encoding"
    assert value(families, "minserve_request_errors_total", code=code) == 1


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_a_body_as_it_is_is_read(service: Service, encoding: str) -> None:
    headers = {"content-encoding": encoding}
    response = await service.http.post("/v1/generate", content=BODY, headers=headers)
    assert response.status_code == 200
    assert (await service.http.get("/v1/states", headers={"content-encoding": "br"})).is_success
