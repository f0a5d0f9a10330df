"""Token ids as bytes: how they cross the process boundary, and how they are kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ID_BYTES = 4  # of one packed token id


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as native-endian int32 bytes: ID_BYTES a token, whatever the id.

    Raises OverflowError for an id that int32 cannot hold; check the range first.
    """
    # array() would take bytes for packed items, not for an iterable of integers.
    return array("i", list(ids) if isinstance(ids, bytes | bytearray) else ids).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """The token ids that `pack_ids` packed."""
    ids = array("i")
    ids.frombytes(packed)
    return ids
