"""Prompts for load tests: slices of a text file with a seeded choice of place and length."""

from __future__ import annotations

import random
from pathlib import Path

# Used when no file is given, so that a load test runs anywhere.
FALLBACK = (
    "The recurrence carries one vector from word to word and forgets what it does not need; "
    "reading is a scan, writing is a step, and neither grows with what was read before. "
)


class Prompts:
    """An endless supply of prompts, each of `least` to `most` bytes; the same for the same seed."""

    def __init__(self, data: Path | None, least: int, most: int, seed: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"prompt bytes {least} to {most}: need 1 <= least <= most")
        text = data.read_text(encoding="utf-8") if data else FALLBACK
        if not text:
            raise ValueError(f"{data} is empty")
        # Long enough that a slice of `most` characters fits anywhere.
        self._text = text * (1 + most // len(text)) if len(text) < 2 * most else text
        self._least, self._most = least, most
        self._random = random.Random(seed)

    def draw(self) -> str:
        length = self._random.randint(self._least, self._most)
        start = self._random.randrange(len(self._text) - length + 1)
        return self._text[start : start + length]
