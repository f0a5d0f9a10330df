"""Several engines, each on a GPU of its own: what they answer, keep and survive."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.conftest import Server
from tests.service.process import running_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def several() -> Iterator[Server]:
    count = torch.cuda.device_count()
    server = Server(
        *("--device", "cuda", "--engines", str(count), "--api-workers", "2"),
        *("--max-slots", "64", "--deterministic"),
    )  # fmt: skip
    try:
        yield server
    finally:
        server.stop()


def answers(server: Server, path: str, body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def used_bytes(device: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def test_every_gpu_has_an_engine_and_all_say_the_same(several: Server) -> None:
    assert min(used_bytes(device) for device in range(torch.cuda.device_count())) > 2**28
    text = httpx.get(f"{several.url}/metrics").text
    assert f"minserve_engines_serving {torch.cuda.device_count()}.0" in text
    body = {"prompts": ["ROMEO:"] * 96, "max_tokens": 40, **GREEDY}
    texts = {result["text"] for result in answers(several, "/v1/generate", body)["results"]}
    assert len(texts) == 1
    drawn = {**body, "temperature": 0.8, "top_p": 0.9, "seed": 5, "ignore_eos": False}
    first, again = (answers(several, "/v1/generate", drawn)["results"] for _ in range(2))
    assert [one["text"] for one in first] == [one["text"] for one in again]


def test_sessions_and_copies_go_on_wherever_they_are(several: Server) -> None:
    whole = {"prompts": ["ROMEO:"], "max_tokens": 60, **GREEDY}
    (expected,) = answers(several, "/v1/generate", whole)["results"]
    for name in "abcdefgh":
        said = ""
        for prompt in ("ROMEO:", "", ""):
            body = {"prompts": [prompt], "max_tokens": 20, "session_id": name, **GREEDY}
            said += answers(several, "/v1/generate", body)["results"][0]["text"]
        assert said == expected["text"]
        forked = answers(several, f"/v1/states/session:{name}/fork", {"id": f"copy-of-{name}"})
        body = {"prompts": [""], "max_tokens": 5, "state": forked["id"], **GREEDY}
        one = answers(several, "/v1/generate", body)["results"][0]["text"]
        body["state"] = f"session:{name}"
        assert answers(several, "/v1/generate", body)["results"][0]["text"] == one


def test_the_others_go_on_when_one_is_killed(several: Server) -> None:
    engines = running_module(several.process.pid, "engine.worker")
    os.kill(engines[-1], signal.SIGKILL)
    body = {"prompts": ["ROMEO:"], "max_tokens": 5, **GREEDY}
    deadline = time.monotonic() + 120
    statuses = []
    while time.monotonic() < deadline:
        statuses.append(httpx.post(f"{several.url}/v1/generate", json=body, timeout=60).status_code)
        text = httpx.get(f"{several.url}/metrics").text
        if re.search(r"^minserve_engine_restarts_total 1.0$", text, re.M):
            break
        time.sleep(0.05)
    assert f"minserve_engines_serving {torch.cuda.device_count()}.0" in text
    assert statuses.count(200) >= len(statuses) - 1  # one may have been on its way there
