"""Templates: events that differ only in what one token brings, rendered ahead.

A stream sends an event per token, and all but a few of them are the same but for the token's text.
So everything else is rendered once per stream, each token's part once per server, and the events of
several tokens that came together are one join.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.http.json_response import encode, event
from service.text.token_texts import PlainTexts
from service.text.tokenizer import Tokenizer

# Stands for the token's part in an event that is rendered to be a template.
HOLE = "<| the token's part |>"
_HOLE = encode(HOLE)


class Parts(dict[int, bytes]):
    """What each token brings to its event, rendered when it first comes: its text as JSON, and with
    `ids` the field `token_ids` after it."""

    def __init__(self, texts: PlainTexts, *, ids: bool) -> None:
        self._texts = texts
        self._ids = ids

    def __missing__(self, token: int) -> bytes:
        part = self[token] = self.of_group([token])
        return part

    def of_group(self, tokens: Sequence[int]) -> bytes:
        """What tokens that share one event bring to it; they are plain."""
        texts = [self._texts[token] for token in tokens]
        text = encode("".join([text for text in texts if text]))
        return b'%b,"token_ids":%b' % (text, encode(list(tokens))) if self._ids else text


class TokenParts:
    """The parts of a tokenizer's tokens; all streams of a model share them."""

    def __init__(self, texts: PlainTexts) -> None:
        self.texts = Parts(texts, ids=False)
        self.with_ids = Parts(texts, ids=True)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> TokenParts | None:
        """None where texts of tokens depend on their neighbours."""
        if tokenizer is None or tokenizer.plain_texts is None:
            return None
        return cls(tokenizer.plain_texts)


class Template:
    """`content` is an event's, with HOLE in the place of what a token's part stands for."""

    __slots__ = ("_before", "_behind", "_between", "_part", "_parts")

    def __init__(self, content: dict[str, Any], parts: Parts) -> None:
        self._before, hole, self._behind = event(content).partition(_HOLE)
        assert hole, "the template has no hole"
        self._between = self._behind + self._before
        self._parts = parts
        self._part = parts.__getitem__

    def events(self, tokens: Sequence[int], interval: int = 1) -> bytes:
        """Events of up to `interval` tokens each, of which there is at least one. All are plain, as
        PlainTexts has it."""
        told: Iterable[bytes] = map(self._part, tokens)
        if interval > 1:
            groups = range(0, len(tokens), interval)
            told = [self._parts.of_group(tokens[i : i + interval]) for i in groups]
        return b"%b%b%b" % (self._before, self._between.join(told), self._behind)
