"""States in bfloat16: half as large, a little less exact, and kept apart from those in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.loader import load_model
from engine.models.state import ModelState
from tests.models import mamba, mamba2
from tests.models.test_mamba import deviations, prefill, random_tokens

FAMILIES = pytest.mark.parametrize("family", [mamba, mamba2], ids=["mamba", "mamba2"])
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def written(folder: Path, family: ModuleType) -> Path:
    values: dict[str, Any] = family.VALUES
    folder.joinpath("config.json").write_text(json.dumps(values))
    save_file(family.published_weights(values), folder / "model.safetensors", {"format": "pt"})
    return folder


@FAMILIES
@DEVICES
@torch.no_grad()
def test_states_are_bfloat16_and_sums_are_not(
    family: ModuleType, device: str, tmp_path: Path
) -> None:
    folder, tokens = written(tmp_path, family), random_tokens(90).to(device)
    exact, _ = load_model(folder, device)
    model, config = load_model(folder, device, state_dtype="bfloat16")
    assert config.state_bytes < exact.config.state_bytes
    states = exact.new_state(1), model.new_state(1)
    assert [tensor.dtype for tensor in states[1].tensors()] == [torch.bfloat16, torch.float32]
    whole = [
        prefill(one, tokens[:60], state) for one, state in zip((exact, model), states, strict=True)
    ]
    # from zeros, a prompt is read in fp32 up to its end
    torch.testing.assert_close(whole[1], whole[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(states[1]["ssm"], states[0]["ssm"].bfloat16())
    last: list[Tensor] = []
    for one, state in zip((exact, model), states, strict=True):
        row = torch.zeros(1, dtype=torch.int32, device=device)
        for token in tokens[60:].split(1):
            hidden = one.step(token, state, row)
        last.append(one.logits(hidden).double().cpu())
    assert 0 < deviations(last[1], last[0]) < 0.05


@FAMILIES
@torch.no_grad()
def test_a_step_rounds_what_it_would_have_written(family: ModuleType, tmp_path: Path) -> None:
    folder = written(tmp_path, family)
    exact, _ = load_model(folder, "cpu")
    model, _ = load_model(folder, "cpu", state_dtype="bfloat16")
    state = model.new_state(1)
    prefill(model, random_tokens(20), state)
    wide = ModelState({name: tensor.float().clone() for name, tensor in state.named.items()})
    token, row = random_tokens(1, seed=9), torch.zeros(1, dtype=torch.int32)
    torch.testing.assert_close(model.step(token, state, row), exact.step(token, wide, row))
    torch.testing.assert_close(
        state["ssm"].float(), wide["ssm"].bfloat16().float(), rtol=0.01, atol=1e-5
    )


@FAMILIES
def test_an_engine_keeps_such_states_apart(family: ModuleType, tmp_path: Path) -> None:
    folder = str(written(tmp_path, family))

    def info(state_dtype: str) -> Any:
        config = EngineConfig(
            model=folder, device="cpu", max_slots=2, threads=1, state_dtype=state_dtype
        )
        return Engine.load(config).info

    auto, wide, narrow = (info(one) for one in ("auto", "float32", "bfloat16"))
    assert auto.fingerprint == wide.fingerprint != narrow.fingerprint
    assert [spec.dtype for spec in narrow.state] == ["BF16", "F32"]
    assert narrow.state_bytes < wide.state_bytes == auto.state_bytes


def test_deterministic_refuses_states_that_are_rounded_where_a_prompt_is_cut(
    tmp_path: Path,
) -> None:
    folder = str(written(tmp_path, mamba))
    config = EngineConfig(
        model=folder, device="cpu", max_slots=2, state_dtype="bfloat16", deterministic=True
    )
    with pytest.raises(ConfigError, match=r"state_dtype is 'bfloat16'.*with deterministic"):
        Engine.load(config)


def test_models_without_such_states_refuse_them() -> None:
    with pytest.raises(ConfigError, match=r"state_dtype is 'bfloat16'.*family minrnn"):
        load_model(Path("engine/checkpoints/shakespeare-mingru"), "cpu", state_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"state_dtype is 'float16'"):
        EngineConfig(state_dtype="float16")
