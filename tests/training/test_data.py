from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.training.data import Data, Part, Windows, min_tokens, split


def part(tokens: int) -> Part:
    """A text whose tokens say where they are."""
    return Part(np.arange(tokens))


def test_the_first_nine_tenths_are_trained_on_and_the_rest_tests() -> None:
    ids = np.arange(101) % 7
    text = Part(ids, starts=np.array([0, 5, 89, 90, 95]), bytes=202)
    parts = split(text, window=8)
    assert (len(parts.train), len(parts.valid), parts.test) == (90, 11, None)
    assert np.array_equal(np.concatenate((parts.train.ids, parts.valid.ids)), ids)
    assert parts.train.starts.tolist() == [0, 5, 89]
    assert parts.valid.starts.tolist() == [0, 5]
    assert (parts.train.bytes, parts.valid.bytes) == (180, 22)


def test_windows_are_runs_of_the_text_and_their_successors() -> None:
    batch = Windows(part(50), batch=200, window=8, seed=1).draw()
    assert batch.inputs.shape == batch.targets.shape == (200, 8)
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert torch.equal(batch.inputs, batch.inputs[:, :1] + torch.arange(8))
    # every start, the last one included
    assert set(batch.inputs[:, 0].tolist()) == set(range(42))
    assert batch.fresh.all()


def test_the_seed_alone_decides_the_windows() -> None:
    first, again, other = (Windows(part(1000), batch=4, window=8, seed=seed) for seed in (3, 3, 4))
    drawn = first.draw().inputs
    assert torch.equal(drawn, again.draw().inputs)
    assert not torch.equal(drawn, other.draw().inputs)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        split(part(0), window=8)


@pytest.mark.parametrize("window", [1, 8, 256])
def test_a_text_shorter_than_a_window_is_refused_with_the_least_length(window: int) -> None:
    least = min_tokens(window)
    split(part(least), window=window).check(window=window, vocab_size=least)
    with pytest.raises(ConfigError, match=f"at least {least}"):
        split(part(least - 1), window=window)


@pytest.mark.parametrize("bad", [-1, 7])
@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_ids_outside_of_the_vocabulary_are_refused(bad: int, name: str) -> None:
    parts = {name: Part(np.zeros(100, np.int64)) for name in ("train", "valid", "test")}
    Data(**parts).check(window=8, vocab_size=7)
    parts[name].ids[-1] = bad
    with pytest.raises(ConfigError, match="0 to 6"):
        Data(**parts).check(window=8, vocab_size=7)
