"""The peer computes what the models do: decoding and reading prompts, every cell, with and without
convolutions."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch

from engine.models.minrnn.config import CellName, MinRnnConfig
from engine.models.minrnn.lm import LM
from loadtest.lm_models import random_model
from loadtest.peers import torch_lm
from loadtest.peers.torch_lm import Decoder, min_lm, prompt_reader, read_prompt

CPU = torch.device("cpu")
SMALL = MinRnnConfig(cell="mingru", vocab_size=50, d_model=32, n_layers=3, expansion=1.5)


def made(cell: str, conv: int, learned: bool, layers: int = SMALL.n_layers) -> LM:
    config = dataclasses.replace(
        SMALL,
        n_layers=layers,
        cell=cast(CellName, cell),
        conv_kernel=conv,
        tie_embeddings=conv > 0,
        head_bias=True,
        learned_initial_state=learned,
    )
    model = random_model(config, CPU, torch.float32)
    random = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.3 * torch.randn(weight.shape, generator=random)
    return model


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
@pytest.mark.parametrize("conv", [0, 4])
@pytest.mark.parametrize("learned", [pytest.param(False, marks=pytest.mark.slow), True])
@torch.no_grad()
def test_both_reads_agree_with_the_model(
    cell: str, conv: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_lm, "PIECE", 16)  # pieces carry states and the convolution's inputs
    model = made(cell, conv, learned)
    ids = torch.randint(50, (2, 41), generator=torch.Generator().manual_seed(4))
    expected = model(ids)  # [2, 41, vocab]
    peer = Decoder(model, 2, "eager")
    for time in range(41):
        torch.testing.assert_close(peer.logits(ids[:, time]), expected[:, time], rtol=0, atol=1e-4)
    for row in range(2):
        torch.testing.assert_close(
            read_prompt(model, ids[row])[0], expected[row, -1], rtol=0, atol=1e-4
        )


def test_decoding_goes_on_greedily_and_starts_again() -> None:
    peer = Decoder(made("mingru", 4, False), 3, "eager")
    runs = []
    for _ in range(2):
        peer.tokens.copy_(torch.arange(3))
        run = []
        for _ in range(5):
            expected_from = peer.tokens.clone()
            peer.step()
            run.append(peer.tokens.tolist())
            assert peer.tokens.shape == expected_from.shape
        runs.append(run)
        peer.reset()
    assert runs[0] == runs[1]
    assert len({tuple(step) for step in runs[0]}) > 1


@pytest.mark.slow
def test_compiled_with_frozen_weights_gives_the_same_tokens() -> None:
    model = made("minlstm", 4, False, layers=1)  # each takes 20 seconds to compile
    eager, compiled = (Decoder(model, 2, mode) for mode in ("eager", "compile"))
    for _ in range(6):
        eager.step()
        compiled.step()
        assert eager.tokens.tolist() == compiled.tokens.tolist()
    ids = torch.arange(20)
    torch.testing.assert_close(
        prompt_reader(model, 20, "compile")(ids), read_prompt(model, ids), rtol=0, atol=1e-4
    )


def test_cells_that_it_does_not_know_are_refused() -> None:
    model = random_model(dataclasses.replace(SMALL, candidate="linear"), CPU, torch.float32)
    with pytest.raises(ValueError, match="candidate g"):
        Decoder(model, 1, "eager")
    with pytest.raises(ValueError, match="candidate g"):
        read_prompt(model, torch.arange(3))


def test_min_lm_has_the_same_shape() -> None:
    pytest.importorskip("minGRU_pytorch")
    assert min_lm(SMALL, CPU)(torch.arange(9)).shape == (1, 9, 50)
