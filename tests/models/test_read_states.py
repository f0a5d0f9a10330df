"""LM.read: windows of a text with the state carried from each to the next, as in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.models.minrnn.config import CellName, MinRnnConfig
from engine.models.minrnn.lm import LM

ROWS, TIME = 3, 12
FORMS = [{}, {"conv_kernel": 3}, {"learned_initial_state": True}]
FORMS += [{"conv_kernel": 4, "learned_initial_state": True, "tie_embeddings": True}]
every_form = pytest.mark.parametrize("form", FORMS, ids=["plain", "conv", "learned", "all"])
every_cell = pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn"])


def model(cell: CellName, form: dict[str, Any], dtype: torch.dtype = torch.float32) -> LM:
    torch.manual_seed(5)
    config = MinRnnConfig(cell=cell, vocab_size=11, d_model=8, n_layers=2, **form)
    return LM(config).to(dtype).eval()


def text() -> Tensor:
    return torch.randint(11, (ROWS, TIME), generator=torch.Generator().manual_seed(1))


def in_windows(lm: LM, tokens: Tensor, *lengths: int) -> tuple[Tensor, dict[str, Tensor]]:
    state = lm.new_state(ROWS).named
    logits = []
    for window in tokens.split(lengths, dim=1):
        found, state = lm.read(window, state)
        logits.append(found)
    return torch.cat(logits, dim=1), dict(state)


@every_cell
@every_form
def test_from_the_initial_state_it_is_forward(cell: CellName, form: dict[str, Any]) -> None:
    lm, tokens = model(cell, form), text()
    logits, after = lm.read(tokens, lm.new_state(ROWS).named)
    torch.testing.assert_close(logits, lm(tokens))
    assert {name: state.shape for name, state in after.items()} == {
        name: state.shape for name, state in lm.new_state(ROWS).named.items()
    }


@every_cell
@every_form
@pytest.mark.parametrize("lengths", [(6, 6), (1, 4, 7), (2, 1, 1, 1, 7)])
def test_windows_with_carried_states_are_the_text_at_once_and_what_a_server_reads(
    cell: CellName, form: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """Also windows shorter than the taps of the convolution."""
    lm, tokens = model(cell, form), text()
    with torch.no_grad():
        logits, after = in_windows(lm, tokens, *lengths)
        torch.testing.assert_close(logits, lm(tokens), rtol=1e-4, atol=1e-5)
        served = lm.new_state(ROWS)
        bounds = torch.arange(0, (ROWS + 1) * TIME, TIME, dtype=torch.int32)
        slots = torch.arange(ROWS, dtype=torch.int32)
        hidden = lm.prefill(tokens.flatten().int(), bounds, served, slots)
        expected = lm.logits(hidden).view(ROWS, TIME, -1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for name, state in served.named.items():
        torch.testing.assert_close(after[name], state, rtol=1e-4, atol=1e-5)


@every_cell
@every_form
def test_fresh_rows_begin_again(cell: CellName, form: dict[str, Any]) -> None:
    lm, tokens = model(cell, form), text()
    with torch.no_grad():
        _, state = lm.read(tokens, lm.new_state(ROWS).named)
        carried, _ = lm.read(tokens, state)
        fresh = torch.tensor([False, True, False])
        logits, after = lm.read(tokens, state, fresh)
        torch.testing.assert_close(logits[1], lm(tokens)[1])
        torch.testing.assert_close(logits[[0, 2]], carried[[0, 2]])
        assert not torch.allclose(carried[1], logits[1])
        for name in after:
            torch.testing.assert_close(after[name][:, 1], state[name][:, 1])


@every_cell
@every_form
def test_gradients_of_two_windows_are_those_of_one(cell: CellName, form: dict[str, Any]) -> None:
    """In float64, through the state from the second window into the first one."""
    lm, tokens = model(cell, form, torch.float64), text()
    targets = tokens.roll(-1, 1).flatten()

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        lm.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), targets).backward()
        found = {name: parameter.grad for name, parameter in lm.named_parameters()}
        assert None not in found.values()
        return {name: grad.clone() for name, grad in found.items() if grad is not None}

    # float64 states: those of new_state are copies, without the learned initial state's gradient
    first, rest = tokens.split((5, TIME - 5), dim=1)
    fresh = torch.ones(ROWS, dtype=torch.bool)
    begin = {name: state.double() for name, state in lm.new_state(ROWS).named.items()}
    logits, state = lm.read(first, begin, fresh)
    assert all(tensor.requires_grad for tensor in state.values())
    more, _ = lm.read(rest, state)
    pieces, whole = gradients(torch.cat((logits, more), dim=1)), gradients(lm(tokens))
    assert set(pieces) == set(whole)
    for name, grad in whole.items():
        torch.testing.assert_close(pieces[name], grad, rtol=1e-9, atol=1e-12)
