"""Templates of stream events that differ only in their token, to render them quickly.

A stream sends an event per token, and nearly all of them are equal except for the token's text. So
the rest of the event is rendered once per stream and each token's part once per server. Rendering
the events of several tokens is then a single join.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.http.json_response import encode, event
from service.text.token_texts import PlainTexts
from service.text.tokenizer import Tokenizer

# Placeholder of the token's part in the content of a template.
HOLE = "<| the token's part |>"
_HOLE = encode(HOLE)


class Parts(dict[int, bytes]):
    """Each token's part of an event, rendered when it is first needed.

    The part is the token's text as JSON and, with `ids`, the field `token_ids` after it.
    """

    def __init__(self, texts: PlainTexts, *, ids: bool) -> None:
        self._texts = texts
        self._ids = ids

    def __missing__(self, token: int) -> bytes:
        part = self[token] = self.of_group([token])
        return part

    def of_group(self, tokens: Sequence[int]) -> bytes:
        """Return the part of an event that several plain tokens share."""
        texts = [self._texts[token] for token in tokens]
        text = encode("".join([text for text in texts if text]))
        return b'%b,"token_ids":%b' % (text, encode(list(tokens))) if self._ids else text


class TokenParts:
    """The parts of a tokenizer's tokens, shared by all streams of a model."""

    def __init__(self, texts: PlainTexts) -> None:
        self.texts = Parts(texts, ids=False)
        self.with_ids = Parts(texts, ids=True)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> TokenParts | None:
        """Return the parts of a tokenizer, or None if its tokens' texts depend on neighbours."""
        if tokenizer is None or tokenizer.plain_texts is None:
            return None
        return cls(tokenizer.plain_texts)


class Template:
    """A stream event with a hole for its token's part."""

    __slots__ = ("_before", "_behind", "_between", "_part", "_parts")

    def __init__(self, content: dict[str, Any], parts: Parts) -> None:
        """`content`: the event's content, with HOLE in the place of the token's part."""
        self._before, hole, self._behind = event(content).partition(_HOLE)
        assert hole, "the template has no hole"
        self._between = self._behind + self._before
        self._parts = parts
        self._part = parts.__getitem__

    def events(self, tokens: Sequence[int], interval: int = 1) -> bytes:
        """Return the events of one or more plain tokens, up to `interval` tokens in each event.

        Plain: the token has a text in PlainTexts.
        """
        told: Iterable[bytes] = map(self._part, tokens)
        if interval > 1:
            groups = range(0, len(tokens), interval)
            told = [self._parts.of_group(tokens[i : i + interval]) for i in groups]
        return b"%b%b%b" % (self._before, self._between.join(told), self._behind)
