"""The last check of a prompt's ids, however many there are."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.messages import Request, pack_ids
from engine.validation import check_request


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 100_000])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_one_wrong_id_is_found_wherever_it_stands(length: int, bad: int) -> None:
    for place in {0, length // 2, length - 1}:
        ids = [index % 10 for index in range(length)]
        check_request(Request(id=1, prompt=pack_ids(ids)), vocab_size=10)
        ids[place] = bad
        with pytest.raises(InvalidRequest, match=f"prompt has token id {bad}; allowed: 0 to 9"):
            check_request(Request(id=1, prompt=pack_ids(ids)), vocab_size=10)
