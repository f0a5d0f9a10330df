"""One measured figure: what was run, its bytes and time, the limit beside it, and its bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from loadtest.peers.textbook.work import Work
from loadtest.report import print_table
from loadtest.timing import Timing, release_memory


@dataclass(frozen=True)
class Bar:
    """The bar of a row.

    Kinds "element-wise", "copy" and "copy or arithmetic" are fractions of that rate, at least
    `value`; kind "times copy" is a multiple of its time, at most `value`.
    """

    kind: str
    value: float


@dataclass
class Row:
    """The figures of one operator (or peer) at one shape."""

    case: str
    operator: str
    shape: str
    dtype: str
    bytes: int
    layout: str = "channels"  # which dimension is contiguous: "channels" or "time"
    bar: Bar | None = None
    timing: Timing | None = None
    error: float | None = None
    ceiling: float | None = None  # bytes per second of the large copy
    elementwise: float | None = None  # bytes per second of the element-wise kernel of these bytes
    copy_seconds: float | None = None  # of a copy of these bytes, launched the same way
    arithmetic: float | None = None  # ideal bytes per second on data that stays in cache
    special_seconds: float | None = None  # of the special-function units, with all of them busy
    times: dict[str, float] = field(default_factory=dict)  # peer -> its time over ours
    inputs: str = ""  # what is special about them
    largest_error: float | None = None  # over the standard deviation of the exact result
    tokens: int = 0  # of a sequence, where `work` is known
    work: Work | None = None  # what one channel of one sequence takes
    note: str = ""

    @property
    def seconds(self) -> float | None:
        return None if self.timing is None else self.timing.seconds

    @property
    def rate(self) -> float | None:
        """Ideal bytes per second."""
        return None if self.timing is None else self.bytes / self.timing.seconds

    def score(self) -> float | None:
        """The figure that is compared with the bar."""
        if self.bar is None or self.seconds is None or self.rate is None:
            return None
        if self.bar.kind == "times copy":
            return None if self.copy_seconds is None else self.seconds / self.copy_seconds
        limit = self.elementwise if self.bar.kind == "element-wise" else self.ceiling
        if self.bar.kind == "copy or arithmetic" and self.arithmetic and limit:
            limit = min(limit, self.arithmetic)
        return self.rate / limit if limit else None

    @property
    def verdict(self) -> str:
        """The result, "pass" or "short"; empty if there is no bar or no figure."""
        score = self.score()
        if self.bar is None or score is None:
            return ""
        if self.bar.kind == "times copy":
            return "pass" if score <= self.bar.value else "short"
        return "pass" if score >= self.bar.value else "short"

    def as_json(self) -> dict[str, Any]:
        figures = {"rate": self.rate, "score": self.score(), "verdict": self.verdict}
        return {**asdict(self), **figures}

    def remarks(self) -> str:
        """The timing method if it is not the usual one, and what went wrong."""
        parts = []
        if self.timing is not None and self.timing.method == "events":
            parts.append("by events")
        if self.timing is not None and self.timing.runs < 20:
            parts.append(f"{self.timing.runs} runs")
        return "; ".join([*parts, self.note] if self.note else parts)


@contextmanager
def reported(row: Row, device: torch.device) -> Iterator[None]:
    """Turn an error in the block into the row's note, and free memory at the end."""
    try:
        yield
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    except Exception as failure:  # a peer may raise anything, and costs only its own row
        first_line = (str(failure).strip() or "no message").splitlines()[0]
        row.note = f"{type(failure).__name__}: {first_line}"[:100]
    with suppress(RuntimeError):  # a fault of the GPU itself comes back at every later call
        release_memory(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32" instead of "torch.float32"."""
    return str(dtype).removeprefix("torch.")


def _percent(value: float | None, limit: float | None) -> str:
    return f"{value / limit:.1%}" if value and limit else ""


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def print_rows(title: str, rows: list[Row]) -> None:
    """Print the table of one case, with the columns for which any row has a value."""
    columns: dict[str, list[str]] = {
        "shape": [row.shape for row in rows],
        "dtype": [row.dtype for row in rows],
        "contiguous": [row.layout for row in rows],
        "inputs": [row.inputs for row in rows],
        "operator": [row.operator for row in rows],
        "MB": [
            f"{row.bytes / 1e6:,.3g}" if row.bytes < 1e8 else f"{row.bytes / 1e6:,.0f}"
            for row in rows
        ],
        "µs": [_number(row.seconds, ",.1f", 1e6) for row in rows],
        "copy µs": [_number(row.copy_seconds, ",.1f", 1e6) for row in rows],
        "exponentials µs": [_number(row.special_seconds, ",.1f", 1e6) for row in rows],
        "GB/s": [
            _number(row.rate, ",.0f" if (row.rate or 0) > 1e11 else ",.1f", 1e-9) for row in rows
        ],
        "of element-wise": [_percent(row.rate, row.elementwise) for row in rows],
        "of copy": [_percent(row.rate, row.ceiling) for row in rows],
        "in-cache GB/s": [_number(row.arithmetic, ",.1f", 1e-9) for row in rows],
        "times copy": [
            f"{row.seconds / row.copy_seconds:.2f}" if row.seconds and row.copy_seconds else ""
            for row in rows
        ],
    }
    for peer in dict.fromkeys(peer for row in rows for peer in row.times):
        columns[f"{peer} / ours"] = [_number(row.times.get(peer), ".1f") for row in rows]
    columns["error"] = [_number(row.error, ".1e") for row in rows]
    columns["largest error"] = [_number(row.largest_error, ".1e") for row in rows]
    columns |= _work_columns(rows)
    columns["bar"] = [_bar_text(row.bar) for row in rows]
    columns["result"] = [row.verdict for row in rows]
    columns["remarks"] = [row.remarks() for row in rows]
    if all(layout == "channels" for layout in columns["contiguous"]):
        del columns["contiguous"]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    print_table(title, list(columns), list(zip(*columns.values(), strict=True)))


def _work_columns(rows: list[Row]) -> dict[str, list[str]]:
    """Return the columns of what is known of the work: for a token, then kernels and depth."""
    names = {"multiply_adds": "multiply-adds", "functions": "exp, log", "accesses": "accesses"}
    columns = {
        title: [f"{getattr(row.work, name) / row.tokens:.1f}" if row.work else "" for row in rows]
        for name, title in names.items()
    }
    for name in ("kernels", "depth"):
        columns[name] = [f"{getattr(row.work, name):,}" if row.work else "" for row in rows]
    return columns


def _bar_text(bar: Bar | None) -> str:
    if bar is None:
        return ""
    if bar.kind == "times copy":
        return f"<= {bar.value:g}x copy"
    return f">= {bar.value:.0%} of {bar.kind}"
