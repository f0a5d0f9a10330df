"""move_norm_weights leaves what a model computes, and the tensors that it had."""

from __future__ import annotations

import pytest
import torch

from engine.models.backends.weight_transforms import move_norm_weights
from tests.models.variants import VARIANTS, build


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS)
def test_a_model_computes_what_it_did(options: dict[str, object]) -> None:
    model = build(options).double()
    kept = dict(model.state_dict())
    before = {name: value.clone() for name, value in kept.items()}
    tokens = torch.randint(0, model.config.vocab_size, (2, 9))
    expected = model(tokens)
    move_norm_weights(model)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(model.norm.weight, before["norm.weight"])
    of_layers = [
        value
        for name, value in model.state_dict().items()
        if name.endswith("norm.weight")
        # Without an out projection no matrix reads h's norm.
        and (options.get("out_projection", True) or not name.endswith("cell.norm.weight"))
    ]
    assert sum(bool((weight != 1).any()) for weight in of_layers) == 1  # the last one's
    assert all(torch.equal(value, before[name]) for name, value in kept.items())
