"""score: blocks of positions, targets alone or with the best beside them, give the same numbers."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from engine.ops import read_reports
from engine.ops.upload import UploadRing
from engine.runner import prompt_logprobs as scoring
from engine.runner.sampling.random_streams import token_reports
from engine.step_plan import PrefillChunk

VOCAB, WIDTH = 300, 16
pytestmark = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Head:
    """Maps hidden rows to logits, and notes how many it was asked for at a time."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(WIDTH, VOCAB, generator=generator).to(device)
        self.rows: list[int] = []

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.weight


def chunk(key: int, targets: list[int] | None, tokens: int, top: int = 0) -> PrefillChunk:
    return PrefillChunk(
        key, key, 0, array("i", [0] * tokens),
        None if targets is None else array("i", targets), score_top=top, sample=False,
    )  # fmt: skip


def hidden_of(tokens: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tokens, WIDTH, generator=generator).to(device)


CHUNKS = [chunk(1, [5, -1, 7], 3), chunk(2, None, 4), chunk(3, list(range(40)), 40)]
AT = [0, 2, *range(7, 47)]
TARGETS = [5, 7, *range(40)]


@pytest.mark.parametrize("rows", [1, 7, 42, 1000])
def test_targets_alone_are_scored_as_by_the_log_softmax(
    device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "BLOCK_BYTES", 4 * VOCAB * rows)
    head, hidden = Head(device), hidden_of(47, device)
    uploads = UploadRing(torch.device(device))
    reports = scoring.score(head, VOCAB, hidden, CHUNKS, uploads)
    assert reports is not None
    logprobs = read_reports(reports)
    assert sum(head.rows) == len(TARGETS) and max(head.rows) == min(rows, len(TARGETS))
    logits = hidden[AT] @ head.weight
    logits_targets = torch.tensor(TARGETS, device=device)
    wanted = read_reports(token_reports(logits, logits_targets, 0))
    torch.testing.assert_close(logprobs.chosen, wanted.chosen, rtol=1e-5, atol=1e-5)
    assert torch.equal(logprobs.is_greedy, wanted.is_greedy)
    assert logprobs.top_ids.shape == logprobs.top_logprobs.shape == (len(TARGETS), 0)
    for given, expected in zip(logprobs, wanted, strict=True):
        assert given.dtype == expected.dtype


def test_the_same_numbers_with_the_best_beside_them(device: str) -> None:
    head, hidden = Head(device), hidden_of(47, device)
    uploads = UploadRing(torch.device(device))
    with_best = [CHUNKS[0], CHUNKS[1], chunk(3, list(range(40)), 40, top=3)]
    alone = scoring.score(head, VOCAB, hidden, CHUNKS, uploads)
    ranked = scoring.score(head, VOCAB, hidden, with_best, uploads)
    assert alone is not None and ranked is not None
    assert alone.shape == (len(TARGETS), 2) and ranked.shape == (len(TARGETS), 8)
    one, other = read_reports(alone), read_reports(ranked)
    torch.testing.assert_close(one.chosen, other.chosen, rtol=1e-6, atol=2e-6)
    assert torch.equal(one.is_greedy, other.is_greedy)


def test_nothing_to_score(device: str) -> None:
    head = Head(device)
    hidden, uploads = hidden_of(4, device), UploadRing(torch.device(device))
    assert scoring.score(head, VOCAB, hidden, [CHUNKS[1]], uploads) is None
    assert head.rows == []


def test_blocks_fit_the_caches(device: str) -> None:
    """Of a GPU; whole tiles of the matrix product, and never more than elsewhere."""
    where = torch.device(device)
    for vocab in (66, 32_000, 1_000_000):
        most = max(1, scoring.BLOCK_BYTES // (4 * vocab))
        assert scoring._block_rows(vocab, where, in_cache=False) == most
        rows = scoring._block_rows(vocab, where, in_cache=True)
        if device == "cpu":
            assert rows == most
        else:
            cache = torch.cuda.get_device_properties(where).L2_cache_size
            assert rows <= most
            assert rows * 4 * vocab < cache or rows <= 128
