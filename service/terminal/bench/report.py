"""How a measurement is reported: its environment, percentiles, a table, JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def environment() -> dict[str, Any]:
    """The device and the versions that a figure depends on; imports torch only if it is there."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "minserve": _version("minserve"),
        "torch": _version("torch"),
        "triton": _version("triton"),
    }
    try:
        import torch
    except ImportError:
        return found
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; NaN without values, since no figure is honest there."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))  # ceiling
    return ordered[int(rank) - 1]


def median(values: Sequence[float]) -> float:
    """The 50th percentile by nearest rank."""
    return percentile(values, 50)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on the terminal, plain when it is not one."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Wider than a narrow terminal or a pipe, if need be: figures are not folded and not cut.
    console = Console(width=max(Console().width, 400))
    console.print(table)


def print_environment() -> None:
    """The environment on one line."""
    print(", ".join(f"{key} {value}" for key, value in environment().items()))


def save_json(path: Path | None, data: dict[str, Any]) -> None:
    """Writes the figures with their environment; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), **data}, indent=2) + "\n")
