"""States belong to the engine: every API process of a server knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.service.inference.test_restart import until
from tests.service.server.test_api_workers import clients, several

TURN = {"prompt": "b", "max_tokens": 2, "temperature": 0}


def test_every_process_knows_every_state(tmp_path: Path) -> None:
    with several(tmp_path) as (process, _), clients(process) as some:
        made = some[0].post("/v1/states", json={"prompt": "abc", "id": "mine"})
        assert made.status_code == 200, made.text
        answers: list[Any] = []
        for client in some:
            assert client.get("/v1/states/mine").json()["tokens"] == 3
            answers.append(client.post("/v1/completions", json={**TURN, "state": "mine"}).json())
        assert {answer["choices"][0]["text"] for answer in answers} == {"cd"}
        for number, client in enumerate(some, 1):  # turns of one session, from everywhere
            answer = client.post("/v1/completions", json={**TURN, "session_id": "talk"}).json()
            assert answer["choices"][0]["state"]["tokens"] == 3 * number
        until(lambda: "\nminserve_states 2.0\n" in some[2].get("/metrics").text)
        assert some[1].delete("/v1/states/mine").status_code == 200
        assert {client.get("/v1/states/mine").status_code for client in some} == {404}
