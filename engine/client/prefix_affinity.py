"""PrefixAffinity: which of several engines has read the beginning of a prompt, as far as an API
process has sent it there.

An engine caches the states after prompts that it has read, so a prompt that goes on from one, as
turns of a conversation do, is best read where that was. What is remembered is a hint and no more:
prompts are known by checksums of their beginnings, whole blocks of tokens long, and the engine may
have forgotten the state since.
"""

from __future__ import annotations

import zlib
from collections.abc import Container
from typing import Generic, TypeVar

from engine.protocol.token_ids import ID_BYTES

Engine = TypeVar("Engine")

BLOCK_TOKENS = 64  # shorter prompts are read as quickly as they are looked up
MOST_BLOCKS = 1024  # of a prompt that are looked at
# Of these the first ones are remembered, where prompts part that begin with the same instructions,
# and the last ones, where the next turn goes on.
FIRST_BLOCKS, LAST_BLOCKS = 64, 4
MOST_HASHES = 2**16  # that are remembered; the least recently used go first

_BLOCK_BYTES = BLOCK_TOKENS * ID_BYTES


def prefix_hashes(scope: str, prompt: bytes) -> list[int]:
    """What tells the beginnings of a prompt apart, the shortest first: of one block, of two, and so
    on. Prompts of different scopes have nothing in common."""
    digest, packed = zlib.crc32(scope.encode()), memoryview(prompt)
    hashes = []
    for end in range(_BLOCK_BYTES, min(len(prompt), MOST_BLOCKS * _BLOCK_BYTES) + 1, _BLOCK_BYTES):
        digest = zlib.crc32(packed[end - _BLOCK_BYTES : end], digest)
        hashes.append(digest)
    return hashes


class PrefixAffinity(Generic[Engine]):
    """Engines by the hashes of what they have read. All methods are called on one event loop."""

    def __init__(self, most: int = MOST_HASHES) -> None:
        """Remembers `most` hashes."""
        self._most = most
        self._engines: dict[int, Engine] = {}  # the least recently used first
        self._among: Container[Engine | None] | None = None  # who is still there, where it was told

    def __len__(self) -> int:
        return len(self._engines)

    def find(self, hashes: list[int], among: Container[Engine]) -> tuple[Engine | None, int]:
        """Who of `among` has read the longest beginning of a prompt, and how many tokens that has;
        (None, 0) where none has. `hashes` are prefix_hashes of the prompt."""
        for blocks in range(len(hashes), 0, -1):
            engine = self._engines.get(hashes[blocks - 1])
            if engine is not None and engine in among:
                return engine, blocks * BLOCK_TOKENS
        return None, 0

    def note(self, hashes: list[int], engine: Engine) -> None:
        """The engine is going to read a prompt with these `hashes`."""
        engines = self._engines
        if self._among is not None and engine not in self._among:
            return
        for digest in (*hashes[:FIRST_BLOCKS], *hashes[FIRST_BLOCKS:][-LAST_BLOCKS:]):
            engines.pop(digest, None)
            engines[digest] = engine
        while len(engines) > self._most:
            del engines[next(iter(engines))]

    def keep_only(self, among: Container[Engine | None]) -> None:
        """Forgets all engines but these; others are not noted again."""
        self._among = among
        self._engines = {digest: one for digest, one in self._engines.items() if one in among}
