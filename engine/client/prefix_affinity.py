"""PrefixAffinity: which of several engines has read the beginning of a prompt.

An engine caches states after prompts that it has read. A prompt that continues one of them, such as
the next turn of a conversation, is best sent to the same engine. The record is only a hint: each
API process knows only what it has sent itself, prompts are identified by checksums of whole blocks
of tokens, and the engine may have evicted the state.
"""

from __future__ import annotations

import zlib
from collections.abc import Container
from typing import Generic, TypeVar

from engine.protocol.token_ids import ID_BYTES

Engine = TypeVar("Engine")

BLOCK_TOKENS = 64  # shorter prompts are not worth a lookup
MOST_BLOCKS = 1024  # the longest part of a prompt that is looked at
# Blocks of a prompt that are remembered: the first ones, where prompts that share instructions
# diverge, and the last ones, where the next turn continues.
FIRST_BLOCKS, LAST_BLOCKS = 64, 4
MOST_HASHES = 2**16  # the most hashes remembered; the least recently used are evicted first

_BLOCK_BYTES = BLOCK_TOKENS * ID_BYTES


def prefix_hashes(scope: str, prompt: bytes) -> list[int]:
    """Return one checksum for each beginning of a prompt of 1, 2, ... blocks.

    `prompt` holds packed token ids. Prompts in different scopes have no checksums in common.
    """
    digest, packed = zlib.crc32(scope.encode()), memoryview(prompt)
    hashes = []
    for end in range(_BLOCK_BYTES, min(len(prompt), MOST_BLOCKS * _BLOCK_BYTES) + 1, _BLOCK_BYTES):
        digest = zlib.crc32(packed[end - _BLOCK_BYTES : end], digest)
        hashes.append(digest)
    return hashes


class PrefixAffinity(Generic[Engine]):
    """Maps prefix checksums to the engine that read them. All methods run on one event loop."""

    def __init__(self, most: int = MOST_HASHES) -> None:
        """Create an empty record of at most `most` hashes."""
        self._most = most
        self._engines: dict[int, Engine] = {}  # the least recently used first
        # the engines that still exist; None: all
        self._among: Container[Engine | None] | None = None

    def __len__(self) -> int:
        return len(self._engines)

    def find(self, hashes: list[int], among: Container[Engine]) -> tuple[Engine | None, int]:
        """Find the engine of `among` that has read the longest beginning of a prompt.

        Args:
            hashes: prefix_hashes of the prompt.
            among: the engines to choose from.

        Returns:
            The engine and the length of that beginning in tokens; (None, 0) if there is none.
        """
        for blocks in range(len(hashes), 0, -1):
            engine = self._engines.get(hashes[blocks - 1])
            if engine is not None and engine in among:
                return engine, blocks * BLOCK_TOKENS
        return None, 0

    def note(self, hashes: list[int], engine: Engine) -> None:
        """Record that the engine is going to read a prompt with these `hashes`."""
        engines = self._engines
        if self._among is not None and engine not in self._among:
            return
        for digest in (*hashes[:FIRST_BLOCKS], *hashes[FIRST_BLOCKS:][-LAST_BLOCKS:]):
            engines.pop(digest, None)
            engines[digest] = engine
        while len(engines) > self._most:
            del engines[next(iter(engines))]

    def keep_only(self, among: Container[Engine | None]) -> None:
        """Forget all engines except these, and never record others again."""
        self._among = among
        self._engines = {digest: one for digest, one in self._engines.items() if one in among}
