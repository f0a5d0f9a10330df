from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.models.minrnn.config import CellName, MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.training import evaluation
from engine.training.evaluation import (
    CarriedLoss,
    Loss,
    carried_loss,
    covering_windows,
    sample,
    served_windows,
    streams_loss,
    windows_loss,
)


def model(cell: CellName, conv_kernel: int = 4, learned: bool = False) -> LM:
    torch.manual_seed(5)
    config = MinRnnConfig(
        cell=cell,
        vocab_size=11,
        d_model=8,
        n_layers=2,
        conv_kernel=conv_kernel,
        learned_initial_state=learned,
    )
    return LM(config).eval()


def text(tokens: int) -> Tensor:
    return torch.randint(11, (tokens,), generator=torch.Generator().manual_seed(tokens))


def nats_from_initial_state(lm: LM, ids: Tensor) -> list[float]:
    """-log p of ids[1:], stepping token by token from the initial state."""
    state, slots = lm.new_state(1), torch.zeros(1, dtype=torch.int32)
    nats = []
    for token, target in pairwise(ids):
        logits = lm.logits(lm.step(token.view(1), state, slots))[0]
        nats.append(-float(logits.double().log_softmax(-1)[target].detach()))
    return nats


@pytest.mark.parametrize("tokens", [2, 3, 8, 9, 10, 16, 17, 41])
def test_windows_predict_every_token_but_the_first_once(tokens: int) -> None:
    ids = torch.arange(tokens)
    seen = list(covering_windows(ids, window=8, batch=2))
    assert torch.equal(torch.cat([targets.flatten() for _, targets in seen]), ids[1:])
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in seen)
    assert all(inputs.shape[0] <= 2 and inputs.shape[1] <= 8 for inputs, _ in seen)


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
@pytest.mark.parametrize("tokens", [17, 29])
def test_windows_loss_is_that_of_each_window_read_from_the_initial_state(
    cell: CellName, tokens: int
) -> None:
    lm, ids = model(cell), text(tokens)
    naive = [
        nat
        for start in range(0, tokens - 1, 8)
        for nat in nats_from_initial_state(lm, ids[start : start + 9])
    ]
    loss = windows_loss(lm, ids.int(), window=8, batch=2)
    assert loss.tokens == len(naive) == tokens - 1
    assert loss.nats == pytest.approx(sum(naive), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_loss_on_a_gpu_is_that_on_the_cpu(dtype: torch.dtype) -> None:
    """Of a cell whose norm and gate have a kernel of their own there."""
    lm, ids = model("hgrn").to(dtype), text(29).int()
    expected = windows_loss(lm, ids, window=8, batch=2)
    loss = windows_loss(lm.cuda(), ids.cuda(), window=8, batch=2)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    assert loss.nats == pytest.approx(expected.nats, rel=tolerance)


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
@pytest.mark.parametrize(("conv_kernel", "learned"), [(0, False), (4, False), (2, True)])
def test_carried_loss_is_that_of_stepping_through_the_text(
    cell: CellName, conv_kernel: int, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    lm, ids = model(cell, conv_kernel, learned), text(40)
    naive = nats_from_initial_state(lm, ids)
    loss = carried_loss(lm, ids)
    assert loss.tokens == 39
    assert loss.nats == pytest.approx(sum(naive), rel=1e-5)
    assert loss.per_token == pytest.approx(sum(naive) / 39, rel=1e-5)


def test_pieces_of_a_text_score_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("mingru"), text(40)
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    pieces = CarriedLoss(lm, lm.new_state(1))
    for piece in ids.split([1, 2, 0, 30, 7]):
        pieces.feed(piece)
    assert pieces.loss.tokens == 35  # the whole chunks so far
    assert pieces.finish() == carried_loss(lm, ids)


@pytest.mark.parametrize("unscored", [1, 2, 7, 8, 9, 20, 40, 50])
def test_the_first_tokens_can_be_read_without_being_scored(
    unscored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, ids = model("mingru"), text(40)
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    naive = nats_from_initial_state(lm, ids)[unscored - 1 :]
    seen: list[Tensor] = []
    carried = CarriedLoss(lm, lm.new_state(1), unscored=unscored, each=seen.append)
    for piece in ids.split(13):
        carried.feed(piece)
    loss = carried.finish()
    assert loss.tokens == len(naive) == max(40 - unscored, 0)
    assert loss.nats == pytest.approx(sum(naive), rel=1e-5)
    assert all(1 <= nats.numel() <= 7 for nats in seen)
    assert torch.cat([*seen, torch.empty(0)]).tolist() == pytest.approx(naive, rel=1e-4)


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
@pytest.mark.parametrize("window", [1, 3, 8, 20, 100])
@pytest.mark.parametrize("tokens", [2, 17, 41])
def test_served_windows_are_those_of_each_read_from_the_same_state(
    cell: CellName, window: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of windows shorter and longer than what is read at once."""
    monkeypatch.setattr(evaluation, "CHUNK", 8)
    monkeypatch.setattr(evaluation, "WINDOWS_TOKENS", 16)
    lm, ids = model(cell, learned=True), text(tokens)
    start = lm.new_state(1)
    plain = sum(served_windows(lm, start, ids, window), Loss(0.0, 0))
    assert plain.tokens == tokens - 1
    expected = windows_loss(lm, ids.int(), window=window, batch=2)
    assert plain.nats == pytest.approx(expected.nats, rel=1e-5)

    before = torch.tensor([3, 1, 4], dtype=torch.int32)
    bounds, slots = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    lm.prefill(before, bounds, start, slots)
    naive = [
        nat
        for first in range(0, tokens - 1, window)
        for nat in nats_from_initial_state(lm, torch.cat((before, ids[first:][: window + 1])))[3:]
    ]
    after = sum(served_windows(lm, start, ids, window), Loss(0.0, 0))
    assert after.tokens == len(naive)
    assert after.nats == pytest.approx(sum(naive), rel=1e-5)


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
@pytest.mark.parametrize(
    ("tokens", "batch", "limit"),
    [(2, 4, 0), (9, 4, 0), (41, 1, 0), (41, 3, 0), (60, 3, 24), (60, 3, 31), (60, 3, 2)],
)
def test_streams_are_scored_each_with_its_state_carried(
    cell: CellName, tokens: int, batch: int, limit: int
) -> None:
    lm, ids = model(cell, learned=True), text(tokens)
    loss = streams_loss(lm, ids.int(), window=8, batch=batch, tokens=limit)
    streams = max(1, min(batch, (tokens - 1) // 8))
    length = (tokens - 1) // streams
    read = min(length, max(1, limit // streams)) if limit else length
    naive = [
        nat
        for stream in range(streams)
        for nat in nats_from_initial_state(lm, ids[stream * length :][: read + 1])
    ]
    assert loss.tokens == len(naive) == streams * read
    assert loss.nats == pytest.approx(sum(naive), rel=1e-5)


def test_one_stream_is_the_carried_loss() -> None:
    lm, ids = model("mingru"), text(60)
    one, carried = streams_loss(lm, ids.int(), window=8, batch=1), carried_loss(lm, ids)
    assert one.tokens == carried.tokens
    assert one.nats == pytest.approx(carried.nats, rel=1e-5)


def test_a_sample_is_spread_evenly() -> None:
    ids = torch.arange(100)
    assert sample(ids, 12, 4).tolist() == [0, 1, 2, 25, 26, 27, 50, 51, 52, 75, 76, 77]
    assert sample(ids, 3, 4).tolist() == [0, 33, 66]
    assert sample(ids, 9, 4, window=4).tolist() == [0, 1, 2, 3, 50, 51, 52, 53]
    assert sample(ids, 99, 4).tolist()[-1] == 98
    for whole in (0, 100, 1000):
        assert sample(ids, whole, 4) is ids


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_to_score_is_no_loss(tokens: int) -> None:
    loss = carried_loss(model("mingru"), text(tokens) if tokens else torch.empty(0))
    assert loss.tokens == 0
    assert math.isnan(loss.per_token)
    lm = model("mingru")
    assert list(served_windows(lm, lm.new_state(1), torch.zeros(tokens).int(), 8)) == []
