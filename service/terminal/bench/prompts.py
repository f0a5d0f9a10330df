"""Prompts of a load test: random slices of a text, or chapters and whole documents."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from service.text.documents import (
    END_OF_TEXT,
    ByteRange,
    Document,
    document_ranges,
    files_of,
    read_documents,
)
from service.text.passages import chapters, paragraphs

Unit = Literal["chapter", "paragraph", "book"]
UNITS: tuple[Unit, ...] = get_args(Unit)

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


class Passages:
    """The chapters, paragraphs or whole documents of files and folders; each as likely as another.

    Lines of end-of-text part a file's documents. Only the place of each passage is held in memory;
    its text is read when it is drawn.
    """

    def __init__(self, paths: Sequence[Path], unit: Unit) -> None:
        """Look all passages up.

        Raises OSError, ValueError and ConfigError for files that cannot be used.
        """
        self._files = files_of(paths)
        self._numbers = array("Q")  # of each passage's file
        self._begins = array("Q")  # bytes
        self._ends = array("Q")
        for number, path in enumerate(self._files):
            for within in document_ranges(path, END_OF_TEXT):
                for document in read_documents([path], within=within):
                    self._add(number, within.begin, document, unit)
        if not self._begins:
            raise ValueError(f"{', '.join(map(str, paths))}: no text")

    def _add(self, number: int, at: int, document: Document, unit: Unit) -> None:
        if unit == "book":
            parts = [document.text]
        else:
            at += len(document.header.encode())
            cut: Callable[[str], list[str]] = chapters if unit == "chapter" else paragraphs
            parts = cut(document.body)
        for part in parts:
            begin, at = at, at + len(part.encode())
            if part.strip():
                self._numbers.append(number)
                self._begins.append(begin)
                self._ends.append(at)

    def __len__(self) -> int:
        return len(self._begins)

    def draw(self, choice: random.Random) -> str:
        """Return a random passage, without the empty lines around it."""
        which = choice.randrange(len(self))
        within = ByteRange(self._begins[which], self._ends[which])
        [passage] = read_documents([self._files[self._numbers[which]]], within=within)
        return passage.text.strip()
