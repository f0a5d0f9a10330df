"""StatePlacement: which of a server's engines keeps a state.

The placement follows from the owner and the state id alone, so no routing table is needed. The name
of the state's file contains the same digest, so files can be assigned without opening them.

It is rendezvous hashing (highest random weight; Thaler and Ravishankar, 1998): each engine has a
weight for each state, and the engine with the highest one keeps the state. An engine's weight does
not depend on how many engines there are. So where one engine is added to N, it takes over about one
of N + 1 states, and no state moves between the others; where the last one leaves, only its states
move.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct

DIGEST_BYTES = 24
DIGEST_CHARACTERS = 2 * DIGEST_BYTES  # in hexadecimal
WEIGHT_BYTES = 4


def digest_of(*parts: str) -> str:
    """Return a hexadecimal digest of `parts`, of fixed length, unique for practical purposes."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()


def home_of_digest(digest: str, engines: int) -> int:
    """Return the rank, among `engines`, of the engine that keeps the state with this digest."""
    if engines == 1:
        return 0
    weights = _weights(digest, engines)
    return weights.index(max(weights))


def engine_of_state(owner: str, id: str, engines: int) -> int:
    """Return the rank, among `engines`, of the engine that keeps this owner's state `id`."""
    return home_of_digest(digest_of(owner, id), engines) if engines > 1 else 0


def engines_in_order(owner: str, id: str, engines: int) -> list[int]:
    """Return all ranks among `engines`, the one that keeps this owner's state `id` first.

    The next one is the engine that would keep the state if those before it did not exist. Where any
    engine can read the state, it is the one to ask if those before it are not available: all who
    ask agree on it, and the states of a missing engine are spread over all others.
    """
    weights = _weights(digest_of(owner, id), engines)
    # The sort is stable in reverse, too: of equal weights the lower rank is first, as above.
    return sorted(range(engines), key=weights.__getitem__, reverse=True)


def _weights(digest: str, engines: int) -> tuple[int, ...]:
    """Return the weight of each rank for the state with this digest.

    A longer output of SHAKE begins with the shorter one. So one call gives the weights of all
    ranks, and a rank's weight is the same for any number of engines.
    """
    drawn = hashlib.shake_128(digest.encode()).digest(WEIGHT_BYTES * engines)
    return struct.unpack(f">{engines}I", drawn)


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
