"""The bars of `loadtest.engine`: each is a row that passes or falls short.

GPU: tokens/s of the runner in bf16 with minGRU cells, but never more than 90 % of what the model's
bare GEMM sequence reaches in the same run; sampling, the whole engine and quantised weights against
the runner of the same run. CPU: shares of the measured read bandwidth, and multiples of PyTorch. A
deterministic model: a share of its default in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.lm_figures import Decode, ModelFigures, Prefill

#: (size, batch) -> tokens/s of greedy decoding.
GPU_DECODE = {
    ("1.3b", 1): 930,
    ("1.3b", 64): 56_000,
    ("1.3b", 256): 170_000,
    ("1.3b", 1024): 220_000,
    ("113m", 1): 8_300,
    ("113m", 64): 250_000,
    ("113m", 256): 800_000,
    ("113m", 1024): 1_800_000,
    ("6.3m", 1): 50_000,
    ("6.3m", 64): 1_500_000,
}
GPU_PREFILL_13B = 156_000  # tokens/s
GPU_PREFILL_113M = 0.5  # of the GEMM rate
#: Shorter prompts are no measure of prefill on a GPU: they do not fill it.
GPU_PREFILL_TOKENS = 16_384
OF_BARE_GEMM = 0.9
ENGINE_OF_RUNNER = {"1.3b": 0.9, "113m": 0.8}
ENGINE_BATCH = 1024
SAMPLING_COST = {"1.3b": 1.05}
SAMPLING_COST_ELSEWHERE = 1.15
HGRN_OF_MINGRU = 0.85  # share of the limit at a batch, of our minGRU's of as many weights
HGRN_PREFILL_OF_LIMIT = 0.6
HGRN_PREFILL_TIMES_FLA = 1.5
HGRN_PEERS = {"hgrn-1.3b": "1.3b"}
#: size -> batch -> share of the limit of greedy decoding.
_LARGE_MAMBA = {1: 0.7, 16: 0.6, 64: 0.6, 256: 0.6}
MAMBA_OF_LIMIT = {
    "mamba-130m": {1: 0.4, 16: 0.35, 64: 0.45, 256: 0.45},
    "mamba-1.4b": _LARGE_MAMBA,
    "mamba-2.8b": _LARGE_MAMBA,
    "mamba2-1.3b": _LARGE_MAMBA,
}
MAMBA_PREFILL_OF_LIMIT = 0.6
QUANTISED_13B = 1.6  # times bf16 at batch 1

DETERMINISTIC = 0.9  # of the default

CPU_READ = {None: 0.85, "int8": 0.75}  # 113m at batch 1
CPU_TIMES_PEER = {("113m", 16): 1.3, ("113m", 64): 1.3, ("6.3m", 1): 3.2}
CPU_PREFILL_TIMES_PEER = 1.5
CPU_PREFILL_OF_GEMM = 0.6
CPU_PREFILL_TOKENS = 1024


@dataclass(frozen=True)
class Check:
    """A bar and the figure to compare with it.

    `unit` is "tokens/s", "times" or "share". More is better, except with `at_most`.
    """

    model: str
    what: str
    measured: float
    bar: float
    unit: str
    at_most: bool = False
    note: str = ""

    @property
    def passes(self) -> bool:
        return self.measured <= self.bar if self.at_most else self.measured >= self.bar

    @property
    def result(self) -> str:
        return "pass" if self.passes else "short"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "result": self.result}


def checks(models: Sequence[ModelFigures]) -> list[Check]:
    """Return every bar that applies to a measured figure."""
    found: list[Check] = []
    for figures in models:
        if figures.agreement is not None:
            gap = figures.agreement
            what = f"same tokens as the peer ({gap.equal} of {gap.compared}): gap in deviations"
            found.append(
                Check(figures.label, what, gap.worst_gap, gap.tolerance, "times", at_most=True)
            )
        if figures.deterministic:
            found += _of_default(figures)
            continue
        found += _gpu(figures, models) if figures.device == "cuda" else _cpu(figures)
    return found


def _of_default(figures: ModelFigures) -> Iterator[Check]:
    for row in figures.decode:
        if row.greedy and row.default:
            what, share = f"of the default, batch {row.batch}", row.default / row.greedy
            yield Check(figures.label, what, share, DETERMINISTIC, "share")
    for prompt in figures.prefill:
        if prompt.seconds and prompt.default:
            what = f"of the default, prefill of {prompt.tokens:,}"
            share = prompt.default / prompt.seconds
            yield Check(figures.label, what, share, DETERMINISTIC, "share")


def _gpu(figures: ModelFigures, models: Sequence[ModelFigures]) -> Iterator[Check]:
    plain = figures.dtype == "bfloat16" and figures.quantization is None
    for row in figures.decode:
        if plain and figures.cell == "mingru" and row.greedy:
            yield from _decode_rate(figures, row)
        yield from _overheads(figures, row)
    if plain and figures.cell == "mingru":
        for prompt in figures.prefill:
            yield from _gpu_prefill(figures, prompt)
    if plain and figures.size in HGRN_PEERS:
        yield from _hgrn(figures, models)
    if plain and figures.size in MAMBA_OF_LIMIT:
        yield from _mamba(figures)
    if figures.size == "1.3b" and figures.quantization is not None:
        yield from _times_unquantised(figures, models)


def _hgrn(figures: ModelFigures, models: Sequence[ModelFigures]) -> Iterator[Check]:
    beside = HGRN_PEERS[figures.size or ""]
    for other in models:
        if (other.size, other.cell, other.dtype) != (beside, "mingru", "bfloat16"):
            continue
        if other.quantization is not None or other.deterministic:
            continue
        for row in figures.decode:
            its = other.at_batch(row.batch)
            if row.greedy and its is not None and its.greedy:
                ours = figures.decode_limit(row.batch) / row.greedy
                share = ours / (other.decode_limit(row.batch) / its.greedy)
                what = f"share of the limit over {beside} minGRU's, batch {row.batch}"
                yield Check(figures.label, what, share, HGRN_OF_MINGRU, "share")
    for prompt in figures.prefill:
        if not prompt.seconds or prompt.tokens < GPU_PREFILL_TOKENS:
            continue
        what = f"prefill of {prompt.tokens:,}"
        share = figures.prefill_limit(prompt.tokens) / prompt.seconds
        yield Check(figures.label, f"{what}, of the limit", share, HGRN_PREFILL_OF_LIMIT, "share")
        if prompt.package:
            times = prompt.package / prompt.seconds
            yield Check(figures.label, f"{what}, times fla", times, HGRN_PREFILL_TIMES_FLA, "times")


def _mamba(figures: ModelFigures) -> Iterator[Check]:
    for row in figures.decode:
        bar = MAMBA_OF_LIMIT[figures.size or ""].get(row.batch)
        if row.greedy and bar is not None:
            what, share = f"of the limit, batch {row.batch}", figures.decode_limit(row.batch)
            yield Check(figures.label, what, share / row.greedy, bar, "share")
    for prompt in figures.prefill:
        if prompt.seconds and prompt.tokens >= GPU_PREFILL_TOKENS:
            what = f"prefill of {prompt.tokens:,}, of the limit"
            share = figures.prefill_limit(prompt.tokens) / prompt.seconds
            yield Check(figures.label, what, share, MAMBA_PREFILL_OF_LIMIT, "share")


def _decode_rate(figures: ModelFigures, row: Decode) -> Iterator[Check]:
    aim = GPU_DECODE.get((figures.size or "", row.batch))
    if aim is None or not row.greedy:
        return
    bar, note = _capped(aim, row.batch / row.gemm if row.gemm else None)
    what = f"decode, batch {row.batch}"
    yield Check(figures.label, what, row.batch / row.greedy, bar, "tokens/s", note=note)


def _capped(bar: float, bare: float | None) -> tuple[float, str]:
    """Return the bar, or 90 % of the bare GEMM sequence's tokens/s if that is less."""
    if bare is None:
        return bar, "bare GEMMs not measured"
    if bar <= OF_BARE_GEMM * bare:
        return bar, ""
    return OF_BARE_GEMM * bare, f"90 % of the bare GEMMs; the aim is {bar:,.0f}"


