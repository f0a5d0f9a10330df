"""Detokenizer: turns token ids into text incrementally, never splitting a character.

A decoder looks at a bounded number of earlier tokens, so each token costs the same. The texts of
all steps, joined, are the text of all tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import tokenizers

# Earlier tokens that a decoder sees before a text: those on which a token's text depends, and those
# that may hold the first bytes of a character.
WINDOW = 4
PRIMING_TOKENS = 8
MOST_HELD = 3  # tokens with the first bytes of a character, which has at most four bytes
BULK = 16  # tokens; fewer are decoded one by one

_EACH_BYTE = "minserve.each_byte"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# One U+FFFD for each byte that is not UTF-8, as in SentencePiece; Python replaces several by one.
codecs.register_error(_EACH_BYTE, _each_byte)


class Decoder(Protocol):
    """An incremental decoder of token ids; it holds back the bytes of an incomplete character.

    `late`: characters of the last returned text that belong to tokens before the last one. They are
    held-back bytes that turned out not to be a character.
    """

    late: int

    def feed(self, token: int) -> str:
        """Return the text that a token adds."""
        ...

    def feed_all(self, tokens: Sequence[int]) -> str:
        """Return the text that several tokens add."""
        ...

    @property
    def holds(self) -> bool:
        """Whether bytes are held back."""
        ...

    def flush(self) -> str:
        """Return the end of the text: held-back bytes become U+FFFD."""
        ...


class ByteDecoder:
    """The decoder for byte-level vocabularies, in which every token is a string of bytes."""

    def __init__(self, table: Sequence[bytes]) -> None:
        """`table`: each token's bytes; token ids beyond it have none."""
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
    """Return the characters of `text` that the held-back bytes `pending` have become.

    Args:
        pending: Bytes held back before.
        data: The bytes after them.
        text: What the two were decoded to.
        replaced: U+FFFD characters for `pending` if it turns out not to be a character.

    Returns 0 if `pending` and `data` form a character, or if it is still incomplete.
    """
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
    """The facts about a tokenizer that a `LibraryDecoder` needs."""

    library: tokenizers.Tokenizer
    silent: AbstractSet[int]  # special tokens, which have no text
    bytes_of: Mapping[int, int]  # tokens of a single byte, such as <0xE4>
    splits: bool  # whether other tokens may hold a part of a character, too
    anchor: int | None  # some token with a text

    def has_text(self, token: int) -> bool:
        """Whether a token has a text: it is neither special nor padding of the vocabulary."""
        return token not in self.silent and self.library.id_to_token(token) is not None


class LibraryDecoder:
    """The decoder for all other tokenizers, which uses the `tokenizers` library.

    The library decodes the last few tokens without and with the new ones; the difference is the new
    text. Tokens of single bytes are decoded here, because the library drops a whole run of them if
    one is wrong.
    """

    def __init__(self, vocabulary: Vocabulary, after: Sequence[int], *, begins: bool) -> None:
        """Prepare to decode what follows the tokens `after`.

        `begins`: whether the text begins here if `after` has no text. Some tokenizers remove a
        space at the beginning of a text.
        """
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=_EACH_BYTE)
        self._window: list[int] = []  # the last tokens whose text has been returned
        self._held: list[int] = []  # tokens whose text is held back
        self.late = 0
        seen = self._seen(after)
        if not (seen or begins) and vocabulary.anchor is not None:
            seen = [vocabulary.anchor]
        self._window = seen[:-PRIMING_TOKENS][-WINDOW:]
        for token in seen[-PRIMING_TOKENS:]:
            self.feed(token)
        self.late = 0

    def _seen(self, after: Sequence[int]) -> list[int]:
        """Return the last tokens with a text, as many as a decoder looks at."""
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
        """Return the text that tokens add; none of them is a token of a single byte."""
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
        """Return the text of the held-back tokens, incomplete as it is."""
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
    """Return what `text` has in addition to its prefix `before`.

    If `before` is not quite a prefix, because a decoder treats the end of a text in another way,
    return what follows the common prefix.
    """
    if text.startswith(before):
        return text[len(before) :]
    common = (i for i, (one, other) in enumerate(zip(before, text, strict=False)) if one != other)
    return text[next(common, len(text)) :]
