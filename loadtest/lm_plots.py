"""The picture of `loadtest.engine`: roofline, tokens/s by batch, cost of a token by context.

python -m loadtest.lm_plots engine.json --png engine.png     # draws saved figures again
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.report import redraw

Rows = list[dict[str, Any]]


def engine_png(path: Path, data: dict[str, Any]) -> None:
    """Draw what loadtest.engine saves: up to three panels, those that have figures.

    Each model has one colour. Raises ValueError if there is no figure to draw.
    """
    from matplotlib.figure import Figure

    models = data.get("models", [])
    drawers = [
        draw
        for draw, part, name in (
            (_roofline, "decode", "greedy"),
            (_throughput, "decode", "greedy"),
            (_context, "prefill", "next_step"),
        )
        if any(row[name] for model in models for row in model[part])
    ]
    if not drawers:
        raise ValueError("no figure to draw: measure decode or prefill")
    figure = Figure(figsize=(1.0 + 5.5 * len(drawers), 5.6), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(drawers), squeeze=False)[0]
    for axis, draw in zip(axes, drawers, strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(alpha=0.25, which="both")
        draw(axis, models, data)
        axis.legend(fontsize=7)
    handles = [
        axes[0].plot([], [], color=f"C{index}", linewidth=5, label=_label(model))[0]
        for index, model in enumerate(models)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    versions = data["environment"]
    named = [f"{name} {versions[name]}" for name in ("torch", "cuda") if versions.get(name)]
    figure.suptitle(", ".join([data["device"], *named]), fontsize=10)
    figure.savefig(path)


def _label(model: dict[str, Any]) -> str:
    how = "deterministic" if model.get("deterministic") else None
    return ", ".join(filter(None, (model["name"], model["dtype"], model["quantization"], how)))


def _roofline(axis: Any, models: Rows, data: dict[str, Any]) -> None:
    """Plot FLOP/s of the runner against FLOP per byte, under the two limits of the run."""
    read = data["read_bytes_per_second"]
    ends: list[float] = []
    for index, model in enumerate(models):
        for name, filled in (("greedy", True), ("peer", False)):
            rows = [row for row in model["decode"] if row[name]]
            x = [row["flops"] / row["step_bytes"] for row in rows]
            axis.plot(
                x,
                [row["flops"] / row[name] for row in rows],
                color=f"C{index}",
                marker="o",
                linestyle="-" if filled else ":",
                markerfacecolor=f"C{index}" if filled else "none",
                markersize=4,
            )
            ends += x
        if model["gemm_rate"]:
            axis.axhline(model["gemm_rate"], color=f"C{index}", linestyle="--", linewidth=0.8)
    slope = [min(ends), max(ends)]
    label = f"reading, {read / 1e9:,.0f} GB/s"
    axis.plot(slope, [read * x for x in slope], color="black", linewidth=1.2, label=label)
    axis.plot([], [], color="0.3", linestyle="--", linewidth=0.8, label="best bare GEMM rate")
    axis.plot([], [], color="0.3", marker="o", markersize=4, label="runner")
    axis.plot(
        [],
        [],
        color="0.3",
        marker="o",
        markersize=4,
        linestyle=":",
        markerfacecolor="none",
        label="PyTorch",
    )
    axis.set_title("roofline of decode steps")
    axis.set_xlabel("FLOP per byte of weights and states")
    axis.set_ylabel("FLOP/s")


def _curve(
    axis: Any, color: str, style: tuple[Any, str | None], x: list[int], y: list[float]
) -> None:
    """Plot one model's figures in its colour."""
    line, marker = style
    axis.plot(x, y, color=color, linestyle=line, marker=marker, markersize=4, linewidth=1.2)


def _throughput(axis: Any, models: Rows, data: dict[str, Any]) -> None:
    """Plot tokens/s of runner, engine, sampling, peer and limit against the batch."""
    styles = {
        "greedy": ("-", "o", "runner, greedy"),
        "sampled": ("--", "x", "runner, sampled"),
        "engine": ("-.", "^", "whole engine"),
        "peer": (":", "s", "PyTorch"),
        "limit": ((0, (1, 4)), None, "limit"),
    }
    for name, (line, marker, label) in styles.items():
        if not any(row[name] for model in models for row in model["decode"]):
            continue
        axis.plot([], [], color="0.3", linestyle=line, marker=marker, markersize=4, label=label)
        for index, model in enumerate(models):
            rows = [row for row in model["decode"] if row[name]]
            _curve(
                axis,
                f"C{index}",
                (line, marker),
                [row["batch"] for row in rows],
                [row["batch"] / row[name] for row in rows],
            )
    _mark(axis, [row["batch"] for model in models for row in model["decode"]])
    axis.set_title("decode")
    axis.set_xlabel("batch")
    axis.set_ylabel("tokens/s")


def _context(axis: Any, models: Rows, data: dict[str, Any]) -> None:
    """Plot seconds per token, read or written, against the length of the context."""
    styles = {
        "next_step": ("-", "o", "next token, batch 1"),
        "seconds": ("--", "x", "prompt token"),
    }
    for name, (line, marker, label) in styles.items():
        axis.plot([], [], color="0.3", linestyle=line, marker=marker, markersize=4, label=label)
        for index, model in enumerate(models):
            rows = [row for row in model["prefill"] if row[name]]
            counts = [row["tokens"] if name == "seconds" else 1 for row in rows]
            _curve(
                axis,
                f"C{index}",
                (line, marker),
                [row["tokens"] for row in rows],
                [1000 * row[name] / count for row, count in zip(rows, counts, strict=True)],
            )
    _mark(axis, [row["tokens"] for model in models for row in model["prefill"]])
    axis.set_title("cost of a token against context")
    axis.set_xlabel("tokens read before, or in the prompt")
    axis.set_ylabel("ms per token")


def _mark(axis: Any, values: list[int]) -> None:
    """Label only the measured values on the logarithmic axis."""
    places = sorted(set(values))
    axis.set_xticks(places, [f"{place:,}" for place in places])
    axis.minorticks_off()


def main(argv: list[str] | None = None) -> int:
    return redraw("loadtest.engine", engine_png, argv)


if __name__ == "__main__":
    raise SystemExit(main())
