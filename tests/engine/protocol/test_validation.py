"""The last check of a prompt's ids, however many there are."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.protocol.validation import check_request


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100_000])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_one_wrong_id_is_found_wherever_it_stands(length: int, bad: int) -> None:
    for place in {0, length // 2, length - 1}:
        ids = [index % 10 for index in range(length)]
        check_request(Request(id=1, prompt=pack_ids(ids)), 10, ())
        ids[place] = bad
        with pytest.raises(InvalidRequest, match=f"prompt has token id {bad}; allowed: 0 to 9"):
            check_request(Request(id=1, prompt=pack_ids(ids)), 10, ())


def test_min_tokens_needs_a_token_that_ends_nothing() -> None:
    def ask(stops: int, eos: tuple[int, ...], **fields: Any) -> None:
        params = SamplingParams(max_tokens=5, stop_token_ids=tuple(range(stops)), **fields)
        check_request(Request(id=1, prompt=pack_ids([1]), sampling=params), 10, eos)

    ask(10, ())
    ask(9, (), min_tokens=1)
    ask(9, (8,), min_tokens=1)
    ask(7, (7, 8), min_tokens=1)
    for stops, eos, ignored in (
        (10, (), False),
        (9, (9,), False),
        (9, (9,), True),
        (7, (7, 8, 9), False),
        (8, (8, 9), True),
    ):
        with pytest.raises(InvalidRequest, match="min_tokens cannot be met"):
            ask(stops, eos, min_tokens=1, ignore_eos=ignored)
