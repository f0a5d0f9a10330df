"""The peers of Mamba compute what our model does, with its weights."""

from __future__ import annotations

import pytest
import torch

from engine.models.mamba.config import MambaConfig
from engine.models.mamba.lm import MambaLM
from loadtest.peers.models import package_peer, plain_decoder

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> MambaLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=96, d_model=32, n_layers=2, inner=64, state_size=8, dt_rank=4,
        tie_embeddings=request.param,
    )  # fmt: skip
    made = MambaLM(config).eval()
    with torch.no_grad():
        for layer in made.layers:
            layer.conv_bias.normal_(std=0.3)  # type: ignore[union-attr, operator]
            layer.D.normal_()  # type: ignore[union-attr, operator]
    return made


@torch.no_grad()
def test_the_plain_decoder_agrees_with_the_model(model: MambaLM) -> None:
    ids = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(4))
    expected, peer = model(ids), plain_decoder(model, 3, "eager")
    for time in range(20):
        torch.testing.assert_close(peer.logits(ids[:, time]), expected[:, time], rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_package_agrees_with_the_model(model: MambaLM) -> None:
    pytest.importorskip("transformers")
    peer = package_peer(model)
    assert peer is not None and peer.name == "transformers"
    ids = torch.randint(96, (20,), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(peer.prompt(ids), model(ids[None])[0, -1], rtol=0, atol=1e-4)
    tokens, read = [torch.zeros(2, 1, dtype=torch.int64)], peer.step(2, CPU)
    ours = plain_decoder(model, 2, "eager")
    ours.step()  # the peer read its first token when it was made
    for _ in range(6):
        tokens.append(read())
        ours.step()
        assert tokens[-1].flatten().tolist() == ours.tokens.tolist()
