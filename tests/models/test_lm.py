"""The language model: its three reads give one function, whatever shares the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.config import SCAN_CHUNK
from engine.models.backends.eager import EagerBackend
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState
from tests.models import reference
from tests.models.variants import DEVICES, VARIANTS, build, config_of, int32, relative_error

TOLERANCE = 1e-5  # fp32, relative to the largest logit or state


def random_tokens(model: LM, *shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    return tokens.to(model.embedding.weight.device)


def prefill(model: LM, tokens: Tensor, state: ModelState, slot: int) -> Tensor:
    """Logits [tokens, vocab] of one sequence that goes on in `slot`."""
    device = str(tokens.device)
    bounds = int32([0, tokens.numel()], device)
    return model.logits(model.prefill(tokens, bounds, state, int32([slot], device)))


def assert_same_row(a: ModelState, row_a: int, b: ModelState, row_b: int) -> None:
    assert relative_error(a["cell"][:, row_a], b["cell"][:, row_b]) < TOLERANCE
    if a.get("conv") is not None and b.get("conv") is not None:
        assert relative_error(a["conv"][:, row_a], b["conv"][:, row_b]) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_prefill_follows_the_equations(options: dict[str, object], device: str) -> None:
    model = build(options, device)
    tokens = random_tokens(model, 40)
    expected = reference.logits(model.config, model.state_dict(), tokens)
    assert relative_error(prefill(model, tokens, model.new_state(1), 0), expected) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_stepping_through_a_prompt_is_prefill(options: dict[str, object], device: str) -> None:
    model = build(options, device)
    tokens = random_tokens(model, 3, SCAN_CHUNK + 9)
    whole, stepped = model.new_state(4), model.new_state(4)
    slots = int32([2, 0, 3], device)
    expected = torch.stack(
        [prefill(model, row, whole, int(slot)) for row, slot in zip(tokens, slots, strict=True)]
    )
    got = torch.stack(
        [model.logits(model.step(column, stepped, slots)) for column in tokens.unbind(1)], dim=1
    )
    assert relative_error(got, expected) < TOLERANCE
    for slot in slots.tolist():
        assert_same_row(stepped, slot, whole, slot)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_training_forward_is_prefill(options: dict[str, object], device: str) -> None:
    model = build(options, device)
    tokens = random_tokens(model, 3, 50)
    expected = torch.stack([prefill(model, row, model.new_state(1), 0) for row in tokens])
    got = model(tokens)
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("options", VARIANTS)
def test_training_forward_in_float64_follows_the_equations(options: dict[str, object]) -> None:
    model = build(options).double()
    tokens = random_tokens(model, 2, 30)
    expected = [reference.logits(model.config, model.state_dict(), row) for row in tokens]
    assert relative_error(model(tokens), torch.stack(expected)) < 1e-12


@pytest.mark.parametrize("options", VARIANTS)
def test_a_prompt_split_anywhere_is_the_whole(options: dict[str, object]) -> None:
    model = build(options)
    tokens = random_tokens(model, 37)
    whole = model.new_state(1)
    expected = prefill(model, tokens, whole, 0)
    for boundary in range(1, 37):
        state = model.new_state(1)
        parts = [prefill(model, part, state, 0) for part in tokens.tensor_split([boundary])]
        assert relative_error(torch.cat(parts), expected) < TOLERANCE
        assert_same_row(state, 0, whole, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn"])
def test_a_long_prompt_in_chunks_is_the_whole(cell: str, device: str) -> None:
    model = build({"cell": cell, "conv_kernel": 4}, device)
    tokens = random_tokens(model, 3 * SCAN_CHUNK + 50)
    expected = prefill(model, tokens, model.new_state(1), 0)
    for size in (SCAN_CHUNK, 2 * SCAN_CHUNK, 100, 3):
        state = model.new_state(1)
        parts = [prefill(model, part, state, 0) for part in tokens.split(size)]
        assert relative_error(torch.cat(parts), expected) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_a_packed_batch_is_every_sequence_alone(options: dict[str, object], device: str) -> None:
    model = build(options, device)
    lengths = [1, 7, SCAN_CHUNK, 2, 64]
    sequences = [random_tokens(model, length, seed=length) for length in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    slots = [5, 0, 3, 7, 1]
    state = model.new_state(8)
    hidden = model.prefill(torch.cat(sequences), bounds, state, int32(slots, device))
    for sequence, slot, got in zip(
        sequences, slots, model.logits(hidden).split(lengths), strict=True
    ):
        alone = model.new_state(1)
        assert relative_error(got, prefill(model, sequence, alone, 0)) < TOLERANCE
        assert_same_row(state, slot, alone, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_other_rows_neither_matter_nor_change(options: dict[str, object], device: str) -> None:
    model = build(options, device)
    tokens = random_tokens(model, 9)
    clean = model.new_state(1)
    expected = torch.cat([prefill(model, tokens, clean, 0)] * 2)
    expected_next = model.logits(model.step(tokens[:1], clean, int32([0], device)))

    state = model.new_state(5)
    used, poisoned = [3, 1], [0, 2, 4]
    for tensor in state.tensors():
        tensor[:, poisoned] = torch.nan
    # The middle sequence is padding: its slot is negative.
    batch, bounds = torch.cat([tokens] * 3), int32([0, 9, 18, 27], device)
    slots = int32([3, -1, 1], device)
    got = model.logits(model.prefill(batch, bounds, state, slots))
    assert relative_error(torch.cat((got[:9], got[18:])), expected) < TOLERANCE
    got_next = model.logits(model.step(tokens[:1].expand(3), state, slots))
    assert relative_error(got_next[[0, 2]], expected_next.expand(2, -1)) < TOLERANCE
    for tensor in state.tensors():
        assert tensor[:, poisoned].isnan().all()
        assert not tensor[:, used].isnan().any()


@pytest.mark.parametrize("options", VARIANTS)
def test_new_state_is_the_initial_state(options: dict[str, object]) -> None:
    model = build(options)
    state = model.new_state(3)
    config = model.config
    assert state["cell"].shape == (config.n_layers, 3, config.inner)
    assert state["cell"].dtype == torch.float32
    rows = model.initial_state().get("cell", torch.zeros(config.n_layers, config.inner))
    assert torch.equal(state["cell"], rows.unsqueeze(1).expand_as(state["cell"]))
    if config.learned_initial_state:
        learned = model.state_dict()["layers.1.cell.initial"]
        assert relative_error(rows[1], reference.g(learned.double())) < 1e-6
    else:
        assert not rows.any()
    assert (state.get("conv") is None) == (config.conv_kernel == 0)
    size = sum(tensor[:, 0].numel() for tensor in state.tensors())
    assert 4 * size == config.state_bytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn"])
def test_sixteen_bit_weights(cell: str, dtype: torch.dtype, device: str) -> None:
    """The state and the logits stay fp32, and the logits are near those of the same weights in
    fp32: a layer rounds its activations a few times to 2^-9 (bfloat16) or 2^-12 (float16)."""
    model = build({"cell": cell, "conv_kernel": 4, "learned_initial_state": True}, device).to(dtype)
    exact = build({"cell": cell, "conv_kernel": 4, "learned_initial_state": True}, device)
    exact.load_state_dict({n: t.float() for n, t in model.state_dict().items()})
    tokens = random_tokens(model, 60)
    state = model.new_state(1)
    got = prefill(model, tokens, state, 0)
    assert got.dtype == state["cell"].dtype == torch.float32
    expected = prefill(exact, tokens, exact.new_state(1), 0)
    assert relative_error(got, expected) < (0.03 if dtype == torch.bfloat16 else 0.004)


def test_sixteen_bit_logits_are_not_rounded_to_sixteen_bits() -> None:
    model = build({"cell": "mingru"}).to(torch.bfloat16)
    hidden = torch.randn(50, model.config.d_model).to(torch.bfloat16)
    assert model.head is not None
    exact = hidden.double() @ model.head.weight.double().t()
    assert relative_error(model.logits(hidden), exact) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", VARIANTS)
def test_every_parameter_learns(options: dict[str, object], device: str) -> None:
    """A few steps on one repeated sentence: the loss falls, and no parameter is left out."""
    model = build(options, device).train()
    period = random_tokens(model, 4, 6).repeat(1, 4)
    inputs, targets = period[:, :-1], period[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn"])
def test_sixteen_bit_weights_have_gradients(cell: str, device: str) -> None:
    model = build({"cell": cell, "conv_kernel": 3}, device).to(torch.bfloat16)
    exact = build({"cell": cell, "conv_kernel": 3}, device)
    exact.load_state_dict({n: t.float() for n, t in model.state_dict().items()})
    tokens = random_tokens(model, 2, 20)
    for each in (model, exact):
        functional.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()).backward()
    for (name, rounded), parameter in zip(
        model.named_parameters(), exact.parameters(), strict=True
    ):
        assert rounded.grad is not None and parameter.grad is not None
        error = (rounded.grad.float() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 0.1, name  # what rounding every activation to 2^-9 leaves


def test_dropout_acts_in_training_alone() -> None:
    config = config_of({"cell": "mingru", "conv_kernel": 3})
    torch.manual_seed(0)
    model = LM(config, dropout=0.5)
    tokens = random_tokens(model, 2, 12)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    model.train()  # serving never drops anything, whatever the mode
    first, second = (prefill(model, tokens[0], model.new_state(1), 0) for _ in range(2))
    assert torch.equal(first, second)


def hgrn_with_bounds() -> tuple[LM, Tensor]:
    """A model, and its parameter of which all layers' lower bounds are computed."""
    model = build({"cell": "hgrn", "n_layers": 3})
    assert model.lower_bounds is not None
    return model, model.lower_bounds


