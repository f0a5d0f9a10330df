from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.training.data import Windows, min_tokens, split


def test_the_first_nine_tenths_are_trained_on_and_the_rest_tests() -> None:
    parts = split(torch.arange(101) % 7, window=8, vocab_size=7)
    assert parts.train.numel() == 90
    assert torch.equal(torch.cat((parts.train, parts.test)), (torch.arange(101) % 7).int())


def test_windows_are_runs_of_the_text_and_their_successors() -> None:
    windows = Windows(torch.arange(50, dtype=torch.int32), batch=200, window=8, seed=1)
    inputs, targets = windows.draw()
    assert inputs.shape == targets.shape == (200, 8)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
    assert set(inputs[:, 0].tolist()) == set(range(42))  # every start, the last one included


def test_the_seed_alone_decides_the_windows() -> None:
    ids = torch.arange(1000, dtype=torch.int32)
    first, again, other = (Windows(ids, batch=4, window=8, seed=seed) for seed in (3, 3, 4))
    drawn = first.draw()[0]
    assert torch.equal(drawn, again.draw()[0])
    assert not torch.equal(drawn, other.draw()[0])


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        split(torch.empty(0), window=8, vocab_size=7)


@pytest.mark.parametrize("window", [1, 8, 256])
def test_a_text_shorter_than_a_window_is_refused_with_the_least_length(window: int) -> None:
    least = min_tokens(window)
    split(torch.zeros(least), window=window, vocab_size=7)
    with pytest.raises(ConfigError, match=f"at least {least}"):
        split(torch.zeros(least - 1), window=window, vocab_size=7)


@pytest.mark.parametrize("bad", [-1, 7])
def test_ids_outside_of_the_vocabulary_are_refused(bad: int) -> None:
    ids = torch.zeros(100, dtype=torch.int64)
    ids[-1] = bad
    with pytest.raises(ConfigError, match="0 to 6"):
        split(ids, window=8, vocab_size=7)
