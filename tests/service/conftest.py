"""Fixtures: a service with the byte-level tokenizer, and one without a tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.harness import Service, fake_runner, running, save_byte_tokenizer


@pytest.fixture
def byte_folder(tmp_path: Path) -> Path:
    return save_byte_tokenizer(tmp_path)


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder)) as service:
        yield service


@pytest.fixture
async def textless(tmp_path: Path) -> AsyncIterator[Service]:
    """A model without tokenizer.json."""
    async with running(fake_runner(tmp_path)) as service:
        yield service
