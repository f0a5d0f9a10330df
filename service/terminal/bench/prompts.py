"""Prompts of a load test: random slices of a text."""

from __future__ import annotations

import random
from pathlib import Path

# The text if no file is given, so that a load test needs no file.
FALLBACK = (
    "The recurrence carries one vector from word to word and forgets what it does not need; "
    "reading is a scan, writing is a step, and neither grows with what was read before. "
)


class Text:
    """A text to cut prompts from; it is repeated if a slice is longer than the text."""

    def __init__(self, data: Path | None) -> None:
        self._text = data.read_text(encoding="utf-8") if data else FALLBACK
        if not self._text:
            raise ValueError(f"{data} is empty")

    def cut(self, length: int, choice: random.Random) -> str:
        """Return `length` characters from a random place."""
        if len(self._text) < 2 * length:
            self._text *= 1 + 2 * length // len(self._text)
        start = choice.randrange(len(self._text) - length + 1)
        return self._text[start : start + length]
