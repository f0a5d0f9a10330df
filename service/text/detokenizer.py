"""Detokenizer: token ids to text as they come, never cut inside a character.

Each token costs the same, whatever came before it: what a decoder looks at is bounded. Pieces of
text joined are the text of all tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import tokenizers

# Tokens before a text that a decoder is shown: enough for what a token's text depends on, and to
# hold one character's first bytes.
WINDOW = 4
PRIMING_TOKENS = 8
MOST_HELD = 3  # tokens with the first bytes of a character; a fourth ends it, or it is none
BULK = 16  # tokens: fewer are not worth a look at all of them

_EACH_BYTE = "minserve.each_byte"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# One U+FFFD for each byte that is not UTF-8, as SentencePiece has it, not for several together.
codecs.register_error(_EACH_BYTE, _each_byte)


class Decoder(Protocol):
    """Token ids in, text out; bytes that do not end a character are held back.

    `late` counts the characters of the last text that belong to tokens before the last one: held
    bytes that turned out to be no character.
    """

    late: int

    def feed(self, token: int) -> str: ...

    def feed_all(self, tokens: Sequence[int]) -> str: ...

    @property
    def holds(self) -> bool:
        """Something is held back."""
        ...

    def flush(self) -> str:
        """The end of the text: held bytes that can no longer become a character give U+FFFD."""
        ...


class ByteDecoder:
    """For vocabularies whose every token is bytes, as byte-level BPE has them."""

    def __init__(self, table: Sequence[bytes]) -> None:
        """`table` holds each token's bytes; ids beyond it have none."""
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.late = 0

    def feed(self, token: int) -> str:
        data = self._table[token] if token < len(self._table) else b""
        pending = self._utf8.getstate()[0]
        text = self._utf8.decode(data)
        self.late = _late(pending, data, text, 1) if pending else 0
        return text

    def feed_all(self, tokens: Sequence[int]) -> str:
        table = self._table
        return self._utf8.decode(b"".join([table[t] for t in tokens if t < len(table)]))

    @property
    def holds(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def _late(pending: bytes, data: bytes, text: str, replaced: int) -> int:
    """Characters that `pending` has become, where `data` after it makes `text`: `replaced`, unless
    the two make a character together, or it is pending still."""
    if not text:
        return 0
    length = 2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4
    try:
        (pending + data)[:length].decode()
    except UnicodeDecodeError:
        return replaced
    return 0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a `LibraryDecoder` knows of a tokenizer."""

    library: tokenizers.Tokenizer
    silent: AbstractSet[int]  # special tokens: they have no text
    bytes_of: Mapping[int, int]  # tokens that stand for one byte each, as <0xE4> does
    splits: bool  # other tokens too may hold a part of a character
    anchor: int | None  # a token with a text

    def has_text(self, token: int) -> bool:
        """Whether it can be seen in a text: neither special, nor padding of the vocabulary."""
        return token not in self.silent and self.library.id_to_token(token) is not None


class LibraryDecoder:
    """For all other tokenizers: the library decodes a few tokens, and what they add to those before
    them is the text. Bytes that have tokens of their own become characters here, since the library
    makes nothing of a whole run of them for one that is wrong."""

    def __init__(self, vocabulary: Vocabulary, after: Sequence[int], *, begins: bool) -> None:
        """Decodes what follows the tokens `after`. `begins`: where these have no text, a text
        begins, from which some tokenizers take off a space; else it goes on."""
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=_EACH_BYTE)
        self._window: list[int] = []  # the last tokens whose text has come
        self._held: list[int] = []  # those whose text has not
        self.late = 0
        seen = self._seen(after)
        if not (seen or begins) and vocabulary.anchor is not None:
            seen = [vocabulary.anchor]
        self._window = seen[:-PRIMING_TOKENS][-WINDOW:]
        for token in seen[-PRIMING_TOKENS:]:
            self.feed(token)
        self.late = 0

    def _seen(self, after: Sequence[int]) -> list[int]:
        """The last tokens that have a text, as many as are looked at."""
        seen: list[int] = []
        for token in reversed(after):
            if self._vocabulary.has_text(token):
                seen.append(token)
                if len(seen) == WINDOW + PRIMING_TOKENS:
                    break
        return seen[::-1]

    def feed(self, token: int) -> str:
        vocabulary = self._vocabulary
        byte = vocabulary.bytes_of.get(token)
        if byte is None:
            if not vocabulary.has_text(token):
                self.late = 0
                return ""
            tail = self._utf8.decode(b"", final=True)
            text = tail + self._decode([token])
            self.late += len(tail)
            return text
        text = self._release()
        data, pending = bytes([byte]), self._utf8.getstate()[0]
        more = self._utf8.decode(data)
        self.late = len(text) + (_late(pending, data, more, len(pending)) if pending else 0)
        self._show([token])
        return text + more

    def feed_all(self, tokens: Sequence[int]) -> str:
        if self._vocabulary.splits or len(tokens) <= BULK:
            return "".join(map(self.feed, tokens))
        bytes_of = self._vocabulary.bytes_of
        texts: list[str] = []
        begin = 0
        for end in (*(i for i, token in enumerate(tokens) if token in bytes_of), len(tokens)):
            run = [token for token in tokens[begin:end] if self._vocabulary.has_text(token)]
            if run:
                texts += self._utf8.decode(b"", final=True), self._decode(run)
            if end < len(tokens):
                texts.append(self.feed(tokens[end]))
            begin = end + 1
        return "".join(texts)

    @property
    def holds(self) -> bool:
        return bool(self._held) or bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        return self._release() + self._utf8.decode(b"", final=True)

    def _decode(self, tokens: list[int]) -> str:
        """The text that tokens add which stand for no byte."""
        held = self._held
        before = self._text(self._window)
        text = self._text([*self._window, *held, *tokens])
        added = _added(before, text)
        self.late = 0
        if self._vocabulary.splits and added.endswith("\ufffd") and len(held) < MOST_HELD:
            held += tokens
            return ""
        if held:
            alone = self._text([*self._window, *held])
            self.late = len(_added(before, alone)) if text.startswith(alone) else 0
            tokens = [*held, *tokens]
            held.clear()
        self._show(tokens)
        return added

    def _release(self) -> str:
        """The text of what is held, as it is."""
        if not self._held:
            return ""
        before = self._text(self._window)
        text = _added(before, self._text([*self._window, *self._held]))
        self._show(self._held)
        self._held.clear()
        return text

    def _show(self, tokens: list[int]) -> None:
        self._window = [*self._window, *tokens][-WINDOW:]

    def _text(self, tokens: list[int]) -> str:
        text: str = self._vocabulary.library.decode(tokens) if tokens else ""
        return text


def _added(before: str, text: str) -> str:
    """What `text` has more than `before`, with which it begins (as a rule: what a decoder does with
    a text's end may change)."""
    if text.startswith(before):
        return text[len(before) :]
    common = (i for i, (one, other) in enumerate(zip(before, text, strict=False)) if one != other)
    return text[next(common, len(text)) :]
