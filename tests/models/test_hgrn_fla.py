"""HGRN models give the logits of flash-linear-attention's own, where that package is installed.

Its model runs on a CPU, with its plain recurrence and torch's functions in the place of its
kernels. Those tune themselves anew for each length, for minutes; `loadtest.engine` runs them.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import hgrn
from tests.models.test_hgrn import DEVIATIONS, deviations, model_of, prefill, random_tokens

pytest.importorskip("fla")

CASES = {name: changes for name, changes in hgrn.VARIANTS.items() if "old_mlp" not in changes}
LENGTHS = [1, 2, 7, 64, 257, 2049]


def _gated_norm(norm: nn.Module, x: Tensor, g: Tensor, **_: Any) -> Tensor:
    weight: Any = norm.weight
    eps: Any = norm.eps
    return functional.rms_norm(x, (x.shape[-1],), weight, eps) * functional.silu(g)


def _convolution(conv: nn.Conv1d, x: Tensor, **_: Any) -> tuple[Tensor, None]:
    padded = functional.pad(x.transpose(1, 2), (conv.weight.shape[2] - 1, 0))
    y = functional.conv1d(padded, conv.weight, groups=conv.groups)
    return y.transpose(1, 2), None


def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what runs on a GPU alone."""
    layers = importlib.import_module("fla.layers.hgrn")
    naive = importlib.import_module("fla.ops.hgrn.naive").naive_recurrent_hgrn
    for name in ("chunk_hgrn", "fused_recurrent_hgrn"):
        monkeypatch.setattr(
            layers,
            name,
            lambda x, g, initial_state, output_final_state, **_: naive(
                x, g, initial_state, output_final_state
            ),
        )
    monkeypatch.setattr(layers.FusedRMSNormGated, "forward", _gated_norm)
    monkeypatch.setattr(layers.ShortConvolution, "forward", _convolution)
    for module in (layers, importlib.import_module("fla.modules.mlp")):
        monkeypatch.setattr(module, "swiglu", lambda gate, up: functional.silu(gate) * up)


@pytest.mark.parametrize("changes", list(CASES.values()), ids=list(CASES))
@torch.no_grad()
def test_logits_are_those_of_the_reference(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = importlib.import_module("fla.models.hgrn")
    _on_a_cpu(monkeypatch)
    values = {**hgrn.VALUES, **changes, "fuse_norm": False, "fuse_swiglu": False}
    given = {name: value for name, value in values.items() if name != "torch_dtype"}
    weights = hgrn.published_weights(values)
    theirs = models.HGRNForCausalLM(models.HGRNConfig(**given)).eval()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    if values["tie_word_embeddings"]:
        theirs.lm_head.weight = theirs.model.embeddings.weight
    ours = model_of(values, weights)
    for length in LENGTHS:
        tokens = random_tokens(length, seed=length)
        expected = theirs(tokens.long().unsqueeze(0), use_cache=False).logits[0]
        got = prefill(ours, tokens, ours.new_state(1))
        assert deviations(got, expected.double()) < DEVIATIONS
