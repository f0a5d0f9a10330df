"""Tokenizer: text to token ids, and token ids to text that is never cut inside a character.

A wrapper of the `tokenizers` library. Two fast paths give what the library gives (tests compare):
a byte-level vocabulary decodes through a table of each token's bytes, and one without merges
encodes as the UTF-8 bytes themselves, in a fraction of the library's time and memory.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from engine.errors import CheckpointError, InvalidRequest

# Longer texts are encoded on a thread, so that the event loop keeps turning.
THREAD_CHARACTERS = 32_768
# Tokens of the prompt that prime a decoder: enough to hold one character's first bytes, and for
# decoders that treat the first token of a text in their own way.
PRIMING_TOKENS = 8
MOST_HELD = 3  # bytes of a character that lacks its last


class Decoder(Protocol):
    """Token ids in, text out; bytes that do not end a character are held back."""

    def feed(self, token: int) -> str: ...

    def feed_all(self, tokens: Sequence[int]) -> str: ...

    @property
    def holds(self) -> bool:
        """Something is held back."""
        ...

    def flush(self) -> str:
        """The end of the text: held bytes that can no longer become a character give U+FFFD."""
        ...


class PlainTexts(dict[int, str | None]):
    """The text of each token of a byte-level vocabulary, where it is one whatever comes before and
    after: None for tokens that hold a part of a character."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self.known: set[int] = set()  # tokens that are known to have one

    def has_all(self, tokens: Sequence[int]) -> bool:
        """Each of these tokens has a text."""
        known = self.known
        if known.issuperset(tokens):
            return True
        known.update(token for token in tokens if self[token] is not None)
        return known.issuperset(tokens)

    def joined(self, tokens: Sequence[int]) -> str | None:
        """Their text; None where one of them has none."""
        try:
            return "".join(map(self.__getitem__, tokens))  # type: ignore[arg-type]
        except TypeError:
            return None

    def __missing__(self, token: int) -> str | None:
        text: str | None
        try:
            text = self._table[token].decode() if token < len(self._table) else ""
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class Names(dict[int, str]):
    """Each token as a string: its text, or `bytes:\\xNN` where that is not whole UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def __missing__(self, token: int) -> str:
        data = self._bytes_of(token)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        self[token] = name
        return name


class Tokenizer:
    """A checkpoint's tokenizer.json."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        library.no_truncation()
        library.no_padding()
        # "<|endoftext|>" in a client's text is text: only an id ends a text.
        library.encode_special_tokens = True
        self.vocab_size = library.get_vocab_size()
        added = library.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        layout = json.loads(library.to_str())
        self._bytes = self._byte_table(layout)
        self._byte_ids = None if self._bytes is None else self._pure_bytes(layout)
        # A text's beginning or end has tokens of its own, which a text that goes on must not have.
        self.marks_texts = library.num_special_tokens_to_add(False) > 0
        self.names = Names(self.bytes_of)
        # None where a token's text depends on its neighbours.
        self.plain_texts = None if self._bytes is None else PlainTexts(self._bytes)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Tokenizer | None:
        """Reads tokenizer.json; None without one. Raises CheckpointError for one that is broken or
        has more tokens than the model's `vocab_size`."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            tokenizer = cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        largest = max(tokenizer._library.get_vocab().values(), default=0)
        if largest >= vocab_size:
            raise CheckpointError(
                f"{path}: has token id {largest}, but the model's vocabulary ends at "
                f"{vocab_size - 1}"
            )
        return tokenizer

    def encode(self, text: str, *, special: bool = True) -> array[int]:
        """The text's token ids; `special` adds what the tokenizer puts around a text (such as a
        beginning-of-text token). Raises InvalidRequest for text that UTF-8 cannot hold."""
        data = _check_unicode(text)
        if self._byte_ids is not None:
            return array("i", map(self._byte_ids.__getitem__, data))
        return array("i", self._library.encode(text, add_special_tokens=special).ids)

    def encode_with_special(self, parts: Iterable[str]) -> array[int]:
        """The token ids of a text whose special tokens are meant as such, and that is cut into
        parts where none may be seen; nothing is put around it. Raises as `encode`."""
        ids = array("i")
        for text in parts:
            _check_unicode(text)
            ids.extend(self._with_special.encode(text, add_special_tokens=False).ids)
        return ids

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, as it is where nothing is kept from it."""
        return tokenizers.Tokenizer.from_str(self._library.to_str())

    @cached_property
    def special_names(self) -> list[str]:
        """The special tokens' texts."""
        return [name for id in self._special if (name := self._library.id_to_token(id))]

    def id_of(self, name: str) -> int | None:
        """The token of this name."""
        token: int | None = self._library.token_to_id(name)
        return token

    async def encode_async(self, text: str, *, special: bool = True) -> array[int]:
        """`encode`, beside the event loop where the text is long."""
        if len(text) <= THREAD_CHARACTERS:
            return self.encode(text, special=special)
        return await asyncio.to_thread(self.encode, text, special=special)

    def decoder(self, after: Sequence[int] = ()) -> Decoder:
        """A decoder of what follows the tokens `after`, whose own text it does not repeat."""
        if self._bytes is None:
            return self._library_decoder(after)
        decoder = _ByteDecoder(self._bytes)
        for token in after[-PRIMING_TOKENS:]:
            decoder.feed(token)
        return decoder

    def _library_decoder(self, after: Sequence[int]) -> _LibraryDecoder:
        for first in range(-PRIMING_TOKENS, -PRIMING_TOKENS + MOST_HELD + 1):
            decoder = _LibraryDecoder(self._library)
            for token in after[first:]:
                decoder.feed(token)
            # More are held where the first of them are the end of a character: the library then
            # makes nothing of all the bytes that follow.
            if len(decoder.held) <= MOST_HELD:
                break
        return decoder

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special tokens left out."""
        if self._bytes is not None:
            return b"".join(map(self._token_bytes, tokens)).decode(errors="replace")
        return self._library.decode(list(tokens), skip_special_tokens=True)

    def decode_open(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, which goes on: without the bytes at its end that do not make a
        character yet. `decoder(after=tokens)` begins with these."""
        if self._bytes is not None:
            return self.decode(tokens).removesuffix(self.decoder(after=tokens).flush())
        held = len(self._library_decoder(tokens).held)
        return self.decode(tokens[: len(tokens) - held])

    def count_bytes(self, tokens: Iterable[int]) -> int:
        """UTF-8 bytes of the tokens' text."""
        if self._bytes is not None:
            return sum(len(self._token_bytes(token)) for token in tokens)
        return len(self.decode(tokens).encode())

    def name(self, token: int) -> str:
        """A token as a string (Names)."""
        return self.names[token]

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; a special token's are its name's."""
        if self._bytes is not None and token not in self._special:
            return self._token_bytes(token)
        name = self._library.id_to_token(token)
        if name is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(match[1])
        text: str = name if token in self._special else name.replace("\u2581", " ")
        return text.encode()

    def _token_bytes(self, token: int) -> bytes:
        assert self._bytes is not None
        return self._bytes[token] if token < len(self._bytes) else b""

    def _byte_table(self, layout: dict[str, Any]) -> list[bytes] | None:
        """Each token's bytes where the decoder is byte-level, else None."""
        if (layout["decoder"] or {}).get("type") != "ByteLevel":
            return None
        value = {character: byte for byte, character in enumerate(_byte_alphabet())}
        vocabulary = self._library.get_vocab()
        table = [b""] * (1 + max(vocabulary.values(), default=-1))
        for name, token in vocabulary.items():
            if token in self._special:
                continue
            if all(character in value for character in name):
                table[token] = bytes(value[character] for character in name)
            else:  # an added token
                table[token] = name.encode()
        return table

    def _pure_bytes(self, layout: dict[str, Any]) -> list[int] | None:
        """The token of each byte where encoding is nothing else, else None."""
        model, pre = layout["model"], layout["pre_tokenizer"] or {}
        if not (
            layout["normalizer"] is None
            and layout["post_processor"] is None
            and all(token["special"] for token in layout["added_tokens"])
            and pre.get("type") == "ByteLevel"
            and not pre["add_prefix_space"]
            and model["type"] == "BPE"
            and not model["merges"]
            and not model.get("ignore_merges")
            and not model.get("continuing_subword_prefix")
            and not model.get("end_of_word_suffix")
        ):
            return None
        ids = [model["vocab"].get(character) for character in _byte_alphabet()]
        return None if None in ids else ids


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's): printable Latin-1
    stands for itself, the other bytes, in order, for the code points from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _check_unicode(text: str) -> bytes:
    """The text as UTF-8. Raises InvalidRequest for text that it cannot hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds a lone surrogate at character {error.start}, which is no "
            "Unicode character"
        ) from error


class _ByteDecoder:
    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._table[token]) if token < len(self._table) else ""

    def feed_all(self, tokens: Sequence[int]) -> str:
        table = self._table
        return self._utf8.decode(b"".join([table[t] for t in tokens if t < len(table)]))

    @property
    def holds(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _LibraryDecoder:
    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._stream = DecodeStream(skip_special_tokens=True)
        self.held: list[int] = []  # tokens whose text has not come yet

    def feed(self, token: int) -> str:
        self.held.append(token)
        text: str | None = self._stream.step(self._library, token)
        if text is None:
            return ""
        self.held.clear()
        return text

    def feed_all(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.feed, tokens))

    @property
    def holds(self) -> bool:
        return bool(self.held)

    def flush(self) -> str:
        text = self._library.decode(self.held, skip_special_tokens=True)
        self.held.clear()
        return text
