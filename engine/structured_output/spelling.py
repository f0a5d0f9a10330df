"""Spelling: whether a model's tokens can write any text that a grammar accepts.

Tokens of every byte can write every text. Where bytes are missing (a vocabulary of 65 characters,
say), a grammar may lead to a place that no token leaves. So a text is looked for before a model
writes one: walks that end strings, lists and objects as soon as they may. Where none are missing,
a few steps show whether the library goes on at all: it gives up where too much may come next.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_WALKS = 32
MOST_STEPS = 2048  # of one walk
MOST_SECONDS = 0.5  # of processor time for all of them
FEW_WALKS, FEW_STEPS, FEW_SECONDS = 3, 32, 0.1  # the same of `dead_end`
_HASTE = 0.75  # how often a walk ends what it may end
_ENDS = (b"}", b"]", b'"')
_NO_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


def has_all_bytes(library: LLTokenizer) -> bool:
    """Whether each byte that UTF-8 uses is a token of its own."""
    single = {
        text
        for token in range(library.vocab_size)
        if not library.is_special_token(token) and len(text := library.decode_bytes([token])) == 1
    }
    return all(bytes([byte]) in single for byte in range(256) if byte not in _NO_UTF8)


def can_spell(matcher: LLMatcher, library: LLTokenizer, end: int) -> bool:
    """Whether a text was found that `matcher`, at its beginning, accepts; `end` is the bit of its
    masks that says so."""
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
    """Where the library gave up on every walk from a matcher's beginning; None where it did not on
    one. `end` as in `can_spell`."""
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
