"""StatePool: rows are independent, copies are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.minrnn.config import MinRnnConfig
from engine.ops.upload import UploadRing
from engine.runner import state_pool as state_module
from engine.runner.state_pool import StatePool

CONFIG = MinRnnConfig(cell="mingru", vocab_size=10, d_model=8, n_layers=3, conv_kernel=4)
INITIAL = torch.linspace(-1, 1, CONFIG.n_layers * CONFIG.inner).view(CONFIG.n_layers, -1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def filled_pool(device: str, config: MinRnnConfig = CONFIG) -> StatePool:
    """Six rows of random state, with an initial state that is not zero."""
    generator = torch.Generator().manual_seed(0)
    pool = StatePool(config, 6, UploadRing(torch.device(device)), {"cell": INITIAL})
    for tensor in tensors(pool):
        tensor[:, :6].copy_(torch.randn(tensor[:, :6].shape, generator=generator))
    return pool


def tensors(pool: StatePool) -> list[Tensor]:
    return pool.state.tensors()


@pytest.mark.parametrize("device", DEVICES)
def test_it_begins_at_the_initial_state(device: str) -> None:
    pool = StatePool(CONFIG, 2, UploadRing(torch.device(device)), {"cell": INITIAL})
    assert torch.equal(pool.state["cell"].cpu(), INITIAL.unsqueeze(1).expand(3, 3, 16))
    assert pool.state.get("conv") is not None and pool.state["conv"].shape == (3, 3, 3, 8)
    assert not pool.state["conv"].any()
    assert pool.bytes == sum(tensor.nbytes for tensor in tensors(pool))


@pytest.mark.parametrize("device", DEVICES)
def test_the_initial_state_is_there_to_be_copied(device: str) -> None:
    pool = filled_pool(device)
    before = [tensor.clone() for tensor in tensors(pool)]
    pool.copy([pool.initial_row] * 2, [4, 1])
    fresh = tensors(StatePool(CONFIG, 6, UploadRing(torch.device(device)), {"cell": INITIAL}))
    for tensor, old, new in zip(tensors(pool), before, fresh, strict=True):
        assert torch.equal(tensor[:, [1, 4]], new[:, [1, 4]])
        assert torch.equal(tensor[:, [0, 2, 3, 5, 6]], old[:, [0, 2, 3, 5, 6]])
    assert torch.equal(pool.gather([1]), pool.gather([pool.initial_row]))


@pytest.mark.parametrize("device", DEVICES)
def test_copies_read_every_source_before_they_write(device: str) -> None:
    pool = filled_pool(device)
    before = [tensor.clone() for tensor in tensors(pool)]
    pool.copy([0, 0, 5], [3, 5, 2])
    pool.copy([], [])
    for tensor, old in zip(tensors(pool), before, strict=True):
        assert torch.equal(tensor, old[:, [0, 1, 5, 0, 4, 0, 6]])


@pytest.mark.parametrize("row", [-1, 7])
def test_rows_outside_of_the_pool_are_refused(row: int) -> None:
    pool = filled_pool("cpu")
    for misuse in (
        lambda: pool.copy([row], [0]),
        lambda: pool.copy([0], [row]),
        lambda: pool.copy([0], [pool.initial_row]),
        lambda: pool.gather([0, row]),
        lambda: pool.scatter(torch.zeros(1, pool.width), [row]),
    ):
        with pytest.raises(IndexError, match="state pool of 6"):
            misuse()


def test_a_pool_that_does_not_fit_says_how_many_rows_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = CONFIG.state_bytes * 10
    monkeypatch.setattr(state_module, "available_memory", lambda device: room + 1)
    StatePool(CONFIG, 9, UploadRing(torch.device("cpu")))
    with pytest.raises(ConfigError, match="at most 9") as caught:
        StatePool(CONFIG, 10, UploadRing(torch.device("cpu")))
    assert caught.value.param == "max_slots"


def test_what_cached_states_may_take_of_the_same_memory_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is taken as needed, so the engine starts."""
    room = CONFIG.state_bytes * 10
    monkeypatch.setattr(state_module, "available_memory", lambda device: room + 7)
    StatePool(CONFIG, 9, UploadRing(torch.device("cpu")), host_bytes=7)
    assert not caplog.messages
    StatePool(CONFIG, 9, UploadRing(torch.device("cpu")), host_bytes=1000)
    (message,) = caplog.messages
    assert f"states of 9 sequences need {room:,} bytes" in message
    assert f"may take 1,000 more, but only {room + 7:,} are free" in message
    assert message.endswith("lower max_slots, share_slots or host_state_bytes")
