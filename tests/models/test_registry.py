"""Which family builds a model, and what its sequences carry."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models import registry
from engine.models.minrnn.lm import LM
from engine.models.state import StateSpec, new_state, state_specs
from engine.ops.upload import UploadRing
from engine.runner.state_pool import StatePool

PLAIN = ModelConfig(cell="mingru", vocab_size=29, d_model=8, n_layers=2, expansion=1.5)
CONVOLVED = dataclasses.replace(PLAIN, cell="minlstm", conv_kernel=4)


def test_a_cell_says_which_family_a_model_is_of() -> None:
    for config in (PLAIN, CONVOLVED):
        assert registry.family_of(config).name == "minrnn"
        assert isinstance(registry.build(config), LM)
    unknown = dataclasses.replace(PLAIN)
    object.__setattr__(unknown, "cell", "hgrn")
    with pytest.raises(ConfigError, match="cell 'hgrn'; known cells: mingru, minlstm") as error:
        registry.build(unknown)
    assert error.value.param == "cell"


def test_no_two_families_have_a_cell_in_common() -> None:
    cells = [cell for family in registry.FAMILIES for cell in family.cells]
    assert len(cells) == len(set(cells))


@pytest.mark.parametrize(
    ("config", "specs"),
    [
        (PLAIN, [StateSpec("cell", 2, (12,))]),
        (CONVOLVED, [StateSpec("cell", 2, (12,)), StateSpec("conv", 2, (3, 8))]),
    ],
)
def test_what_a_sequence_carries(config: ModelConfig, specs: list[StateSpec]) -> None:
    """The model, the pool and the config, by which files of states are checked, agree."""
    assert list(state_specs(config)) == specs
    assert sum(spec.bytes for spec in specs) == config.state_bytes
    states = [LM(config).new_state(3), StatePool(config, 2, UploadRing(torch.device("cpu"))).state]
    for state in states:
        shapes = [(spec.layers, 3, *spec.shape) for spec in specs]
        assert [tuple(tensor.shape) for tensor in state.tensors()] == shapes
        assert {tensor.dtype for tensor in state.tensors()} == {torch.float32}


def test_new_states_begin_at_the_initial_state() -> None:
    initial = torch.randn(2, 12)
    state = new_state(CONVOLVED, 3, initial)
    assert torch.equal(state.cell, initial.unsqueeze(1).expand(-1, 3, -1))
    assert state.conv is not None and not state.conv.any()
    assert new_state(PLAIN, 1, initial.double()).cell.dtype == torch.float64
