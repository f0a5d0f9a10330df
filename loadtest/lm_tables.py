"""The tables of `loadtest.engine` on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loadtest.lm_bars import Check
from loadtest.lm_figures import Decode, ModelFigures, Prefill
from loadtest.report import print_table


def print_model(figures: ModelFigures) -> None:
    """Print the figures of one model."""
    work = figures.work
    read = 1000 * work.weight_bytes / figures.read_rate
    gemm = "" if figures.gemm_rate is None else f"; GEMM {figures.gemm_rate / 1e12:,.2f} TFLOP/s"
    print(
        f"\n{figures.label}: {work.parameters:,} weights, {work.weight_bytes / 1e6:,.1f} MB read "
        f"per step in at least {read:.4f} ms; {work.state_bytes:,} bytes of state a "
        f"sequence{gemm}"
    )
    if figures.decode:
        print_decode(figures)
    if figures.prefill:
        print_prefill(figures)
    if figures.agreement is not None:
        same = figures.agreement
        print(
            f"greedy tokens: {same.equal} of {same.compared} are the peer's best too, the others' "
            f"logits at most {same.worst_gap:.1e} deviations below it (allowed "
            f"{same.tolerance:g}): {'the same model' if same.ok else 'NOT THE SAME MODEL'}"
        )
    for remark in figures.remarks:
        print(remark)


def print_decode(figures: ModelFigures) -> None:
    """Print tokens/s and their ratios by batch."""
    rows = figures.decode
    print_columns(
        f"{figures.label}: decode",
        {
            "batch": [str(row.batch) for row in rows],
            "steps a round": [str(row.steps) for row in rows],
            "ms/step": [_number(row.greedy, ".4f", 1000) for row in rows],
            "tokens/s": [_per_second(row.batch, row.greedy) for row in rows],
            "default, tokens/s": [_per_second(row.batch, row.default) for row in rows],
            "of default": [_share(row.default, row.greedy) for row in rows],
            "of limit": [_share(figures.decode_limit(row.batch), row.greedy) for row in rows],
            "bare GEMMs, tokens/s": [_per_second(row.batch, row.gemm) for row in rows],
            "of them": [_share(row.gemm, row.greedy) for row in rows],
            "sampled, ms": [_number(row.sampled, ".4f", 1000) for row in rows],
            "over greedy": [_times(row.sampled, row.greedy) for row in rows],
            "with penalties, ms": [_number(row.penalised, ".4f", 1000) for row in rows],
            "penalties over sampled": [_times(row.penalised, row.sampled) for row in rows],
            "with log-probabilities, ms": [_number(row.reported, ".4f", 1000) for row in rows],
            "these over sampled": [_times(row.reported, row.sampled) for row in rows],
            "engine with them, tokens/s": [
                _per_second(row.batch, row.reported_engine) for row in rows
            ],
            "engine, tokens/s": [_per_second(row.batch, row.engine) for row in rows],
            "of runner": [_share(row.greedy, row.engine) for row in rows],
            "PyTorch, tokens/s": [_per_second(row.batch, row.peer) for row in rows],
            "times PyTorch": [_times(row.peer, row.greedy) for row in rows],
            f"{figures.package}, tokens/s": [_per_second(row.batch, row.package) for row in rows],
            "remarks": [_remarks(row) for row in rows],
        },
    )


def print_prefill(figures: ModelFigures) -> None:
    """Print the time of one prompt by its length, and of a token after it."""
    rows = figures.prefill
    print_columns(
        f"{figures.label}: prefill of one prompt",
        {
            "tokens": [f"{row.tokens:,}" for row in rows],
            "ms": [_number(row.seconds, ",.2f", 1000) for row in rows],
            "tokens/s": [_per_second(row.tokens, row.seconds) for row in rows],
            "default, tokens/s": [_per_second(row.tokens, row.default) for row in rows],
            "of default": [_share(row.default, row.seconds) for row in rows],
            "of limit": [_share(figures.prefill_limit(row.tokens), row.seconds) for row in rows],
            "bare GEMMs, tokens/s": [_per_second(row.tokens, row.gemm) for row in rows],
            "of them": [_share(row.gemm, row.seconds) for row in rows],
            "PyTorch, tokens/s": [_per_second(row.tokens, row.peer) for row in rows],
            "times PyTorch": [_times(row.peer, row.seconds) for row in rows],
            f"{figures.package}, tokens/s": [_per_second(row.tokens, row.package) for row in rows],
            "a decode step after it, ms": [_number(row.next_step, ".4f", 1000) for row in rows],
            "remarks": [_remarks(row) for row in rows],
        },
    )


def print_checks(checks: Sequence[Check]) -> None:
    """Print every bar that applies, with its result."""
    print_columns(
        "bars",
        {
            "model": [check.model for check in checks],
            "what": [check.what for check in checks],
            "measured": [_value(check, check.measured) for check in checks],
            "bar": [_value(check, check.bar) for check in checks],
            "result": [check.result for check in checks],
            "remarks": [check.note for check in checks],
        },
    )


def print_columns(title: str, columns: dict[str, list[str]]) -> None:
    """Print a table of the columns for which any row has a value."""
    filled = {name: cells for name, cells in columns.items() if any(cells)}
    print_table(title, list(filled), list(zip(*filled.values(), strict=True)))


def _value(check: Check, value: float) -> str:
    if check.unit == "tokens/s":
        return f"{value:,.0f}"
    return f"{value:.1%}" if check.unit == "share" else f"{value:.3g}"


def _number(value: float | None, form: str, scale: float) -> str:
    return "" if value is None else format(value * scale, form)


def _per_second(count: int, seconds: float | None) -> str:
    return f"{count / seconds:,.0f}" if seconds else ""


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.0%}" if part and whole else ""


def _times(value: float | None, unit: float | None) -> str:
    return f"{value / unit:.2f}" if value and unit else ""


def _remarks(row: Decode | Prefill) -> str:
    """Return each reason once, with the figures that are missing because of it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in row.notes.items():
        reasons.setdefault(reason, []).append(name)
    return "; ".join(_joined(names, reason) for reason, names in reasons.items())


def _joined(names: Iterable[str], reason: str) -> str:
    return f"{', '.join(names)}: {reason}"
