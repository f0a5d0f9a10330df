"""The settings that name the store that servers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from service.settings import Settings


def test_the_url_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://:secret@host\n")
    file.chmod(0o600)
    assert Settings(state_store_file=file).engine_config().state_store == "redis://:secret@host"
    with pytest.raises(ConfigError, match="both given"):
        Settings(state_store_file=file, state_store="redis://host").engine_config()  # type: ignore[arg-type]


def test_an_empty_url_is_no_server_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text("\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="url is empty"):
        Settings(state_store_file=file).engine_config()
    monkeypatch.setenv("MINSERVE_STATE_STORE", "")
    with pytest.raises(ConfigError, match=r"MINSERVE_STATE_STORE.* is empty"):
        Settings().engine_config()
