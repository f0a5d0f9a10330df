"""What every tool here shares: its command line, tables, JSON, and the picture of kernels.

python -m loadtest.report kernels.json --png kernels.png     # draws saved figures again
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.extra import exit_without
from service.terminal.bench.report import (
    environment,
    median,
    percentile,
    print_environment,
    print_table,
    save_json,
)

__all__ = [
    "command_line",
    "environment",
    "median",
    "percentile",
    "print_environment",
    "print_table",
    "redraw",
    "roofline_png",
    "save_json",
]

# Panels of the roofline picture: a case of loadtest.kernels and its title.
PANELS = {"fused": "serving scans", "linear": "linear_scan forward", "backward": "backward"}
_MARKERS = "os^DvPX*<>"


class _Format(argparse.RawDescriptionHelpFormatter):
    """Keeps descriptions as they are, and adds defaults to the help of options.

    argparse's ArgumentDefaultsHelpFormatter would also print None and False.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help
        plain = isinstance(default, (int, float, str)) and not isinstance(default, bool)
        if text and plain and default != argparse.SUPPRESS and "default" not in text:
            return text + " (default: %(default)s)"
        return text


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m loadtest.NAME`; `doc` is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m loadtest.{name}", description=doc, formatter_class=_Format
    )


def roofline_png(path: Path, data: dict[str, Any]) -> None:
    """Draw achieved GB/s of ideal bytes against traffic, as loadtest.kernels saves them.

    There is one panel per case, with the copy ceiling and the element-wise rate of the same run.
    Colours are operators, markers are shapes, filled markers are two-byte types. Raises ValueError
    if there is no figure to draw.
    """
    from matplotlib.figure import Figure

    rows = [row for row in data["rows"] if row["rate"] and row["case"] in PANELS]
    panels = [case for case in PANELS if any(row["case"] == case for row in rows)]
    if not panels:
        raise ValueError("no figure of a scan to draw: measure the case fused, linear or backward")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    markers = {shape: _MARKERS[index % len(_MARKERS)] for index, shape in enumerate(shapes)}
    ceiling = data["copy_bytes_per_second"] / 1e9
    figure = Figure(figsize=(1.5 + 5 * len(panels), 6.4), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, case in zip(axes, panels, strict=True):
        _draw_panel(axis, [row for row in rows if row["case"] == case], markers)
        axis.axhline(ceiling, color="black", linewidth=1.2, label=f"copy, {ceiling:,.0f} GB/s")
        axis.set_title(PANELS[case])
        axis.set_xlabel("ideal traffic of one call, MB")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2, fontsize=8)
    top = max([ceiling, *(max(row["rate"], row["elementwise"] or 0) / 1e9 for row in rows)])
    axes[0].set_ylim(0, 1.08 * top)
    axes[0].set_ylabel("GB/s of ideal traffic")
    points = [
        axes[-1].scatter([], [], marker=mark, facecolors="none", edgecolors="0.3", label=shape)
        for shape, mark in markers.items()
    ]
    points.append(axes[-1].scatter([], [], marker="o", color="0.3", label="filled: 2-byte type"))
    figure.legend(handles=points, loc="outside lower center", ncols=len(points), fontsize=8)
    versions = data["environment"]
    named = [
        f"{name} {versions[name]}"
        for name in ("torch", "cuda", "triton", "minserve")
        if versions.get(name)
    ]
    figure.suptitle(", ".join([data["device"], *named]), fontsize=10)
    figure.savefig(path)


def _draw_panel(axis: Any, rows: list[dict[str, Any]], markers: dict[str, str]) -> None:
    axis.set_xscale("log")
    axis.grid(alpha=0.25, which="both")
    limits = {(row["bytes"] / 1e6, row["elementwise"] / 1e9) for row in rows if row["elementwise"]}
    if limits:
        label = "element-wise kernel, same bytes"
        axis.scatter(*zip(*limits, strict=True), color="0.45", marker="_", s=220, label=label)
    names = list(dict.fromkeys((row["operator"], row["layout"]) for row in rows))
    for index, (operator, layout) in enumerate(names):
        suffix = ", time contiguous" if layout == "time" else ""
        axis.plot([], [], color=f"C{index}", linewidth=5, label=operator + suffix)
        for row in rows:
            if (row["operator"], row["layout"]) == (operator, layout):
                filled = row["dtype"] in ("bfloat16", "float16")
                axis.scatter(
                    row["bytes"] / 1e6,
                    row["rate"] / 1e9,
                    marker=markers[row["shape"]],
                    s=44,
                    facecolors=f"C{index}" if filled else "none",
                    edgecolors=f"C{index}",
                    zorder=3,
                )


def redraw(
    script: str, draw: Callable[[Path, dict[str, Any]], None], argv: list[str] | None
) -> int:
    """Run the command line that draws what `script` saved with --json."""
    options = argparse.ArgumentParser(description=f"Draws saved figures of {script}.")
    options.add_argument("figures", type=Path, help=f"a file that --json of {script} wrote")
    options.add_argument("--png", type=Path, required=True, help="the picture to write")
    args = options.parse_args(argv)
    exit_without("matplotlib")
    draw(args.png, json.loads(args.figures.read_text()))
    return 0


def main(argv: list[str] | None = None) -> int:
    return redraw("loadtest.kernels", roofline_png, argv)


if __name__ == "__main__":
    raise SystemExit(main())
