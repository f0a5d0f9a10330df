"""Which family builds a model, and what its sequences carry."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from engine.errors import ConfigError
from engine.models import registry
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.state import new_state
from engine.ops.upload import UploadRing
from engine.runner.state_pool import StatePool
from engine.state_spec import StateSpec

PLAIN = MinRnnConfig(cell="mingru", vocab_size=29, d_model=8, n_layers=2, expansion=1.5)
CONVOLVED = dataclasses.replace(PLAIN, cell="minlstm", conv_kernel=4)


def test_a_config_says_which_family_a_model_is_of() -> None:
    for config in (PLAIN, CONVOLVED):
        assert registry.family_of(config).name == "minrnn"
        assert isinstance(registry.build(config), LM)
        assert registry.config_from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="family is 'gpt'; allowed: minrnn") as error:
        registry.config_from_dict({"family": "gpt", "cell": "mingru"})
    assert error.value.param == "family"


def test_an_unknown_architecture_is_refused_by_name() -> None:
    published = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*does not serve; allowed: ") as error:
        registry.config_from_dict(published)
    assert error.value.param == "architectures"


@pytest.mark.parametrize("cell", [{}, {"layer": "Mamba1"}, {"layer": "Mamba2"}, {"layer": 3}, [1]])
def test_a_name_of_two_families_is_claimed_by_one(cell: object) -> None:
    """Names are of one family, but for those of mamba_ssm."""
    names = [family.name for family in registry.FAMILIES]
    assert len(names) == len(set(names))
    shared = {"architectures": {"MambaLMHeadModel"}, "model_types": set(), "marks": {"ssm_cfg"}}
    for kind, expected in shared.items():
        of_all = Counter(name for family in registry.FAMILIES for name in getattr(family, kind))
        assert {name for name, count in of_all.items() if count > 1} == expected
        for name in expected:
            its = [family for family in registry.FAMILIES if name in getattr(family, kind)]
            assert sum(family.claims({"ssm_cfg": cell}) for family in its) == 1


@pytest.mark.parametrize(
    ("config", "specs"),
    [
        (PLAIN, [StateSpec("cell", 2, (12,))]),
        (CONVOLVED, [StateSpec("cell", 2, (12,)), StateSpec("conv", 2, (3, 8))]),
    ],
)
def test_what_a_sequence_carries(config: MinRnnConfig, specs: list[StateSpec]) -> None:
    """The model, the pool and the config, by which files of states are checked, agree."""
    assert list(config.state) == specs
    assert sum(spec.bytes for spec in specs) == config.state_bytes
    states = [LM(config).new_state(3), StatePool(config, 2, UploadRing(torch.device("cpu"))).state]
    for state in states:
        shapes = [(spec.layers, 3, *spec.shape) for spec in specs]
        assert [tuple(tensor.shape) for tensor in state.tensors()] == shapes
        assert {tensor.dtype for tensor in state.tensors()} == {torch.float32}


def test_new_states_begin_at_the_initial_state() -> None:
    initial = torch.randn(2, 12)
    state = new_state(CONVOLVED.state, 3, {"cell": initial})
    assert torch.equal(state["cell"], initial.unsqueeze(1).expand(-1, 3, -1))
    assert state.get("conv") is not None and not state["conv"].any()
    assert new_state(PLAIN.state, 1, {"cell": initial.double()})["cell"].dtype == torch.float64
