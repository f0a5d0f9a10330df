"""StatePlacement: which of a server's engines keeps a state.

An id says so itself, whoever chose it, so that whoever has a request for it needs no table. The
name of the state's file says the same, so that files can be told apart without being opened.
"""

from __future__ import annotations

import hashlib
import json
import secrets

DIGEST_BYTES = 24
DIGEST_CHARACTERS = 2 * DIGEST_BYTES  # hexadecimal
HOME_CHARACTERS = 8  # of these, that tell the home


def digest_of(*parts: str) -> str:
    """What tells apart whatever these parts tell apart, hexadecimal, of one length."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()


def home_of_digest(digest: str, engines: int) -> int:
    """The rank, among so many engines, of the one that keeps what has this digest."""
    return int(digest[:HOME_CHARACTERS], 16) % engines


def engine_of_state(owner: str, id: str, engines: int) -> int:
    """The rank, among so many engines, of the one that keeps the owner's state of this id."""
    return home_of_digest(digest_of(owner, id), engines) if engines > 1 else 0


class StatePlacement:
    """Of the engine of this rank."""

    def __init__(self, rank: int = 0, engines: int = 1) -> None:
        self.rank = rank
        self.engines = engines

    def new_id(self, owner: str) -> str:
        """An id that was never used, of a state that is kept here."""
        while True:  # one in `engines` is
            id = f"st_{secrets.token_hex(16)}"
            if engine_of_state(owner, id, self.engines) == self.rank:
                return id
