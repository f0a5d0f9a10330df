"""Rows of main memory, and the thread that has their memory ready on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.runner import host_pool as host_rows
from engine.runner.host_pool import HostStatePool, pinned

WIDTH = 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_hold_what_was_saved_in_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "SLAB_BYTES", 2 * WIDTH * 4)  # two rows a slab
    rows = HostStatePool(7, WIDTH, torch.device(device))
    states = torch.arange(7 * WIDTH, dtype=torch.float32, device=device).view(7, WIDTH)
    with torch.inference_mode():
        rows.save(states[:5].clone(), [0, 1, 2, 5, 6])
        rows.put(3, states[5][:4].cpu())
        rows.save(states[6:].clone(), [4])
        expected = {0: 0, 1: 1, 2: 2, 5: 3, 6: 4, 4: 6}
        for row, state in expected.items():
            assert torch.equal(rows.get(row), states[state].cpu())
        loaded = rows.load(list(expected))
        assert torch.equal(loaded, states[list(expected.values())])
        assert torch.equal(rows.get(3)[:4], states[5][:4].cpu())
    with pytest.raises(IndexError, match="row 7 is outside the 7 rows"):
        rows.get(7)


@pytest.mark.gpu
def test_a_slab_that_could_not_be_made_ahead_is_made_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_rows, "SLAB_BYTES", WIDTH * 4)
    rows = HostStatePool(20, WIDTH, torch.device("cuda"))
    made, calls = rows._made, 0

    def scarce() -> Tensor:
        nonlocal calls
        calls += 1
        if 2 <= calls <= 5:
            raise RuntimeError("CUDA error: out of memory")
        return made()

    monkeypatch.setattr(rows, "_made", scarce)
    for row in range(20):
        rows.put(row, torch.full((WIDTH,), float(row)))
    assert [int(rows.get(row)[0]) for row in range(20)] == list(range(20))
    assert calls == 24


@pytest.mark.gpu
def test_pinned_memory_is_given_back() -> None:
    """As often as it is asked for: what is locked twice is refused."""
    for _ in range(50):
        slabs = [pinned(floats) for floats in (1, 5000, 100_000)]
        assert [slab.numel() for slab in slabs] == [1, 5000, 100_000]
        for slab in slabs:
            assert slab.is_pinned() and not slab.any()
            part = slab[: len(slab) // 2 + 1].cuda().add_(1).to("cpu", non_blocking=True)
            torch.cuda.synchronize()
            assert part.all()
