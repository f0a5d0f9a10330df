"""Helpers to report measurements: environment, percentiles, tables, JSON files."""

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
    """Return the machine, the device and the package versions that figures depend on."""
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
    """Return the nearest-rank percentile of values; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))  # ceiling
    return ordered[int(rank) - 1]


def median(values: Sequence[float]) -> float:
    """Return the 50th percentile by nearest rank."""
    return percentile(values, 50)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Wider than a narrow terminal or a pipe if need be, so that figures are neither folded nor cut.
    console = Console(width=max(Console().width, 400))
    console.print(table)


def print_environment() -> None:
    """Print the environment on one line."""
    print(", ".join(f"{key} {value}" for key, value in environment().items()))


def save_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write figures and environment to a JSON file; do nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"environment": environment(), **data}, indent=2) + "\n")
