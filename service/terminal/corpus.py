"""The texts of `minserve train`: reads, splits and encodes them into a token cache.

It imports numpy and tokenizers, so it is not imported for `--help`.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import CheckpointError, ConfigError
from engine.training import token_cache
from engine.training.data import Part
from engine.training.token_cache import PartWriter
from engine.training.tokenizer import VOCAB_SIZE, byte_level_tokenizer, train_byte_bpe
from service.terminal import console as terminal
from service.terminal.text import PIECE_BYTES, read_tokenizer
from service.text.documents import (
    ByteRange,
    Document,
    document_ranges,
    files_of,
    first_lines,
    read_documents,
)
from service.text.tokenizer import Tokenizer
from service.text.utf8_chunks import Pieces

SEED = 0  # of the lengths between repeated headers
# A stretch between two headers has at least this share of the mean.
LEAST_STRETCH = 0.25

HeldOut = ByteRange | frozenset[str] | Path  # bytes, first lines of documents, other data


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What to read, and how. Raises ConfigError for options that exclude each other.

    Args:
        paths: files and folders with the data.
        valid, test: what is not trained on: "BEGIN:END" bytes of the data, "@FILE" with the first
            lines of documents, or a path of other data. Without `valid` nothing is held out here.
        end_of_text: a line of this text ends a document. Behind each document the token of this
            name is read, if the tokenizer has it and the data has more than one document.
        header_every: mean characters between two copies of a document's header in the training
            part; 0: the header is read once.
        vocab_size: train byte-level BPE with so many tokens; None: use `tokenizer`.
        tokenizer: a tokenizer.json; None: every byte is a token.
    """

    paths: Sequence[Path]
    valid: str | None = None
    test: str | None = None
    end_of_text: str
    header_every: int = 0
    vocab_size: int | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer is not None:
            raise ConfigError("--vocab-size and --tokenizer: give one of them")
        if self.test is not None and self.valid is None:
            raise ConfigError("--test needs --valid, by which the best weights are chosen")
        if self.vocab_size is not None and self.vocab_size < VOCAB_SIZE:
            raise ConfigError(f"--vocab-size is {self.vocab_size}; allowed: at least {VOCAB_SIZE}")
        if self.header_every < 0:
            raise ConfigError(f"--header-every is {self.header_every}; allowed: at least 0")

    def held_out(self) -> dict[str, HeldOut]:
        """Return what the parts `valid` and `test` are. Raises OSError and ConfigError."""
        given = {"valid": self.valid, "test": self.test}
        found = {name: _held_out(name, text) for name, text in given.items() if text is not None}
        match found.get("valid"), found.get("test"):
            case ByteRange() as valid, ByteRange() as test:
                last = min(_end(valid), _end(test))
                if max(valid.begin, test.begin) < last:
                    raise ConfigError("--valid and --test have bytes in common")
            case frozenset() as valid, frozenset() as test if valid & test:
                raise ConfigError(f"--valid and --test both have {min(valid & test)!r}")
        return found


def _held_out(name: str, text: str) -> HeldOut:
    if text.startswith("@"):
        return first_lines(Path(text[1:]))
    found = ByteRange.parse(text)
    if found is not None and found.begin >= _end(found):
        raise ConfigError(f"--{name} {text} is empty")
    return found or Path(text)


def _end(part: ByteRange) -> float:
    return math.inf if part.end is None else part.end


def prepare(corpus: Corpus, folder: Path) -> dict[str, Part]:
    """Return the data's parts by name: from the token cache in `folder` if it is of this corpus.

    Otherwise encodes the texts into it first. Raises ConfigError, TextError, CheckpointError and
    OSError.
    """
    held_out = corpus.held_out()
    source = _source(corpus, held_out)
    try:
        if token_cache.source_of(folder) == source:
            return token_cache.read(folder)
    except CheckpointError as damaged:
        terminal.note(f"{damaged}; the data is encoded again")
    _encode(corpus, held_out, source, folder)
    return token_cache.read(folder)


