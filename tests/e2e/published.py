"""What the end-to-end tests of published folders share: questions to a server, greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import torch

from tests.e2e.conftest import Server

MARGIN = 1e-3  # of two logits, so that rounding does not decide


def asked(server: Server, path: str, **body: object) -> Any:
    """Return the JSON that a server answers with 200."""
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def greedy(logits: Callable[[list[int]], torch.Tensor], ids: list[int], count: int) -> list[int]:
    """Up to `count` best tokens after `ids`, up to the first whose margin is too small.

    `logits` of ids are [tokens, vocab].
    """
    found: list[int] = []
    for _ in range(count):
        (best, second), tokens = logits(ids + found)[-1].topk(2)
        if best - second < MARGIN:
            break
        found.append(int(tokens[0]))
    return found
