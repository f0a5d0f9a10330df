"""Sessions of Mamba's models that are idle: their states leave the device for main memory and for
disk, come back bit for bit, and take the memory that start-up says."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.engine import Engine
from engine.models.loader import load_config
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from engine.protocol.requests import KeepState
from engine.runner import host_pool
from tests.engine.test_families import MAMBA, MAMBA2, ask, load, run, save_random

CONFIGS: dict[str, ModelConfig] = {
    "mamba": MambaConfig(**MAMBA, tie_embeddings=True),
    "mamba2": Mamba2Config(**MAMBA2, least_dt=0.01, most_dt=0.5, bias=True),
}
SESSIONS = 12


@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [
        ("mamba", "bfloat16"),
        ("mamba2", "float32"),
        pytest.param("mamba", "float32", marks=pytest.mark.slow),
        pytest.param("mamba2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_more_sessions_than_memory_holds_come_back_bit_for_bit(
    name: str, state_dtype: str, tmp_path: Path
) -> None:
    """Two rows of the device and three of main memory; the others are on disk alone."""
    (tmp_path / "model").mkdir()
    folder = save_random(tmp_path / "model", CONFIGS[name])
    given: dict[str, Any] = {"max_slots": 2, "state_dtype": state_dtype}
    roomy = load(folder, **given, share_slots=2 * SESSIONS)
    of_one = roomy.info.state_bytes + 4 * roomy.info.d_model
    scarce = load(
        folder, **given, share_slots=2, host_state_bytes=3 * of_one,
        state_folder=str(tmp_path / "states"),
    )  # fmt: skip
    texts = [list(f"{number} quick brown foxes ".encode() * 3) for number in range(SESSIONS)]
    for engine in (roomy, scarce):
        for number, text in enumerate(texts):
            run(engine, text, count=4, keep=KeepState(id=f"s{number}"))
    tiers = scarce._cache.tiers
    assert tiers.device_used + tiers.host_used <= 5
    assert len(list((tmp_path / "states").rglob("*.safetensors"))) == SESSIONS

    def content(engine: Engine, number: int) -> bytes:
        told: bytes = ask(engine, "export", id=f"s{number}").content
        return told

    expected = [content(roomy, number) for number in range(SESSIONS)]
    assert len(set(expected)) == SESSIONS
    for number in range(SESSIONS):  # the least recently used first
        assert content(scarce, number) == expected[number]
    for number in reversed(range(SESSIONS)):
        ends = [run(engine, list(b"and"), state=f"s{number}")[0] for engine in (roomy, scarce)]
        assert ends[0].tokens == ends[1].tokens
        assert ends[0].logprobs == ends[1].logprobs


def tensor_bytes() -> int:
    """The memory of all tensors that Python knows; what several share is counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) not in (torch.Tensor, torch.nn.Parameter):
            continue
        # other tests of the process may have left sparse tensors, or tensors on the meta device
        if (one.layout, one.device.type) == (torch.strided, "cpu"):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_states_take_what_start_up_says(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, kept states and main memory, when all are full, to 5 %."""
    wide: dict[str, Any] = {"d_model": 64, "n_layers": 2, "vocab_size": 257, "eos_token_id": 256}
    config: ModelConfig = MambaConfig(**wide, inner=1024, state_size=64, dt_rank=4)
    if name == "mamba2":
        config = Mamba2Config(**wide, heads=16, head_dim=64, state_size=64, groups=1)
    folder = save_random(tmp_path, config)
    of_one = load_config(folder).state_bytes + 4 * 64
    # as for large states, of which a slab holds few
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 2 * of_one)

    def served(slots: int, share: int, on_host: int) -> int:
        """Bytes of tensors once cached and kept states fill all rows."""
        before = tensor_bytes()
        engine = load(folder, max_slots=slots, share_slots=share, host_state_bytes=on_host * of_one)
        for number in range(share + on_host + 1):
            keep = KeepState(id="talk") if number % 2 else None
            text = list(f"{number} foxes".encode())
            run(engine, text, count=1, keep=keep, owner=str(number))
        tiers = engine._cache.tiers
        assert (tiers.device_used, tiers.host_used) == (share, on_host)
        return tensor_bytes() - before

    with caplog.at_level("INFO", logger="engine"):
        least = served(1, 1, 0)
        most = served(20, 30, 40)
    said = [re.search(r"; (\d+) MB for .* at most (\d+) MB", line) for line in caplog.messages]
    (at_least, _), (on_device, on_host) = [map(int, found.groups()) for found in said if found]
    assert on_device > 5 and on_host > 5
    assert most - least == pytest.approx(10**6 * (on_device + on_host - at_least), rel=0.05)
    assert most - least == pytest.approx((50 - 2 + 40) * of_one, rel=0.05)
