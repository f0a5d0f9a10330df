"""Whether compressing states would win: bytes saved against the time that it takes."""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from loadtest.report import median

Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Compressed:
    """One way to compress, over some states; seconds are medians of a state."""

    name: str
    share: float  # of the bytes that are left
    compress: float
    decompress: float
    break_even: float  # bytes per second of a network on which it costs as much as it saves


def ways() -> dict[str, tuple[Change, Change]]:
    """Return how to compress and how to decompress, by name."""
    found: dict[str, tuple[Change, Change]] = {
        f"zlib {level}": (partial(zlib.compress, level=level), zlib.decompress) for level in (1, 6)
    }
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        return found
    for level in (1, 3):
        compressor, decompressor = zstandard.ZstdCompressor(level), zstandard.ZstdDecompressor()
        found[f"zstd {level}"] = (compressor.compress, decompressor.decompress)
    return found


def compressed(states: Sequence[bytes]) -> list[Compressed]:
    """Compress these states every way. Raises RuntimeError if one does not come back."""
    found = []
    for name, (compress, decompress) in ways().items():
        times: dict[str, list[float]] = {"compress": [], "decompress": []}
        left = 0
        for state in states:
            begun = time.perf_counter()
            small = compress(state)
            done = time.perf_counter()
            if decompress(small) != state:
                raise RuntimeError(f"{name}: another state came back")
            times["compress"].append(done - begun)
            times["decompress"].append(time.perf_counter() - done)
            left += len(small)
        both = sum(map(sum, times.values()))
        whole = sum(map(len, states))
        # a turn elsewhere writes the state once and reads it once
        even = 2 * max(whole - left, 0) / both
        medians = {name: median(values) for name, values in times.items()}
        found.append(Compressed(name, left / whole, **medians, break_even=even))
    return found
