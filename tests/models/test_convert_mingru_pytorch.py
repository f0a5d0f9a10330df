"""Converted models against the package they come from, minGRU-pytorch 0.2.1, run in float64.

Its scan works on logarithms and drifts in float32; its norms' epsilon defaults to that of the
dtype and is set here, so that float64 computes the function that float32 was trained as.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from minGRU_pytorch.hybridLM import hybridLM
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLM import minLM
from minGRU_pytorch.minLSTM import minLSTM
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.models.convert import convert
from engine.models.loader import load_model, read_config
from engine.models.minrnn.cell import Cell
from engine.models.minrnn.lm import LM
from tests.models.variants import DEVICES, int32, relative_error

VOCAB, WIDTH = 37, 24
EPS = float(torch.finfo(torch.float32).eps)  # torch.nn.RMSNorm's own choice in float32
MARGIN = 1e-4  # the promised agreement of logits; greedy tokens agree where they are further apart


def original(use_lstm: bool, expansion: float, conv: bool, seed: int = 0) -> minLM:
    """A random minLM, its norms' weights too."""
    torch.manual_seed(seed)
    model = minLM(
        num_tokens=VOCAB,
        dim=WIDTH,
        depth=3,
        expansion=expansion,
        use_lstm=use_lstm,
        enable_conv=conv,
        conv_kernel_size=4,
        ff_mult=2,
    ).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.add_(0.3 * torch.randn(WIDTH))
                module.eps = EPS
    return model


def converted(model: minLM, folder: Path, device: str) -> LM:
    torch.save(model.state_dict(), folder / "weights.pt")
    convert(folder / "weights.pt", folder / "converted")
    loaded, config = load_model(folder / "converted", device, "float32")
    assert config.norm_eps == EPS and config.dtype == "float32"
    return loaded


def prefill(model: LM, tokens: Tensor) -> Tensor:
    device = str(model.embedding.weight.device)
    bounds = int32([0, tokens.numel()], device)
    state = model.new_state(1)
    hidden = model.prefill(tokens.to(device), bounds, state, int32([0], device))
    return model.logits(hidden).detach().double().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("conv", [False, True], ids=["no-conv", "conv"])