def test_a_model_follows_changes_of_shared_weights() -> None:
    model, raw = hgrn_with_bounds()
    tokens = random_tokens(model, 12)
    before = prefill(model, tokens, model.new_state(1), 0)
    changed = 3 * torch.randn(raw.shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        raw.copy_(changed)
    expected = reference.logits(model.config, model.state_dict(), tokens)
    assert relative_error(prefill(model, tokens, model.new_state(1), 0), expected) < TOLERANCE
    assert relative_error(before, expected) > 100 * TOLERANCE
    weights = {**model.state_dict(), "lower_bounds": changed.flip(0)}
    model.load_state_dict(weights, assign=True)
    state, slots = model.new_state(1), int32([0])
    stepped = [model.logits(model.step(token, state, slots)) for token in tokens.split(1)]
    expected = reference.logits(model.config, weights, tokens)
    assert relative_error(torch.cat(stepped), expected) < TOLERANCE


def test_a_backend_computes_shared_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = hgrn_with_bounds()
    tokens, slots = random_tokens(model, 9), int32([0])
    expected = reference.logits(model.config, model.state_dict(), tokens)
    served = EagerBackend(model)
    monkeypatch.setattr(model, "channel_parameters", None)  # whoever calls it fails
    state = model.new_state(1)
    read = served.logits(served.prefill(tokens[:5].int(), int32([0, 5]), state, slots))
    stepped = [served.step(token, state, slots) for token in tokens[5:].split(1)]
    assert relative_error(torch.cat([read, *stepped]), expected) < TOLERANCE


def test_a_states_layers_are_views_made_once() -> None:
    state = build({"cell": "mingru", "conv_kernel": 3}).new_state(2)
    layer = state.layer(1)
    assert state.layer(1) is layer and layer.keys() == {"cell", "conv"}
    state["conv"][1, 0] = 5
    assert bool((layer["conv"][0] == 5).all()) and not state.layer(0)["conv"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("options", VARIANTS)
def test_serving_never_waits_for_the_device(options: dict[str, object]) -> None:
    model = build(options, "cuda").to(torch.bfloat16)
    tokens, state = random_tokens(model, 9), model.new_state(2)
    bounds, slots = int32([0, 4, 9], "cuda"), int32([1, 0], "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.logits(model.prefill(tokens, bounds, state, slots))
        model.logits(model.step(tokens[:2], state, slots))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state["cell"].isfinite().all()
