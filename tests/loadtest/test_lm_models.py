"""Models to measure: their exact sizes, random weights that behave, and what a step must do."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import CheckpointError
from engine.models import loader as checkpoint
from engine.models.minrnn.config import CellName, MinRnnConfig
from loadtest import engine, lm_limits
from loadtest.lm_models import cells_of, random_model, size_config, subject, work
from loadtest.timing import Call

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "parameters", "inner", "tied"),
    [
        ("6.3m", 6_252_288, 768, False),
        ("25m", 24_690_816, 768, True),
        ("113m", 113_114_880, 1152, True),
        ("1.3b", 1_324_173_312, 3072, True),
    ],
)
def test_sizes_are_those_of_their_names(size: str, parameters: int, inner: int, tied: bool) -> None:
    config = size_config(size, "mingru", "bfloat16")
    assert (config.inner, config.tie_embeddings, config.conv_kernel) == (inner, tied, 0)
    assert config.mlp_hidden == 4 * config.d_model
    found = work(config, torch.bfloat16)
    assert found.parameters == parameters
    unread = 0 if tied else config.vocab_size * config.d_model
    assert found.weight_bytes == 2 * (parameters - unread)
    assert found.state_bytes == 4 * config.n_layers * inner


@pytest.mark.parametrize(
    ("size", "parameters", "float32", "state"),
    [
        ("mamba-130m", 129_135_360, 24 * 1536 * 18, 24 * 1536 * (16 + 3)),
        ("mamba-1.4b", 1_372_178_432, 48 * 4096 * 18, 48 * 4096 * (16 + 3)),
        ("mamba-2.8b", 2_768_345_600, 64 * 5120 * 18, 64 * 5120 * (16 + 3)),
        ("mamba2-130m", 128_989_632, 24 * 24 * 3, 24 * (1536 * 128 + 3 * (1536 + 256))),
        ("mamba2-1.3b", 1_343_757_312, 48 * 64 * 3, 48 * (4096 * 128 + 3 * (4096 + 256))),
    ],
)
def test_mamba_has_the_published_shapes_and_its_states_count(
    size: str, parameters: int, float32: int, state: int
) -> None:
    config = size_config(size, "mingru", "bfloat16")
    assert list(cells_of(size, ["minlstm"])) == [config.cell]
    found = work(config, torch.bfloat16)
    assert (found.parameters, found.state_bytes) == (parameters, 4 * state)
    assert found.weight_bytes == 2 * parameters + 2 * float32
    assert found.step_bytes(256) == found.weight_bytes + 2 * 256 * 4 * state


@pytest.mark.parametrize("size", ["mamba-130m", "mamba2-1.3b"])
def test_random_mamba_weights_keep_activations_and_vary_tokens(size: str) -> None:
    config = size_config(size, "", "float32")
    narrow: dict[str, Any] = {"d_model": 128, "n_layers": 24, "vocab_size": 500}
    narrow |= {"heads": 8, "head_dim": 32} if size.startswith("mamba2") else {"inner": 256}
    model = random_model(dataclasses.replace(config, **narrow), CPU, torch.float32)
    state, slots = model.new_state(32), torch.arange(32, dtype=torch.int32)
    tokens, visited = torch.arange(32) * 13, set()
    for _ in range(8):
        logits = model.logits(model.step(tokens, state, slots))
        deviation = logits.detach().std(1)
        assert float(deviation.min()) > 0.5 and float(deviation.max()) < 2
        tokens = logits.argmax(1)
        visited.update(tokens.tolist())
    assert len(visited) > 32


def test_work_of_a_model_counted_by_hand() -> None:
    config = MinRnnConfig(
        cell="minlstm", vocab_size=10, d_model=8, n_layers=2, conv_kernel=3, mlp_ratio=2.0
    )
    # A layer: conv taps, their bias, pointwise with bias; gates; out; up and down with biases.
    matrices = 8 * 8 + 3 * 16 * 8 + 16 * 8 + 2 * 16 * 8
    others = 8 * 3 + 8 + 8 + 16 + 8 + 8 + 8  # taps, biases, and the two norms
    found = work(config, torch.float32)
    assert found.parameters == 2 * (matrices + others) + 8 + 2 * 80
    assert found.weight_bytes == 4 * (found.parameters - 80)
    assert found.flops == 2 * (2 * matrices + 80)
    assert found.head_flops == 160
    assert found.state_bytes == 4 * 2 * (16 + 2 * 8)
    assert found.step_bytes(3) == found.weight_bytes + 6 * found.state_bytes


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
@pytest.mark.parametrize("layers", [3, 24])
def test_random_weights_keep_activations_and_vary_tokens(cell: str, layers: int) -> None:
    config = dataclasses.replace(
        size_config("113m", cast(CellName, cell), "float32"),
        d_model=128,
        n_layers=layers,
        vocab_size=500,
    )
    model = random_model(config, CPU, torch.float32)
    state, slots = model.new_state(32), torch.arange(32, dtype=torch.int32)
    tokens, visited = torch.arange(32) * 13, set()
    for _ in range(8):
        logits = model.logits(model.step(tokens, state, slots))
        deviation = logits.detach().std(1)
        assert float(deviation.min()) > 0.5 and float(deviation.max()) < 2
        tokens = logits.argmax(1)
        visited.update(tokens.tolist())
    assert len(visited) > 32
    assert float(state["cell"].abs().mean()) < 2


def test_random_weights_follow_the_seed_and_fill_every_parameter() -> None:
    config = size_config("6.3m", "minlstm", "bfloat16")
    first, again, other = (random_model(config, CPU, torch.bfloat16, seed) for seed in (1, 1, 2))
    for name, weight in first.named_parameters():
        assert weight.dtype == torch.bfloat16 and not weight.is_meta
        assert torch.equal(weight, again.state_dict()[name])
        if weight.dim() > 1:
            assert not torch.equal(weight, other.state_dict()[name])


def test_a_size_becomes_a_checkpoint_that_goes_away() -> None:
    with subject("6.3m", "minlstm", CPU, "bfloat16") as one:
        assert (one.name, one.size, one.config.cell) == ("6.3m-minlstm", "6.3m", "minlstm")
        model, config = checkpoint.load_model(one.folder, CPU)
        assert config == one.config
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, one.model.state_dict()[name])
    assert not one.folder.exists()


def test_a_bundled_model_is_taken_as_it_is() -> None:
    with subject("shakespeare-minlstm", "mingru", CPU, "float32") as one:
        assert (one.size, one.config.cell) == (None, "minlstm")
        assert one.model.activations == torch.float32
    assert one.folder.is_dir()


def test_quantised_weights_are_not_compared_with_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        engine.main(["--models", "shakespeare-minlstm", "--device", "cpu"])
    assert "shakespeare-minlstm: is quantised" in capsys.readouterr().err


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="7b"), subject("7b", "mingru", CPU, "float32"):
        pass


def test_the_bare_sequence_does_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(size_config("6.3m", "mingru", "float32"), conv_kernel=4)
    model = random_model(config, CPU, torch.float32)
    counted: list[int] = []

    def count(calls: list[Call], device: torch.device, seconds: float) -> float:
        with FlopCounterMode(display=False) as counter:
            calls[0]()
        counted.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(lm_limits, "_seconds", count)
    found = work(config, torch.float32)
    assert lm_limits.gemm_sequence(model, 5, 2, CPU) == 1.0
    assert counted == [5 * (found.flops - found.head_flops) + 2 * found.head_flops]


@pytest.mark.skipif(not lm_limits.packs_bf16(), reason="oneDNN packs no bf16 weights here")
def test_packed_weights_give_the_same_product() -> None:
    matrix, x = torch.randn(96, 64).bfloat16(), torch.randn(7, 64).bfloat16()
    product = lm_limits._packed(matrix, 7)(x)
    torch.testing.assert_close(product, x @ matrix.t(), rtol=0.02, atol=0.1)


def test_the_bare_sequence_runs_in_bf16() -> None:
    model = random_model(size_config("6.3m", "mingru", "bfloat16"), CPU, torch.bfloat16)
    assert lm_limits.gemm_sequence(model, 3, 1, CPU) > 0