def _overheads(figures: ModelFigures, row: Decode) -> Iterator[Check]:
    if not row.greedy:
        return
    if row.sampled:
        most = SAMPLING_COST.get(figures.size or "", SAMPLING_COST_ELSEWHERE)
        what = f"sampled over greedy, batch {row.batch}"
        yield Check(figures.label, what, row.sampled / row.greedy, most, "times", at_most=True)
    least = ENGINE_OF_RUNNER.get(figures.size or "")
    if row.engine and least and row.batch <= ENGINE_BATCH:
        what = f"engine of runner, batch {row.batch}"
        yield Check(figures.label, what, row.greedy / row.engine, least, "share")


def _gpu_prefill(figures: ModelFigures, row: Prefill) -> Iterator[Check]:
    if not row.seconds or row.tokens < GPU_PREFILL_TOKENS:
        return
    what = f"prefill of {row.tokens:,}"
    if figures.size == "1.3b":
        bar, note = _capped(GPU_PREFILL_13B, row.tokens / row.gemm if row.gemm else None)
        yield Check(figures.label, what, row.tokens / row.seconds, bar, "tokens/s", note=note)
    elif figures.size == "113m" and figures.gemm_rate:
        share = figures.prefill_flops(row.tokens) / row.seconds / figures.gemm_rate
        yield Check(figures.label, f"{what}, of the GEMM rate", share, GPU_PREFILL_113M, "share")


