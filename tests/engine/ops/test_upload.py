"""Row numbers go up in parts of a ring, each used again only when the device has passed it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.ops import upload as indices
from engine.ops.upload import UploadRing


def test_values_keep_their_shape() -> None:
    uploads = UploadRing(torch.device("cpu"))
    there = uploads.put([3, 1, 2])
    assert there.dtype == torch.int64 and there.tolist() == [3, 1, 2]
    assert uploads.put(np.arange(6).reshape(2, 3)).tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_a_part_is_written_again_when_its_last_use_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, int]] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            self.part, Event.made = Event.made, Event.made + 1

        def record(self) -> None:
            log.append(("record", self.part))

        def synchronize(self) -> None:
            log.append(("wait", self.part))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(indices, "PART_WORDS", 10)
    monkeypatch.setattr(indices, "PARTS", 3)
    ring = UploadRing(torch.device("cpu"))
    ring._allocate()
    begins = []
    for first in range(0, 60, 4):
        there = ring._put(np.arange(first, first + 4))
        assert there.tolist() == [first, first + 1, first + 2, first + 3]
        begins.append(there.storage_offset())
    assert begins[:8] == [0, 4, 10, 14, 20, 24, 0, 4]
    assert log[:6] == [
        ("record", 0), ("wait", 1), ("record", 1), ("wait", 2), ("record", 2), ("wait", 0)
    ]  # fmt: skip
