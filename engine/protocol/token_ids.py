"""Packed token ids: the format in which they cross the process boundary and are stored."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ID_BYTES = 4  # bytes of one packed token id


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids as native-endian int32, ID_BYTES for each.

    Raises OverflowError for an id that int32 cannot hold; check the range first.
    """
    # array() would interpret a bytes object as packed items, not as an iterable of integers.
    return array("i", list(ids) if isinstance(ids, bytes | bytearray) else ids).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """Return the token ids that `pack_ids` packed."""
    ids = array("i")
    ids.frombytes(packed)
    return ids
