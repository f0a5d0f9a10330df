"""StatePlacement: which of a server's engines keeps a state.

The placement follows from the owner and the state id alone, so no routing table is needed. The name
of the state's file contains the same digest, so files can be assigned without opening them.
"""

from __future__ import annotations

import hashlib
import json
import secrets

DIGEST_BYTES = 24
DIGEST_CHARACTERS = 2 * DIGEST_BYTES  # in hexadecimal
HOME_CHARACTERS = 8  # leading digest characters that decide which engine keeps a state


def digest_of(*parts: str) -> str:
    """Return a hexadecimal digest of `parts`, of fixed length, unique for practical purposes."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()


def home_of_digest(digest: str, engines: int) -> int:
    """Return the rank, among `engines`, of the engine that keeps the state with this digest."""
    return int(digest[:HOME_CHARACTERS], 16) % engines


def engine_of_state(owner: str, id: str, engines: int) -> int:
    """Return the rank, among `engines`, of the engine that keeps this owner's state `id`."""
    return home_of_digest(digest_of(owner, id), engines) if engines > 1 else 0


class StatePlacement:
    """The placement of states, as seen by the engine of rank `rank`."""

    def __init__(self, rank: int = 0, engines: int = 1) -> None:
        self.rank = rank
        self.engines = engines

    def new_id(self, owner: str) -> str:
        """Return a new random state id that this engine keeps."""
        while True:  # on average one of `engines` ids belongs here
            id = f"st_{secrets.token_hex(16)}"
            if engine_of_state(owner, id, self.engines) == self.rank:
                return id
