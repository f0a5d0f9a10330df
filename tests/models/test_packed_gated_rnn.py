"""GRU and LSTM models packed for the CPU against the plain model, and bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.backends.cpu import CpuBackend
from engine.models.language_model import LanguageModel
from tests.models import gated_rnn
from tests.models.test_gated_rnn import build
from tests.models.test_packed import (
    plain_logits,
    prefilled,
    quantized,
    random_tokens,
    same_rows,
    stepped,
)
from tests.models.variants import int32

# Several panels and groups, none of which they fill evenly.
WIDE = {"hidden": 301, "embedding": 77}
KINDS = ("float32", "bfloat16", "int8", "int8-bfloat16")

cells = pytest.mark.parametrize("cell", list(gated_rnn.KINDS))
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def packed_of(cell: str, kind: str, **options: Any) -> tuple[CpuBackend, LanguageModel, Any]:
    """The backend, the plain model, and the weights that it stands for, float64."""
    model, _ = build(cell, **options)
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    if kind.startswith("int8"):
        model, weights = quantized(model)
    return CpuBackend(model), build(cell, **options)[0], weights


@cells
@kinds
@pytest.mark.parametrize("options", [*gated_rnn.VARIANTS.values(), WIDE])
def test_as_in_plain_torch(options: dict[str, Any], cell: str, kind: str) -> None:
    packed, model, weights = packed_of(cell, kind, **options)
    tokens = random_tokens(gated_rnn.VOCABULARY, 2, 23)
    want = plain_logits(model, weights, tokens)
    bound = 3e-2 if kind.endswith("bfloat16") else 1e-5
    state = packed.new_state(4)
    steps = stepped(packed, tokens, state, int32([2, 0]))
    assert float((steps.double() - want).abs().max() / want.std()) < bound
    other = packed.new_state(4)
    for row in range(2):
        read = prefilled(packed, tokens[row], other, row)
        assert float((read.double() - want[row]).abs().max() / want.std()) < bound
        assert torch.equal(read, steps[row]), "a prompt has the bits of its steps"
    assert same_rows(state, [2, 0], other, [0, 1])


@cells
@kinds
def test_a_row_has_the_same_bits_in_every_company(
    cell: str, kind: str, threads: Callable[[int], None]
) -> None:
    packed, _, _ = packed_of(cell, kind, **WIDE)
    rows = 70
    tokens = random_tokens(gated_rnn.VOCABULARY, rows, 3)
    threads(1)
    alone = packed.new_state(rows)
    expected = torch.cat(
        [stepped(packed, tokens[row : row + 1], alone, int32([row])) for row in range(rows)]
    )
    assert expected.isfinite().all()
    for count, batches in ((1, (1, 2, 5, 17, rows)), (2, (1, 3, 17, rows)), (3, (4, rows))):
        threads(count)
        for batch in batches:
            state = packed.new_state(rows + 5)
            order = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(batch))
            slots = order[:batch].to(torch.int32)
            assert torch.equal(stepped(packed, tokens[:batch], state, slots), expected[:batch])
            assert same_rows(state, slots.tolist(), alone, list(range(batch)))


@cells
@kinds
def test_packed_prompts_have_the_bits_of_each_alone(
    cell: str, kind: str, threads: Callable[[int], None]
) -> None:
    """Beside each other, in any parts, with padding sequences and tokens behind them."""
    packed, _, _ = packed_of(cell, kind, **WIDE)
    lengths, slots = (5, 0, 17, 3, 1, 30, 9), (3, 1, 0, -1, 4, 6, 2)
    edges = list(itertools.accumulate(lengths, initial=0))
    tokens = random_tokens(gated_rnn.VOCABULARY, edges[-1] + 3)

    def read(count: int, split: int | None) -> tuple[Tensor, Any]:
        threads(count)
        state = packed.new_state(8)
        hidden = torch.full((len(tokens), packed.config.d_model), torch.nan)
        for early in (True, False) if split is not None else (True,):
            rows: list[int] = []
            ends = [0]
            for begin, end in itertools.pairwise(edges):
                middle = end if split is None else min(begin + split, end)
                rows += range(begin, middle) if early else range(middle, end)
                ends.append(len(rows))
            rows += range(edges[-1], len(tokens))
            hidden[rows] = packed.prefill(tokens[rows], int32(ends), state, int32(list(slots)))
        return hidden, state

    expected, state = read(1, None)
    assert not expected[edges[3] : edges[4]].any() and not expected[edges[-1] :].any()
    for count, split in ((2, None), (3, 1), (1, 2), (2, 8)):
        hidden, other = read(count, split)
        assert torch.equal(hidden, expected)
        assert same_rows(other, list(range(8)), state, list(range(8)))
    threads(1)
    alone = packed.new_state(8)
    for sequence, slot in enumerate(slots):
        begin, end = edges[sequence], edges[sequence + 1]
        if slot >= 0 and begin < end:
            got = packed.prefill(tokens[begin:end], int32([0, end - begin]), alone, int32([slot]))
            assert torch.equal(got, expected[begin:end])
    assert same_rows(alone, list(range(8)), state, list(range(8)))


@cells
def test_a_padding_row_changes_nothing(cell: str) -> None:
    packed, _, _ = packed_of(cell, "float32")
    tokens = random_tokens(gated_rnn.VOCABULARY, 3, 2)
    state, other = packed.new_state(3), packed.new_state(3)
    want = stepped(packed, tokens[[0, 2]], state, int32([1, 2]))
    got = stepped(packed, tokens, other, int32([1, -1, 2]))
    assert torch.equal(got[[0, 2]], want)
    assert same_rows(state, [0, 1, 2], other, [0, 1, 2])


@cells
def test_nothing_to_read(cell: str) -> None:
    packed, _, _ = packed_of(cell, "float32")
    state = packed.new_state(2)
    none = torch.zeros(0, dtype=torch.int64)
    assert packed.step(none, state, int32([])).shape == (0, gated_rnn.VOCABULARY)
    assert packed.prefill(none, int32([0, 0]), state, int32([1])).shape == (0, 24)
    skipped = packed.prefill(none.new_ones(4), int32([0, 4]), state, int32([-1]))
    assert not skipped.any()
    assert all(not tensor.any() for tensor in state.named.values())


def test_the_memory_of_an_lstm_is_asked_for() -> None:
    for cell, other in (("gru", "lstm"), ("lstm", "gru")):
        packed, _, _ = packed_of(cell, "float32")
        stranger = packed_of(other, "float32")[0]
        state = stranger.new_state(2)
        tensors = [state["hidden"], None, None, None, state.get("cell")]
        with pytest.raises(RuntimeError, match="memory must be given for a model of LSTM layers"):
            torch.ops.minserve.lm_step(
                *(torch.zeros(1, dtype=torch.int64), int32([0]), packed._weights, packed._plan),
                *tensors,
            )