@pytest.mark.parametrize("expansion", [1.0, 1.5, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("use_lstm", [False, True], ids=["minGRU", "minLSTM"])
class TestAgainstThePackage:
    def test_logits(
        self, use_lstm: bool, expansion: float, conv: bool, device: str, tmp_path: Path
    ) -> None:
        theirs = original(use_lstm, expansion, conv)
        ours = converted(theirs, tmp_path, device)
        theirs = theirs.double()
        for length in (1, 2, 37, 512):
            tokens = torch.randint(0, VOCAB, (length,))
            with torch.no_grad():
                expected = theirs(tokens.unsqueeze(0))[0]
            assert (prefill(ours, tokens) - expected).abs().max() < MARGIN
            if device == "cpu":  # both in float64: the same function, not a near one
                exact = LM(ours.config).double()
                exact.load_state_dict(ours.state_dict())
                got = exact(tokens.unsqueeze(0))[0].detach()
                assert relative_error(got, expected) < 1e-9

    def test_greedy_decoding(
        self, use_lstm: bool, expansion: float, conv: bool, device: str, tmp_path: Path
    ) -> None:
        """Their next token by reading everything again (their cache excludes the convolution),
        ours by one step."""
        theirs = original(use_lstm, expansion, conv, seed=1)
        ours = converted(theirs, tmp_path, device)
        theirs = theirs.double()
        tokens = torch.randint(0, VOCAB, (11,))
        state, slots = ours.new_state(1), int32([0], device)
        hidden = ours.prefill(tokens.to(device), int32([0, 11], device), state, slots)[-1:]
        decided = 0
        for _ in range(48):
            with torch.no_grad():
                expected = theirs(tokens.unsqueeze(0))[0, -1]
            best, second = expected.topk(2).values
            token = expected.argmax()
            if best - second > MARGIN:
                decided += 1
                assert int(ours.logits(hidden).argmax()) == int(token)
            tokens = torch.cat((tokens, token.unsqueeze(0)))
            hidden = ours.step(token.to(device).unsqueeze(0), state, slots)
        assert decided >= 40


def cell_of(theirs: nn.Module, cell: str, folder: Path) -> Cell:
    """Our cell with the weights of theirs, through the converter."""
    model = original(cell == "minlstm", 1.5, conv=False)
    model.layers[0][2] = theirs
    torch.save(model.state_dict(), folder / "cell.pt")
    convert(folder / "cell.pt", folder / "cell")
    loaded = load_model(folder / "cell", "cpu")[0].double().layers[0].cell
    assert loaded.recurrence.cell == cell
    return loaded


@pytest.mark.parametrize("theirs", [minGRU, minLSTM], ids=["mingru", "minlstm"])
def test_continuing_in_chunks_follows_the_mathematics(
    theirs: type[nn.Module], tmp_path: Path
) -> None:
    """minGRU-pytorch's minLSTM cannot continue in chunks: given a hidden state, its parallel mode
    takes log_g of it, as if it were a candidate, where its sequential mode (and its minGRU)
    takes the state as it is. Reading in two chunks then differs from reading at once, and so from
    the recurrence h_t = f' h_{t-1} + i' g(v). Ours follows the recurrence in every mode."""
    torch.manual_seed(0)
    cell = theirs(WIDTH, expansion_factor=1.5)
    ours = cell_of(cell, theirs.__name__.lower(), tmp_path).float()
    cell = cell.double()
    x = torch.randn(1, 16, WIDTH).double()
    with torch.no_grad():
        whole = cell(x)
        first, hidden = cell(x[:, :8], return_next_prev_hidden=True)
        chunked = torch.cat((first, cell(x[:, 8:], hidden)), dim=1)
        stepped, hidden = [], None
        for token in x.split(1, dim=1):
            out, hidden = cell(token, hidden, return_next_prev_hidden=True)
            stepped.append(out)
    assert relative_error(torch.cat(stepped, dim=1), whole) < 1e-9
    chunks_agree = relative_error(chunked, whole) < 1e-9
    assert chunks_agree == (theirs is minGRU), "the package changed"

    state = torch.zeros(1, ours.inner)
    slots = int32([0])
    with torch.no_grad():
        parts = [ours.scan(part, state, int32([0, 8]), slots) for part in x[0].float().split(8)]
    assert relative_error(torch.cat(parts), whole[0]) < 1e-5


def test_expansion_1_has_no_out_projection(tmp_path: Path) -> None:
    for use_lstm in (False, True):
        folder = tmp_path / str(use_lstm)
        folder.mkdir()
        config = converted(original(use_lstm, 1.0, conv=False), folder, "cpu").config
        assert (config.inner, config.out_projection) == (WIDTH, False)


@pytest.mark.parametrize("width", [10, 24, 30, 49])
def test_every_width_that_their_rounding_gives_is_read_back(width: int, tmp_path: Path) -> None:
    """int(dim * expansion) and int(dim * ff_mult) are read off the shapes, not recomputed."""
    for expansion in (1.01, 1.1, 1.37, 2.3, 2.9):
        model = minLM(num_tokens=5, dim=width, depth=1, expansion=expansion, ff_mult=expansion)
        save_file(model.state_dict(), tmp_path / "weights.safetensors")
        config = convert(tmp_path / "weights.safetensors", tmp_path / f"{width}-{expansion}")
        assert config.inner == config.mlp_hidden == int(width * expansion)
        assert config.out_projection
        assert config == read_config(tmp_path / f"{width}-{expansion}" / "config.json")


def test_dropout_leaves_no_trace_in_the_layout(tmp_path: Path) -> None:
    torch.save(minLM(num_tokens=5, dim=8, depth=2, dropout=0.3).state_dict(), tmp_path / "w.pt")
    assert convert(tmp_path / "w.pt", tmp_path / "out").n_layers == 2


def test_the_hybrid_with_attention_is_refused(tmp_path: Path) -> None:
    torch.save(hybridLM(num_tokens=5, dim=8, depth=1).state_dict(), tmp_path / "hybrid.pt")
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.0\..*supported are"):
        convert(tmp_path / "hybrid.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
