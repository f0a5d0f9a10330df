"""A seeded supply of prompts, cut from a text file, for load tests of one client."""

from __future__ import annotations

import random
from pathlib import Path

from service.terminal.bench.prompts import Text


class Prompts:
    """An endless sequence of prompts of `least` to `most` characters; the same for a seed."""

    def __init__(self, data: Path | None, least: int, most: int, seed: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(
                f"prompts of {least} to {most} characters; allowed: at least 1, ascending"
            )
        self._text = Text(data)
        self._least, self._most = least, most
        self._random = random.Random(seed)

    def draw(self) -> str:
        return self._text.cut(self._random.randint(self._least, self._most), self._random)
