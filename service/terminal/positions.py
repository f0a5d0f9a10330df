"""Bits per byte by position in a document: sums over documents, as a table and as a figure.

Later positions are those of fewer, longer documents. So the figure's main line is of a fixed set:
the documents that reach LONG bytes, all of which are in every bin up to there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError

# Bins of bytes: 0, 1k, 3k, 10k, 30k, ... 1T
BOUNDS = [0, *(digit * 10**power for power in range(3, 12) for digit in (1, 3)), 10**12]
LONG = 100_000  # bytes

Row = Mapping[str, Any]


class PositionSums:
    """Nats, bytes and documents of each bin between neighbours of BOUNDS."""

    def __init__(self) -> None:
        bins = len(BOUNDS) - 1
        self._nats = torch.zeros(bins, dtype=torch.float64)
        self._bytes = torch.zeros(bins, dtype=torch.int64)
        self._documents = torch.zeros(bins, dtype=torch.int64)

    @classmethod
    def of(cls, starts: Tensor, sizes: Tensor, nats: Tensor) -> PositionSums:
        """Return the sums of one document.

        A token counts in the bin of its first byte, with all its bytes.

        Args:
            starts: int64 [tokens], the position of each token's first byte, on the CPU.
            sizes: int64 [tokens], the token's bytes.
            nats: [tokens].
        """
        sums = cls()
        last = int((starts + sizes).max()) - 1 if starts.numel() else 0
        # an end-of-text token has no bytes: it counts with the last byte
        at = torch.bucketize(starts.clamp(max=max(last, 0)), torch.tensor(BOUNDS), right=True) - 1
        sums._nats.index_add_(0, at, nats.double())
        sums._bytes.index_add_(0, at, sizes)
        sums._documents[at] = 1
        return sums

    @classmethod
    def total(cls, parts: Iterable[PositionSums]) -> PositionSums:
        """Return the sums of several documents."""
        sums = cls()
        for part in parts:
            sums._nats += part._nats
            sums._bytes += part._bytes
            sums._documents += part._documents
        return sums

    def rows(self) -> list[Row]:
        """Return the bins that any document reaches: bounds, documents, bytes, bits per byte."""
        columns = (self._documents.tolist(), self._bytes.tolist(), self._nats.tolist())
        return [
            {
                "begin": begin,
                "end": end,
                "documents": documents,
                "bytes": size,
                "bits_per_byte": nats / math.log(2) / size if size else None,
            }
            for (begin, end), documents, size, nats in zip(pairwise(BOUNDS), *columns, strict=True)
            if documents
        ]


def table(rows: Sequence[Row]) -> str:
    """Return bins as lines of text."""
    lines = [("from byte", "documents", "bytes", "bits per byte")]
    for row in rows:
        bits = row["bits_per_byte"]
        shown = "-" if bits is None else f"{bits:.4f}"
        lines.append((f"{row['begin']:,}", f"{row['documents']:,}", f"{row['bytes']:,}", shown))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def require_matplotlib() -> None:
    """Raise ConfigError if the figure's library is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("matplotlib is not installed; pip install 'minserve[train]'") from None


def draw(
    path: Path, every: Sequence[Row], long: Sequence[Row], windows: tuple[int, float] | None
) -> None:
    """Write the bins as a PNG.

    Args:
        path: the file.
        every: bins of all documents.
        long: bins of those that reach LONG bytes; empty if there is none.
        windows: tokens of a window and bits per byte in windows, of the documents of the main line:
            `long`, or `every` if that is empty; None: not measured.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained", dpi=120)
    axes = figure.subplots()
    lines = [("all documents", every, "0.6", 1.2)]
    if long:
        lines.append((f"documents of {LONG // 1000} kB and more", long, "C0", 2.2))
    for name, rows, colour, width in lines:
        shown = [row for row in rows if row["bits_per_byte"] is not None]
        # the axis has no 0: the first bin is drawn as wide as the next
        edges = [max(row["begin"], 300) for row in shown] + [shown[-1]["end"]] if shown else []
        values = [row["bits_per_byte"] for row in shown]
        if shown:
            axes.stairs(values, edges, baseline=None, color=colour, linewidth=width, label=name)
    for row in long or every:
        if row["bits_per_byte"] is not None:
            axes.annotate(
                f"{row['documents']:,}",
                (math.sqrt(max(row["begin"], 300) * row["end"]), row["bits_per_byte"]),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    if windows is not None:
        tokens, bits = windows
        label = f"windows of {tokens:,} tokens: {bits:.3f}"
        axes.axhline(bits, color="C1", linestyle="--", linewidth=1.2, label=label)
    axes.set_xscale("log")
    axes.set(xlabel="position in the document, bytes", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(title="numbers: documents", title_fontsize=8, fontsize=8)
    figure.savefig(path, format="png")
