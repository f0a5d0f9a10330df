"""Documents: the texts of files and folders, whole or cut at end-of-text lines, one at a time.

A document may begin with a header, as the books of a library do:

    Title: Emma
    Author: Jane Austen
    Year: 1815

that is lines `Name: value` and an empty line. What follows is its body.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"  # the usual separator
_HEADER = re.compile(r"(?:[^\n:]{1,64}: [^\n]*\n){1,16}\n")


_VISIBLE = re.compile(rb"\S")


class TextError(ValueError):
    """A file is not UTF-8 text."""


@dataclass(frozen=True)
class Document:
    """One text: its header ("" if it has none) and the body behind it."""

    header: str
    body: str

    @classmethod
    def of(cls, text: str) -> Document:
        """Split a text into header and body."""
        found = _HEADER.match(text)
        at = found.end() if found else 0
        return cls(text[:at], text[at:])

    @property
    def text(self) -> str:
        """The whole text."""
        return self.header + self.body

    @property
    def first_line(self) -> str:
        """The first line, by which a document is named."""
        return self.text.partition("\n")[0].strip()


@dataclass(frozen=True)
class ByteRange:
    """The bytes from `begin` to before `end` (None: to the end) of files read one after another."""

    begin: int = 0
    end: int | None = None

    @classmethod
    def parse(cls, text: str) -> ByteRange | None:
        """Read "BEGIN:END", either of which may be left out; None if a text is no such range."""
        found = re.fullmatch(r"(\d*):(\d*)", text)
        if found is None or text == ":":
            return None
        begin, end = found.groups()
        return cls(int(begin or 0), int(end) if end else None)


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Return files as they are, and for folders all files in them, by name; hidden ones left out.

    Raises ConfigError if a path does not exist or a folder has no file.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise ConfigError(f"{path}: there is no such file or folder", param="data")
            files.append(path)
            continue
        found = sorted(
            inner
            for inner in path.rglob("*")
            if inner.is_file()
            and not any(part.startswith(".") for part in inner.relative_to(path).parts)
        )
        if not found:
            raise ConfigError(f"{path}: the folder has no file", param="data")
        files += found
    return files


def read_documents(
    paths: Sequence[Path],
    *,
    separator: str | None = None,
    within: ByteRange | None = None,
) -> Iterator[Document]:
    """Yield the documents of files and folders in order; those without any text are left out.

    One document at a time is in memory.

    Args:
        paths: files and folders (`files_of`).
        separator: a line of this text ends a document, as the end of a file does; None: only that.
        within: the part of all files' bytes to read. A file that is cut by it is read from or to
            there; its cut must be between characters.

    Raises:
        ConfigError: a path does not exist, or `within` begins behind the last byte.
        TextError: a file is not UTF-8.
        OSError: a file cannot be read.
    """
    begin, end = (within.begin, within.end) if within else (0, None)
    offset = 0  # of the file in all files' bytes
    for path in files_of(paths):
        size = path.stat().st_size
        first = max(begin - offset, 0)
        last = size if end is None else min(end - offset, size)
        offset += size
        if first >= last:
            continue
        with path.open("rb") as file:
            for place in document_ranges(path, separator, ByteRange(first, last)):
                assert place.end is not None
                file.seek(place.begin)
                data = file.read(place.end - place.begin)
                try:
                    text = data.decode()
                except UnicodeDecodeError as error:
                    at = place.begin + error.start
                    raise TextError(
                        f"{path}: not UTF-8 text: {error.reason} at byte {at:,}"
                    ) from error
                if text.strip():
                    yield Document.of(text)
    if within is not None and begin >= offset:
        raise ConfigError(f"the range begins at byte {begin:,}; the data has {offset:,}")


def document_ranges(
    path: Path, separator: str | None, within: ByteRange = ByteRange()
) -> Iterator[ByteRange]:
    """Yield where a file's documents lie, without reading the file into memory.

    `read_documents` of a range returns the document. Documents that are ASCII whitespace alone are
    left out. `separator` is as there; `within` is a part of the file's bytes. Raises OSError.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            return
        at, last = within.begin, size if within.end is None else within.end
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for begin, end in [*_separators(data, separator, at, last), (last, last)]:
                if _VISIBLE.search(data, at, begin) is not None:
                    yield ByteRange(at, begin)
                at = end


def _separators(
    data: mmap.mmap, separator: str | None, begin: int, end: int
) -> list[tuple[int, int]]:
    """Return where lines of the separator begin and end, with the empty lines behind them."""
    if separator is None:
        return []
    mark, cuts = separator.encode(), []
    line = re.compile(rb"^" + re.escape(mark) + rb"[ \t]*\r?(?:\n|\Z)\n*", re.MULTILINE)
    at = data.find(mark, begin, end)  # many times as fast as a search for the whole line
    while at >= 0:
        found = line.match(data, at, end)
        if found is not None:
            cuts.append(found.span())
        at = data.find(mark, at + len(mark) if found is None else found.end(), end)
    return cuts


def first_lines(path: Path) -> frozenset[str]:
    """Read a list of documents' first lines, one a line; empty lines and `#` comments are left out.

    Raises OSError, TextError, and ConfigError if it names none.
    """
    lines = (line.strip() for line in read_text(path).splitlines())
    found = frozenset(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{path}: names no document; allowed: first lines of documents")
    return found


def read_text(path: Path) -> str:
    """Return a small file's text. Raises OSError, and TextError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: not UTF-8 text: {error.reason} at byte {error.start:,}"
        ) from error
