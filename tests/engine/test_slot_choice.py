"""How many slots an engine takes: the usual number, or what fits."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.slot_choice import with_slots

CPU = torch.device("cpu")
STATE = 1000


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.slot_choice.available_memory", lambda device: 202_000)


def chosen(**given: int) -> tuple[int | None, int | None]:
    config = with_slots(EngineConfig(**given), CPU, state_bytes=STATE)  # type: ignore[arg-type]
    return config.max_slots, config.share_slots


def test_the_usual_number_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.slot_choice.available_memory", lambda device: 2 * 321 * STATE)
    assert chosen() == (256, 64)
    monkeypatch.setattr("engine.slot_choice.available_memory", lambda device: 2 * 320 * STATE)
    assert chosen() == (256, 63)


@pytest.mark.usefixtures("free")
def test_as_many_as_fit_in_the_same_proportion() -> None:
    assert chosen() == (80, 20)  # 101 rows in half of the memory, one of which is always initial


@pytest.mark.usefixtures("free")
def test_what_is_given_stays() -> None:
    assert chosen(max_slots=300, share_slots=7) == (300, 7)  # refused later, as it does not fit
    assert chosen(max_slots=90) == (90, 10)
    assert chosen(max_slots=200) == (200, 0)
    assert chosen(share_slots=30) == (70, 30)
    assert chosen(share_slots=200) == (1, 200)


@pytest.mark.usefixtures("free")
def test_memory_for_weights_and_for_states_in_main_memory_is_not_free() -> None:
    assert chosen(host_state_bytes=100_000) == (40, 10)
    config = with_slots(EngineConfig(), CPU, state_bytes=STATE, weight_bytes=100_000)
    assert (config.max_slots, config.share_slots) == (40, 10)


@pytest.mark.usefixtures("free")
def test_at_least_one_sequence_runs(caplog: pytest.LogCaptureFixture) -> None:
    config = with_slots(EngineConfig(), CPU, state_bytes=10**6)
    assert (config.max_slots, config.share_slots) == (1, 0)
    assert "max_slots is 1 and share_slots 0" in caplog.text
