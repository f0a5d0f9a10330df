"""Tokenizer: converts text to token ids and back.

A wrapper of the `tokenizers` library for every tokenizer.json that it can load. Two fast paths give
the same results as the library (tests compare them) in a fraction of its time and memory.
Byte-level vocabularies decode with a table of each token's bytes. Byte-level vocabularies without
merges encode UTF-8 bytes directly.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import CheckpointError, InvalidRequest
from engine.tokenizer_files import TokenizerText, load_library, read_tokenizer
from engine.tokenizer_layout import hide_special_names, mid_sentence
from service.text.cuts import places
from service.text.detokenizer import (
    PRIMING_TOKENS,
    ByteDecoder,
    Decoder,
    LibraryDecoder,
    Vocabulary,
)
from service.text.token_texts import Names, PlainTexts

# Longer texts are encoded on a thread, so that they do not block the event loop.
THREAD_CHARACTERS = 32_768
# Characters on each side of a place that are checked before a text is cut there.
CUT_CHARACTERS = 256
MOST_TEXTS = 4096  # sample texts to find the tokens that the tokenizer puts around a text

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer.

    Special tokens that are spelled out in a text are encoded as plain text, except with
    `parse_special` and in rendered chat templates.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        layout = json.loads(library.to_str())
        layout["truncation"] = layout["padding"] = None
        self._hidden = hide_special_names(layout)
        self._library = tokenizers.Tokenizer.from_str(json.dumps(layout))
        on_going = mid_sentence(layout)
        self._mid_library = (
            self._library
            if on_going is None
            else tokenizers.Tokenizer.from_str(json.dumps(on_going))
        )
        self.vocab_size = library.get_vocab_size()
        self.type = type(library.model).__name__  # such as BPE
        added = library.get_added_tokens_decoder()
        self._special = {id for id, token in added.items() if token.special}
        self._special_names = {id: added[id].content for id in self._special}
        self.special_ids = {name: id for id, name in self._special_names.items()}
        # Longest first, so that of two names with the same beginning the longer one matches.
        names = sorted(self.special_ids, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, names))) if names else None
        # The added tokens at which the library splits a text.
        others = map(_added_token, layout["added_tokens"])
        self._added = re.compile("|".join(others)) if layout["added_tokens"] else None
        self._bytes = self._byte_table(layout)
        self._byte_ids = None if self._bytes is None else self._pure_bytes(layout)
        self._begin, self._end = self._marks()
        # Whether the beginning of a text has other tokens than the same text in mid-sentence.
        self.marks_beginnings = bool(self._begin) or on_going is not None
        self.names = Names(self.bytes_of)
        # None if the texts of tokens depend on their neighbours.
        self.plain_texts = None if self._bytes is None else PlainTexts(self._bytes)
        self._vocabulary = self._read_vocabulary(layout) if self._bytes is None else None

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Tokenizer | None:
        """Read the tokenizer.json or tokenizer.model of a folder; return None if there is none.

        Raises CheckpointError if it cannot be read, is broken, or has token ids beyond the model's
        `vocab_size`.
        """
        read = read_tokenizer(folder)
        return None if read is None else cls.of(read, vocab_size)

    @classmethod
    def of(cls, read: TokenizerText, vocab_size: int) -> Tokenizer:
        """Return a tokenizer as read from a folder. Raises CheckpointError as `load` does."""
        library = load_library(read, vocab_size)
        try:
            return cls(library)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{read.path}: not a tokenizer: {error}") from error

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a text, such as a beginning-of-text token."""
        return self._begin

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts after a text."""
        return self._end

    def encode(
        self,
        text: str,
        *,
        begins: bool = True,
        ends: bool = False,
        marks: bool = True,
        parse_special: bool = False,
    ) -> array[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            begins: It is the beginning of a text, before which some tokenizers put a space; else it
                continues one in mid-sentence.
            ends: Nothing follows it.
            marks: Add the tokens that the tokenizer puts before and after a text (`begin_ids` with
                `begins`, `end_ids` with `ends`).
            parse_special: Special tokens that the text spells out become these tokens; `begin_ids`
                are not added if the text begins with them.

        Raises InvalidRequest for text that UTF-8 cannot hold or the vocabulary has no tokens for.
        """
        data = _check_unicode(text)
        parse_special = parse_special and self._spells_special(text)
        if self._byte_ids is not None and not parse_special:
            return array("i", map(self._byte_ids.__getitem__, data))
        if parse_special and self._spelled:
            text = self._spelled.sub(lambda found: self._hidden[found[0]], text)
        ids = self._ids(text) if begins else self._ids_in_mid_sentence(text)
        if (
            marks
            and begins
            and not (parse_special and tuple(ids[: len(self._begin)]) == self._begin)
        ):
            ids = array("i", self._begin) + ids
        if marks and ends:
            ids.extend(self._end)
        return ids

    def encode_pieces(
        self, pieces: Sequence[str], *, parse_special: bool = False
    ) -> list[array[int]]:
        """Return the ids of each of the pieces into which a text was cut (see `last_cut`).

        Tokens around the text are not added. Long texts are encoded on all cores. Raises what
        `encode` raises.
        """
        special = parse_special and any(map(self._spells_special, pieces))
        if special or self._byte_ids is not None or self._mid_library is not self._library:
            return [
                self.encode(piece, begins=number == 0, marks=False, parse_special=parse_special)
                for number, piece in enumerate(pieces)
            ]
        for piece in pieces:
            _check_unicode(piece)
        try:
            found = self._library.encode_batch_fast(list(pieces), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest(
                f"the model's tokenizer has no tokens for the text: {error}"
            ) from error
        return [array("i", encoding.ids) for encoding in found]

    def _spells_special(self, text: str) -> bool:
        """Whether a text spells out a special token."""
        return self._spelled is not None and self._spelled.search(text) is not None

    def encode_template(self, text: str, mark: str = "") -> array[int]:
        """Return the token ids of a rendered chat template, without tokens around it.

        Special tokens in the text become tokens, except those that are split by `mark`, which is
        removed (see `service.text.client_text`). Raises what `encode` raises.
        """
        _check_unicode(text)
        if self._spelled:
            text = self._spelled.sub(lambda found: self._hidden[found[0]], text)
        if mark:
            text = text.replace(mark, "")
        return self._ids(text)

    def _ids(self, text: str) -> array[int]:
        return _ids(self._library, text)

    def _ids_in_mid_sentence(self, text: str) -> array[int]:
        """Return the ids of a text in mid-sentence, without the rules for a text's beginning.

        After the first added token these rules apply again, as some tokenizers begin a text anew
        there.
        """
        if self._mid_library is self._library:
            return self._ids(text)
        found = self._added.search(text) if self._added else None
        goes_on = text if found is None else text[: found.start()]
        ids = _ids(self._mid_library, goes_on)
        return ids if found is None else ids + self._ids(text[found.start() :])

    async def encode_async(
        self,
        text: str,
        *,
        begins: bool = True,
        ends: bool = False,
        marks: bool = True,
        parse_special: bool = False,
    ) -> array[int]:
        """Return what `encode` returns; run it on a thread if the text is long."""
        if len(text) <= THREAD_CHARACTERS:
            return self.encode(
                text, begins=begins, ends=ends, marks=marks, parse_special=parse_special
            )
        return await asyncio.to_thread(
            self.encode, text, begins=begins, ends=ends, marks=marks, parse_special=parse_special
        )

    @property
    def takes_spaces_off(self) -> bool:
        """Whether a token's text may differ at the beginning of a text, for example by a space."""
        return self._bytes is None

    @property
    def joins_nothing(self) -> bool:
        """Whether a text can be cut anywhere: the parts' ids, joined, are those of the text."""
        return self._byte_ids is not None

    def last_cut(self, text: str, *, parse_special: bool = False) -> int:
        """Return the last index at which a text can be cut without changing its token ids.

        The part after the cut is then encoded as text in mid-sentence. More text may follow.
        Returns 0 if no place was found.

        Line and word ends are tried: CUT_CHARACTERS on both sides must have the same ids encoded
        separately and together.
        """
        if self._byte_ids is not None and not (parse_special and self._spells_special(text)):
            return len(text)
        for place in places(text, len(text) - CUT_CHARACTERS):
            left = text[max(place - CUT_CHARACTERS, 0) : place]
            right = text[place : place + CUT_CHARACTERS]
            ids = [
                self.encode(part, begins=False, parse_special=parse_special)
                for part in (left, right, left + right)
            ]
            if ids[0] + ids[1] == ids[2]:
                return place
        return 0

    def id_of(self, name: str) -> int | None:
        """Return the id of the token with this name, or None."""
        special = self.special_ids.get(name)
        token: int | None = self._library.token_to_id(name) if special is None else special
        return token

    def decoder(self, after: Sequence[int] = (), *, begins: bool = True) -> Decoder:
        """Return a decoder for the tokens that follow the tokens `after`.

        It does not repeat the text of `after`. `begins`: whether a text begins here if `after` has
        no text.
        """
        if self._bytes is None:
            assert self._vocabulary is not None
            return LibraryDecoder(self._vocabulary, after, begins=begins)
        decoder = ByteDecoder(self._bytes)
        decoder.feed_all(after[-PRIMING_TOKENS:])
        return decoder

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special tokens."""
        if self._bytes is not None:
            return b"".join(map(self._token_bytes, tokens)).decode(errors="replace")
        decoder = self.decoder()
        return decoder.feed_all(list(tokens)) + decoder.flush()

    def decode_open(self, tokens: Sequence[int], *, begins: bool = True) -> str:
        """Return the text of tokens without the bytes of an incomplete character at its end.

        `decoder(after=tokens)` continues with these bytes. `begins`: see `decoder`.
        """
        if self._bytes is not None:
            return self.decode(tokens).removesuffix(self.decoder(after=tokens).flush())
        return self.decoder(begins=begins).feed_all(tokens)

    def count_bytes(
        self, tokens: Sequence[int], after: Sequence[int] = (), *, begins: bool = True
    ) -> int:
        """Return the number of UTF-8 bytes of the text of tokens that follow the tokens `after`.

        `begins`: see `decoder`.
        """
        if self._bytes is not None:
            return sum(len(self._token_bytes(token)) for token in tokens)
        decoder = self.decoder(after, begins=begins)
        return len((decoder.feed_all(tokens) + decoder.flush()).encode())

    def bytes_behind(self, text: str, first: Sequence[int]) -> int:
        """Return the number of UTF-8 bytes of a text after its first tokens.

        The text's own bytes count. The bytes of its tokens can differ: a normalizer may change
        them, and characters without a token have none.
        """
        if self._bytes is not None:
            begin = b"".join(map(self._token_bytes, first))
        else:  # each byte of an incomplete character is decoded to one U+FFFD
            decoder = self.decoder(begins=False)
            begin_text = decoder.feed_all(first) + decoder.flush()
            begin = begin_text.replace("\ufffd", "?").encode()
        if begin.startswith(b" ") and not text.startswith(" "):  # put there by the tokenizer
            begin = begin[1:]
        return max(len(text.encode()) - len(begin), 0)

    def name(self, token: int) -> str:
        """Return a token's name in answers (see `Names`)."""
        return self.names[token]

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes; for a special token those of its name."""
        if token in self._special:
            return self._special_names[token].encode()
        if self._bytes is not None:
            return self._token_bytes(token)
        name: str | None = self._library.id_to_token(token)
        if name is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        if match := _BYTE_NAME.fullmatch(name):
            return bytes.fromhex(match[1])
        return name.replace("\u2581", " ").encode()

    def text_sizes(self) -> list[int]:
        """Return for each token id the number of UTF-8 bytes of its text; 0 for special tokens.

        Those of a text's tokens add up to the text's, unless the tokenizer changes it.
        """
        return [
            0 if token in self._special else len(self.bytes_of(token))
            for token in range(1 + max(self._library.get_vocab().values(), default=-1))
        ]

    def _token_bytes(self, token: int) -> bytes:
        assert self._bytes is not None
        return self._bytes[token] if token < len(self._bytes) else b""

    def _byte_table(self, layout: dict[str, Any]) -> list[bytes] | None:
        """Return each token's bytes if the tokenizer's decoder is byte-level, else None."""
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

    def _read_vocabulary(self, layout: dict[str, Any]) -> Vocabulary:
        """Return the facts for a LibraryDecoder, for tokenizers that are not byte-level."""
        kinds = set(_decoder_kinds(layout["decoder"]))
        named = self._library.get_vocab().items()
        single = {}
        if "ByteFallback" in kinds:
            single = {
                token: int(match[1], 16)
                for name, token in named
                if (match := _BYTE_NAME.fullmatch(name)) and token not in self._special
            }
        plain = [id for name, id in named if name.isascii() and name.isalnum()]
        # in vocabularies of whole words, each name begins with a space
        spaced = (id for name, id in named if name[:1] == "\u2581" and name[1:].isalnum())
        others = (id for id in (*plain, *spaced) if id not in self._special)
        anchor = next((id for id in others if self._library.decode([id])), None)
        return Vocabulary(
            self._library, frozenset(self._special), single, "ByteLevel" in kinds, anchor
        )

    def _marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the tokenizer puts before and after each text."""
        # They show around a text that has tokens itself; the vocabulary may have none for "a".
        for text in ("a", *islice(self._library.get_vocab(), MOST_TEXTS)):
            try:
                around = self._library.encode(text, add_special_tokens=True)
            except Exception:  # neither tokens for the text nor an unknown token
                continue
            mask = list(around.special_tokens_mask)
            if 0 in mask:
                begin, end = mask.index(0), len(mask) - mask[::-1].index(0)
                return tuple(around.ids[:begin]), tuple(around.ids[end:])
        return (), ()

    def _pure_bytes(self, layout: dict[str, Any]) -> list[int] | None:
        """Return the token of each byte if the tokenizer maps bytes to tokens; else None."""
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
    """Return the printable character of each byte in byte-level vocabularies (GPT-2's).

    Printable Latin-1 characters represent themselves; the other bytes are represented, in order, by
    the code points from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _check_unicode(text: str) -> bytes:
    """Return a text as UTF-8. Raises InvalidRequest for text with lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds a lone surrogate at character {error.start}, which is not a "
            "Unicode character"
        ) from error


def _added_token(token: dict[str, Any]) -> str:
    """Return a regular expression for an added token, with the spaces to its left that it takes."""
    spelled = re.escape(token["content"])
    if token["single_word"]:
        spelled = rf"(?<!\w){spelled}(?!\w)"
    # Match from the beginning of a run of spaces only; starting at each space would be quadratic.
    return rf"(?<!\s)\s*{spelled}" if token["lstrip"] else spelled


def _ids(library: tokenizers.Tokenizer, text: str) -> array[int]:
    """Return a text's ids. Raises InvalidRequest if the vocabulary has no tokens for the text.

    A batch of one text, because only for a batch the library lets other threads run meanwhile. It
    is also quicker, as it leaves out the tokens' places in the text.
    """
    try:
        return array("i", library.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(
            f"the model's tokenizer has no tokens for the text: {error}"
        ) from error


def _decoder_kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    """Yield the types of a decoder and of all its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _decoder_kinds(part)