def _source(corpus: Corpus, held_out: dict[str, HeldOut]) -> dict[str, Any]:
    """Return what decides a cache's content, with digests of all files, as plain JSON."""

    def plain(what: HeldOut) -> Any:
        if isinstance(what, ByteRange):
            return [what.begin, what.end]
        if isinstance(what, Path):
            return [_digest(path) for path in files_of([what])]
        return sorted(what)

    return {
        "data": [_digest(path) for path in files_of(corpus.paths)],
        "held_out": {name: plain(what) for name, what in held_out.items()},
        "end_of_text": corpus.end_of_text,
        "header_every": corpus.header_every,
        "vocab_size": corpus.vocab_size,
        "tokenizer": None if corpus.tokenizer is None else _digest(corpus.tokenizer),
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(
    corpus: Corpus, held_out: dict[str, HeldOut], source: dict[str, Any], folder: Path
) -> None:
    """Encode all parts into the folder's cache."""
    texts = _Texts(corpus, held_out)
    token_cache.clear(folder)
    library = _tokenizer(corpus, texts)
    library.save(str(folder / token_cache.TOKENIZER))
    encoder = _Encoder(Tokenizer(library), corpus, several=texts.several)
    parts = {}
    for name in ("train", *held_out):
        every = corpus.header_every if name == "train" else 0
        documents = 0
        with PartWriter(folder, name, library.get_vocab_size()) as writer:
            with terminal.progress(f"encoding {name}", texts.bytes_of(name)) as progress:
                for document in texts.part(name):
                    documents += 1
                    encoder.write(document, writer, every)
                    progress.to(writer.bytes, f"{writer.tokens:,} tokens")
            parts[name] = writer.finish(_in_words(held_out.get(name), documents))
    token_cache.write_index(folder, source, parts)


def _in_words(what: HeldOut | None, documents: int) -> str:
    count = f"{documents:,} document{'' if documents == 1 else 's'}"
    if isinstance(what, ByteRange):
        end = "the end" if what.end is None else f"{what.end:,}"
        return f"bytes {what.begin:,} to {end}"
    return f"{count} of {what.name}" if isinstance(what, Path) else count


class _Texts:
    """The documents of each part."""

    def __init__(self, corpus: Corpus, held_out: dict[str, HeldOut]) -> None:
        self._corpus = corpus
        self._held_out = held_out
        files = files_of(corpus.paths)
        self._size = sum(path.stat().st_size for path in files)
        for name, what in held_out.items():
            if isinstance(what, ByteRange) and what.begin >= self._size:
                raise ConfigError(
                    f"--{name} begins at byte {what.begin:,}; the data has {self._size:,}"
                )
        self._check_lists()
        documents = (
            document for path in files for document in document_ranges(path, corpus.end_of_text)
        )
        self.several = any(isinstance(what, Path) for what in held_out.values()) or (
            next(islice(documents, 1, None), None) is not None
        )

    def part(self, name: str) -> Iterator[Document]:
        """Yield a part's documents. Raises what `read_documents` does, and ConfigError."""
        what = self._held_out.get(name)
        if name == "train":
            listed = [part for part in self._held_out.values() if isinstance(part, frozenset)]
            for document in self._all():
                if not any(document.first_line in lines for lines in listed):
                    yield document
        elif isinstance(what, frozenset):
            for document in self._all():
                if document.first_line in what:
                    yield document
        elif isinstance(what, ByteRange):
            yield from self._read(self._corpus.paths, what)
        elif what is not None:
            yield from self._read([what])

    def _check_lists(self) -> None:
        """Raise ConfigError if a listed first line is that of no document."""
        listed = [part for part in self._held_out.values() if isinstance(part, frozenset)]
        missing = set().union(*listed)
        if missing:
            missing -= {document.first_line for document in self._all()}
        if missing:
            raise ConfigError(f"no document of the data begins with {min(missing)!r}")

    def bytes_of(self, name: str) -> int | None:
        """Return about how many bytes a part has, for the display of progress; None: unknown."""
        what = self._held_out.get(name)
        if isinstance(what, ByteRange):
            return int(min(_end(what), self._size)) - what.begin
        return self._size if name == "train" else None

    def _all(self) -> Iterator[Document]:
        """Yield the documents of the data without the held-out ranges."""
        begin = 0
        ranges = [part for part in self._held_out.values() if isinstance(part, ByteRange)]
        for part in sorted(ranges, key=lambda part: part.begin):
            if part.begin > begin:
                yield from self._read(self._corpus.paths, ByteRange(begin, part.begin))
            begin = max(begin, self._size if part.end is None else part.end)
        if begin == 0:
            yield from self._read(self._corpus.paths)
        elif begin < self._size:
            yield from self._read(self._corpus.paths, ByteRange(begin))

    def _read(self, paths: Sequence[Path], within: ByteRange | None = None) -> Iterator[Document]:
        return read_documents(paths, separator=self._corpus.end_of_text, within=within)


def _tokenizer(corpus: Corpus, texts: _Texts) -> tokenizers.Tokenizer:
    if corpus.tokenizer is not None:
        return read_tokenizer(corpus.tokenizer)
    if corpus.vocab_size is None:
        return byte_level_tokenizer()
    terminal.note(f"training a byte-level BPE with {corpus.vocab_size:,} tokens")
    documents = (document.text for document in texts.part("train"))
    return train_byte_bpe(documents, corpus.vocab_size, corpus.end_of_text)


class _Encoder:
    """Writes documents as token ids."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus, *, several: bool) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.id_of(corpus.end_of_text) if several else None
        self._random = random.Random(SEED)

    def write(self, document: Document, writer: PartWriter, header_every: int) -> None:
        """Append a document, with its header repeated about every so many bytes."""
        pieces: list[str] = []
        starts: set[int] = set()  # numbers of pieces with which a stretch begins
        for stretch in stretches(document, header_every, self._random):
            starts.add(len(pieces))
            pieces.extend(self._pieces(stretch))
        for number, ids in enumerate(self._tokenizer.encode_pieces(pieces, parse_special=True)):
            if number in starts:
                writer.begin()
            writer.write(ids, len(pieces[number].encode()))
        if self._end is not None:
            writer.write([self._end], 0)

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut a text where that does not change its tokens."""
        if len(text) <= PIECE_BYTES:
            yield text
            return
        pieces = Pieces(PIECE_BYTES, partial(self._tokenizer.last_cut, parse_special=True))
        for at in range(0, len(text), PIECE_BYTES):
            if piece := pieces.feed(text[at : at + PIECE_BYTES].encode()):
                yield piece
        if piece := pieces.finish():
            yield piece


def stretches(document: Document, every: int, source: random.Random) -> Iterator[str]:
    """Yield a document's text in stretches, each with the header before it.

    They end at ends of paragraphs. Lengths are drawn from an exponential distribution with the mean
    `every` characters of the body, so that a model cannot foresee where the next header comes. A
    document without a header, or `every` 0, is one stretch.
    """
    body = document.body
    if not every or not document.header:
        yield document.text
        return
    begin = 0
    wanted = _stretch(every, source)
    for end in re.finditer(r"\n\n+", body):
        if end.end() - begin >= wanted and end.end() < len(body):
            yield document.header + body[begin : end.end()]
            begin, wanted = end.end(), _stretch(every, source)
    yield document.header + body[begin:]


def _stretch(every: int, source: random.Random) -> float:
    return every * (LEAST_STRETCH + (1 - LEAST_STRETCH) * source.expovariate(1.0))
