"""A small Mamba with `--deterministic`, served whole to many clients at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from engine.models.mamba.config import MambaConfig
from tests.e2e.conftest import Server
from tests.engine.test_families import MAMBA, save_random

TEXT = "the quick brown fox jumps over the lazy dog; what does the fox say? "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_random(tmp_path_factory.mktemp("mamba"), MambaConfig(**MAMBA))
    server = Server("--device", "cpu", "--threads", "1", "--deterministic", model=str(folder))
    yield server
    assert server.stop() == 0


def prompts(count: int, most: int) -> list[str]:
    """Prompts of 1 to `most` bytes, both among them; every second one begins as others do."""
    chance = random.Random(5)
    lengths = [1, most, *(int(most ** chance.random()) for _ in range(count - 2))]
    letters = "".join(chance.choices("etaoin shrdlu", k=most))
    return [
        (TEXT * (most // len(TEXT) + 1) if number % 2 else letters[number:] + letters)[:length]
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("clients", "most"), [(8, 600), pytest.param(64, 5_000, marks=pytest.mark.slow)]
)
def test_each_client_gets_the_tokens_that_it_gets_alone(
    server: Server, clients: int, most: int
) -> None:
    def ask(client: httpx.Client, prompt: str, salt: str) -> tuple[list[int], list[float]]:
        response = client.post(
            "/v1/generate",
            json={
                "prompts": [prompt],
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
                "cache_salt": salt,
            },
        )
        assert response.status_code == 200, response.text
        (result,) = response.json()["results"]
        return result["token_ids"], result["logprobs"]["token_logprobs"]

    asked = prompts(clients, most)
    assert {len(asked[0]), len(asked[1])} == {1, most} and len(set(asked)) > clients // 4
    limits = httpx.Limits(max_connections=clients)
    with (
        httpx.Client(base_url=server.url, timeout=300, limits=limits) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        # Nothing is shared with others: neither a step nor a cached prompt.
        alone = [ask(client, prompt, f"{number}") for number, prompt in enumerate(asked)]
        together = list(pool.map(lambda prompt: ask(client, prompt, "all"), asked))
    assert len({tuple(tokens) for tokens, _ in alone}) > clients // 4
    assert together == alone
