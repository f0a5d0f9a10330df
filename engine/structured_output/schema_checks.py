"""Prepares JSON schemas for llguidance, and checks that a model can write any matching text.

The library stores numbers as doubles. So bounds are rounded to doubles within them, and constants
that are not doubles are refused, because the answer would differ. Options in a schema under
`x-guidance`, the library's own, take precedence over ours.

Tokens for every byte can spell every text. If bytes are missing (for example in a vocabulary of 65
characters), a grammar may lead to a point from which no token goes on. So a text is searched for
before a model writes one, by random walks that end strings, lists and objects as soon as possible.
If no bytes are missing, a few steps show whether the library continues at all: it gives up if too
much may come next.
"""

from __future__ import annotations

import json
import math
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

OPTIONS = "x-guidance"
# White space between the parts of JSON, as programs write it. With more freedom a small model
# writes blanks and line breaks until its last token.
WHITESPACE = r"\x20{1,2}|\x09|\x0D?\x0A[\x20\x09]{0,32}"
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_CONSTANTS = "const", "enum", "multipleOf"
_BY_NAME = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "schemas"
_NOT_READ = "default", "example", "examples"  # nor keys that begin with x-

# Limits of the walks that search for a text.
MOST_WALKS = 32
MOST_STEPS = 2048  # steps of one walk
MOST_SECONDS = 0.5  # CPU time of all walks
FEW_WALKS, FEW_STEPS, FEW_SECONDS = 3, 32, 0.1  # the same for `dead_end`
_HASTE = 0.75  # probability that a walk ends what it may end
_ENDS = (b"}", b"]", b'"')
_NO_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def prepared(text: str) -> str:
    """Return the schema in `text`, adapted to the library. Raises ValueError if it cannot be."""
    schema = json.loads(text)
    _bring_in(schema)
    if not isinstance(schema, dict):
        return json.dumps(schema)
    options = schema.get(OPTIONS, {})
    if not isinstance(options, dict):
        raise ValueError(f"{OPTIONS}: must be an object")
    if options.get("whitespace_flexible", True) is not False:
        schema[OPTIONS] = {"whitespace_pattern": WHITESPACE, **options}
    return json.dumps(schema)


def _bring_in(schema: Any) -> None:
    """Adapt the numbers in a schema, in place, to what the library can store."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            for key, value in node.items():
                if key in _CONSTANTS:
                    _check(key, value)
                elif key in _BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif key in _UPPER and type(value) is int:
                    node[key] = _double(key, value, -math.inf)
                elif key in _LOWER and type(value) is int:
                    node[key] = _double(key, value, math.inf)
                elif key not in _NOT_READ and not key.startswith("x-"):
                    left.append(value)


def _check(key: str, constant: Any) -> None:
    left = [constant]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif type(value) is int and _double(key, value, 0) != value:
            raise ValueError(
                f"{key}: {value} cannot be used: integers beyond 2**53 must be exactly "
                "representable as doubles"
            )


def _double(key: str, value: int, towards: float) -> int:
    """Return the nearest integer to `value` that is a double, not beyond it in this direction."""
    try:
        nearest = float(value)
    except OverflowError as error:
        raise ValueError(f"{key}: an integer of this size cannot be used") from error
    if (towards < 0 and nearest > value) or (towards > 0 and nearest < value):
        nearest = math.nextafter(nearest, towards)
    return int(nearest) if math.isfinite(nearest) else value


def has_all_bytes(library: LLTokenizer) -> bool:
    """Return whether each byte that occurs in UTF-8 is a token of its own."""
    single = {
        text
        for token in range(library.vocab_size)
        if not library.is_special_token(token) and len(text := library.decode_bytes([token])) == 1
    }
    return all(bytes([byte]) in single for byte in range(256) if byte not in _NO_UTF8)


def can_spell(matcher: LLMatcher, library: LLTokenizer, end: int) -> bool:
    """Search for a text that `matcher`, at its beginning, accepts; return whether one was found.

    `end` is the mask bit that says that the text may end.
    """
    ends = [token for text in _ENDS for token in _tokens_of(library, text)]
    chance, until = random.Random(0), time.thread_time() + MOST_SECONDS
    for _ in range(MOST_WALKS):
        walk = matcher.deep_copy()
        for _ in range(MOST_STEPS):
            mask = np.frombuffer(walk.compute_bitmask(), np.uint8)
            if time.thread_time() > until:
                return False
            if walk.is_error():
                break
            allowed = np.unpackbits(mask, bitorder="little")
            if allowed[end] and walk.is_accepting():
                return True
            closing = [token for token in ends if allowed[token]]
            hasty = closing and chance.random() < _HASTE
            token = closing[0] if hasty else chance.choice(np.flatnonzero(allowed).tolist())
            if not walk.consume_token(token):
                break
    return False


def dead_end(matcher: LLMatcher, end: int) -> LLMatcher | None:
    """Return a matcher where the library gave up, if it did so on every walk; else None.

    `matcher` is at its beginning; `end` is as in `can_spell`.
    """
    chance, until = random.Random(0), time.thread_time() + FEW_SECONDS
    walk = matcher
    for _ in range(FEW_WALKS):
        walk = matcher.deep_copy()
        for _ in range(FEW_STEPS):
            mask = np.frombuffer(walk.compute_bitmask(), np.uint8)
            if walk.is_error():
                break
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = chance.choice(allowed.tolist())
            if token == end or time.thread_time() > until:
                return None
            if not walk.consume_token(token):
                break
        if not walk.is_error():
            return None
    return walk


def _tokens_of(library: LLTokenizer, text: bytes) -> list[int]:
    tokens = range(library.vocab_size)
    return [token for token in tokens if library.decode_bytes([token]) == text]
