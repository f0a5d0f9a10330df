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


@pytest.mark.parametrize("seed", [0, 3])
def test_without_carrying_windows_are_drawn_as_they_always_were(seed: int) -> None:
    """So that a recipe still gives the model that it gave."""
    windows = Windows(part(1000), batch=5, window=8, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        firsts = torch.randint(1000 - 8, (5, 1), generator=generator)
        assert torch.equal(windows.draw().inputs, firsts + torch.arange(8))


@pytest.mark.parametrize("carry", [0.0, 0.5])
def test_a_text_of_one_window_is_drawn_again_and_again(carry: float) -> None:
    windows = Windows(part(9), batch=3, window=8, seed=1, carry=carry)
    for _ in range(5):
        batch = windows.draw()
        assert torch.equal(batch.inputs, torch.arange(8).expand(3, 8))
        assert torch.equal(batch.targets, torch.arange(1, 9).expand(3, 8))
        assert batch.fresh.all()


def test_carried_rows_go_on_where_they_ended_or_begin_at_a_start() -> None:
    starts = np.array([0, 100, 333, 950])
    windows = Windows(Part(np.arange(1000), starts), batch=4, window=8, seed=1, carry=0.8)
    before: torch.Tensor | None = None
    stopped = drawn = 0
    begun: set[int] = set()
    for _ in range(500):
        batch = windows.draw()
        firsts = batch.inputs[:, 0]
        assert torch.equal(batch.inputs, firsts[:, None] + torch.arange(8))
        assert int(batch.targets.max()) < 1000
        begun |= set(firsts[batch.fresh].tolist())
        if before is None:
            assert batch.fresh.all()
        else:
            goes_on = ~batch.fresh
            assert torch.equal(firsts[goes_on], before[goes_on] + 8)
            could = before + 8 + 8 < 1000  # a whole window and its last target follow
            assert batch.fresh[~could].all()
            stopped += int((batch.fresh & could).sum())
            drawn += int(could.sum())
        before = firsts
    assert begun == set(starts.tolist())
    assert 0.16 < stopped / drawn < 0.24


def test_with_fewer_starts_than_rows_windows_begin_anywhere() -> None:
    few = Part(np.arange(1000), np.array([0, 500, 999]))  # the last one leaves no whole window
    windows = Windows(few, batch=3, window=8, seed=1, carry=0.5)
    fresh = [batch.inputs[batch.fresh, 0] for batch in (windows.draw() for _ in range(200))]
    assert len(set(torch.cat(fresh).tolist())) > 100
    enough = Windows(few, batch=2, window=8, seed=1, carry=0.5)
    fresh = [batch.inputs[batch.fresh, 0] for batch in (enough.draw() for _ in range(200))]
    assert set(torch.cat(fresh).tolist()) == {0, 500}


@pytest.mark.parametrize("carry", [0.0, 0.7])
@pytest.mark.parametrize("count", [2, 3])
def test_the_rows_of_all_processes_are_the_whole_batch(carry: float, count: int) -> None:
    def make(rows: slice | None = None) -> Windows:
        text = Part(np.arange(500), np.arange(0, 500, 50))
        return Windows(text, batch=6, window=8, seed=4, carry=carry, rows=rows)

    whole = make()
    own = 6 // count
    shares = [make(slice(rank * own, (rank + 1) * own)) for rank in range(count)]
    for _ in range(20):
        expected, found = whole.draw(), [share.draw() for share in shares]
        assert torch.equal(torch.cat([batch.inputs for batch in found]), expected.inputs)
        assert torch.equal(torch.cat([batch.targets for batch in found]), expected.targets)
        assert torch.equal(torch.cat([batch.fresh for batch in found]), expected.fresh)


def test_the_fingerprint_is_of_the_ids_whatever_their_type() -> None:
    ids = np.arange(300)
    wide, narrow = Part(ids.astype(np.int64)), Part(ids.astype(np.uint16), bytes=7)
    assert wide.fingerprint == narrow.fingerprint
    assert wide.fingerprint != Part(ids[::-1]).fingerprint
    one = Data(wide, Part(ids[:9])).fingerprint
    assert one == Data(narrow, Part(ids[:9])).fingerprint
    assert one != Data(wide, Part(ids[:8])).fingerprint
    assert one != Data(wide, Part(ids[:9]), Part(ids[:9])).fingerprint


def test_a_part_that_is_too_short_is_named() -> None:
    with pytest.raises(ConfigError, match="the train part of the data has 8 tokens"):
        Data(part(8), part(2)).check(window=8, vocab_size=9)
    with pytest.raises(ConfigError, match="the test part of the data has 1 token"):
        Data(part(9), part(2), part(1)).check(window=8, vocab_size=9)