def _times_unquantised(figures: ModelFigures, models: Sequence[ModelFigures]) -> Iterator[Check]:
    for other in models:
        same = (other.name, other.cell, other.dtype) == (figures.name, figures.cell, figures.dtype)
        ours, plain = figures.at_batch(1), other.at_batch(1)
        unlike = other.quantization is not None or other.deterministic or not same
        if unlike or ours is None or plain is None:
            continue
        if other.dtype == "bfloat16" and ours.greedy and plain.greedy:
            times = plain.greedy / ours.greedy
            yield Check(figures.label, "batch 1, times bf16", times, QUANTISED_13B, "times")


def _cpu(figures: ModelFigures) -> Iterator[Check]:
    if figures.cell != "mingru" or figures.size is None:
        return
    for row in figures.decode:
        if not row.greedy:
            continue
        read = CPU_READ.get(figures.quantization)
        counts = figures.dtype == "bfloat16" or figures.quantization is not None
        if figures.size == "113m" and row.batch == 1 and read is not None and counts:
            share = figures.work.weight_bytes / row.greedy / figures.read_rate
            yield Check(figures.label, "batch 1, of read bandwidth", share, read, "share")
        least = CPU_TIMES_PEER.get((figures.size, row.batch))
        if least and row.peer and figures.quantization is None:
            what = f"times PyTorch, batch {row.batch}"
            yield Check(figures.label, what, row.peer / row.greedy, least, "times")
    if figures.size == "113m" and figures.dtype == "bfloat16" and figures.quantization is None:
        for prompt in figures.prefill:
            yield from _cpu_prefill(figures, prompt)


def _cpu_prefill(figures: ModelFigures, row: Prefill) -> Iterator[Check]:
    if not row.seconds or row.tokens < CPU_PREFILL_TOKENS:
        return
    what = f"prefill of {row.tokens:,}"
    if row.peer:
        times = row.peer / row.seconds
        yield Check(figures.label, f"{what}, times PyTorch", times, CPU_PREFILL_TIMES_PEER, "times")
    if figures.gemm_rate:
        share = figures.prefill_flops(row.tokens) / row.seconds / figures.gemm_rate
        yield Check(figures.label, f"{what}, of the GEMM rate", share, CPU_PREFILL_OF_GEMM, "share")
