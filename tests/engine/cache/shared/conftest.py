"""Stores of both kinds, for all tests of what servers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import redis_server
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that do not harm it; each test empties it."""
    if redis_server.MISSING:
        pytest.skip(redis_server.MISSING)
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--appendfsync", "no").start()
    yield server
    server.stop()


@pytest.fixture(params=["redis", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "folder":
        return f"file://{tmp_path}/store"
    server: RedisServer = request.getfixturevalue("redis")
    server.command(b"FLUSHALL")
    return server.url
