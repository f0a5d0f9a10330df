"""Measures one model: its limits, the runner, the whole engine, and the same model in PyTorch.

A figure that fails leaves a note in its row, and the rest goes on. The project's own figures come
before the peers', so that a run cut short by its budget has what matters most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from engine.models.language_model import LanguageModel
from engine.protocol.sampling_params import SamplingParams
from engine.runner.model_runner import ModelRunner
from loadtest.layers_timing import Budget
from loadtest.lm_driving import (
    GREEDY,
    PENALISED,
    REPORTED,
    SAMPLED,
    decoding,
    engine_seconds,
    random_prompt,
    read_prompt,
    round_steps,
)
from loadtest.lm_figures import Agreement, Decode, ModelFigures, Prefill
from loadtest.lm_limits import gemm_sequence
from loadtest.peers.decoder import Mode
from loadtest.peers.models import (
    PackagePeer,
    package_peer,
    plain_decoder,
    plain_prompt_reader,
)
from loadtest.report import median
from loadtest.timing import release_memory

PARTS = ("decode", "sampled", "penalised", "reported", "engine", "prefill", "gemm", "peer")
#: The gap that rounding explains, in deviations of a row's logits.
TOLERANCES = {"float32": 2e-3, "float16": 0.02, "bfloat16": 0.1, "int8": 0.3, "fp8": 1.0}
NO_TIME = "no time left"
_AGREEMENT_STEPS = 6
_SAMPLES_OF_STEPS = 3
_PEER_STEPS = 8  # between two waits of the host
_CONTEXT_STEPS = 16


@dataclass(frozen=True)
class Asked:
    """What to measure; one figure takes about `seconds`, if a few calls fit in it."""

    parts: Sequence[str]
    batches: Sequence[int]
    prompts: Sequence[int]
    seconds: float
    steps: int | None  # the most of a round
    peer: Mode


def typical(sample: Callable[[], float], seconds: float) -> float:
    """Return the median of what `sample` returns, after one call that does not count.

    There are at least three calls, but a call that takes longer than `seconds` is not repeated.
    """
    start = perf_counter()
    found = [sample()]
    if perf_counter() - start > seconds:
        return found[0]
    found.clear()
    end = perf_counter() + seconds
    while len(found) < 3 or (perf_counter() < end and len(found) < 50):
        found.append(sample())
    return median(found)


def reason(failure: Exception) -> str:
    """Return the reason of a failure as one short line."""
    first = (str(failure).strip() or "no message").splitlines()[0]
    return f"{type(failure).__name__}: {first}"[:100]


class _Rows:
    """Fills figures one by one until time is up; a failure becomes the row's note."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self._budget, self._device = budget, device

    def fill(self, row: Decode | Prefill, name: str, measure: Callable[[], float]) -> None:
        if self._budget.spent():
            row.notes[name] = NO_TIME
            return
        try:
            setattr(row, name, measure())
        except Exception as failure:  # a peer may raise anything, and costs only its own figure
            row.notes[name] = reason(failure)
        release_memory(self._device)


def fitting(batches: Iterable[int], figures: ModelFigures, vocab: int, free: int) -> list[int]:
    """Return the batches whose states, logits and sampling fit in half of `free` bytes.

    Larger ones would measure the allocator.
    """
    row = figures.work.state_bytes + 40 * vocab
    return [batch for batch in batches if batch * row <= free // 2]


def measure(
    figures: ModelFigures,
    runner: ModelRunner,
    model: LanguageModel,
    asked: Asked,
    budget: Budget,
    known: ModelFigures | None = None,
) -> None:
    """Fill the `figures` of a warm runner.

    `model` has the same weights, unquantised. `known` are figures of the same model with other
    weights, or without deterministic mode; its limits and peers are copied.
    """
    device = torch.device(runner.info.device)
    rows = _Rows(budget, device)
    figures.decode = [Decode(batch) for batch in asked.batches if batch <= runner.info.slots]
    figures.prefill = [Prefill(tokens) for tokens in asked.prompts]
    if "prefill" not in asked.parts:
        figures.prefill = []
    if not (set(PARTS) - {"prefill"}) & set(asked.parts):
        figures.decode = []
    for row in figures.decode:
        _runner_and_engine(rows, row, runner, asked)
    for prompt in figures.prefill:
        _prompt(rows, prompt, runner, asked)
    if known is not None:
        _take_over(figures, known)
    elif "gemm" in asked.parts:
        _bare_gemms(rows, figures, model, device, asked.seconds)
    if "peer" in asked.parts:
        try:
            figures.agreement = _agreement(figures, runner, model)
        except Exception as failure:  # as in a row
            figures.remarks.append(f"tokens not compared: {reason(failure)}")
        if known is None:
            _peers(rows, figures, model, asked, device)


def _runner_and_engine(rows: _Rows, row: Decode, runner: ModelRunner, asked: Asked) -> None:
    if {"decode", "engine"} & set(asked.parts):
        rows.fill(row, "greedy", lambda: _runner_step(runner, row, asked, GREEDY))
    if "sampled" in asked.parts:
        rows.fill(row, "sampled", lambda: _runner_step(runner, row, asked, SAMPLED))
    if "penalised" in asked.parts:
        rows.fill(row, "penalised", lambda: _runner_step(runner, row, asked, PENALISED))
    if "reported" in asked.parts:
        rows.fill(row, "reported", lambda: _runner_step(runner, row, asked, REPORTED))
    if "engine" in asked.parts:
        for name, step, sampling in (
            ("engine", row.greedy, GREEDY),
            ("reported_engine", row.reported, REPORTED),
        ):
            if step is not None:
                rows.fill(
                    row, name, functools.partial(_engine_step, runner, row, step, asked, sampling)
                )


def _runner_step(runner: ModelRunner, row: Decode, asked: Asked, sampling: SamplingParams) -> float:
    with decoding(runner, row.batch, sampling) as running:
        running.run(1)
        step = running.run(1)
        if step > asked.seconds:
            return step
        steps = round_steps(step, asked.steps)
        # By now everything is loaded. The least of several, for one may be a moment in which the
        # host had other work, and all rounds would have few steps.
        for _ in range(_SAMPLES_OF_STEPS):
            step = min(step, running.run(2, steps))
            steps = round_steps(step, asked.steps)
        rounds = max(1, min(50, int(asked.seconds / 10 / (step * steps))))
        row.steps = steps if row.steps == 1 else row.steps
        return typical(lambda: running.run(rounds, steps), asked.seconds)


def _engine_step(
    runner: ModelRunner, row: Decode, step: float, asked: Asked, sampling: SamplingParams
) -> float:
    """Return the seconds of a whole engine's step; `step` is the runner's."""
    # Where rounds overlap, sequences begin one after the other.
    least = 4 + (row.batch // 16 if runner.overlaps else 0)
    tokens = max(least, min(2048, int(asked.seconds / 3 / step)))
    return typical(lambda: engine_seconds(runner, row.batch, tokens, sampling), asked.seconds)


def _prompt(rows: _Rows, row: Prefill, runner: ModelRunner, asked: Asked) -> None:
    ids = random_prompt(row.tokens, runner.info.vocab_size)
    steps: list[float] = []

    def sample() -> float:
        seconds, decoded = read_prompt(runner, ids, decode=_CONTEXT_STEPS)
        steps.extend(decoded)
        return seconds

    rows.fill(row, "seconds", lambda: typical(sample, asked.seconds))
    if steps:
        row.next_step = median(steps)


def _bare_gemms(
    rows: _Rows, figures: ModelFigures, model: LanguageModel, device: torch.device, seconds: float
) -> None:
    for row in figures.decode:
        batch = row.batch
        rows.fill(
            row, "gemm", functools.partial(gemm_sequence, model, batch, batch, device, seconds)
        )

    @functools.cache
    def piece(tokens: int) -> float:
        return gemm_sequence(model, tokens, 1, device, seconds)

    def prompt_seconds(tokens: int) -> float:
        whole, rest = divmod(tokens, figures.step_tokens)
        return (whole * piece(figures.step_tokens) if whole else 0) + (piece(rest) if rest else 0)

    for prompt in figures.prefill:
        rows.fill(prompt, "gemm", functools.partial(prompt_seconds, prompt.tokens))


def _take_over(figures: ModelFigures, known: ModelFigures) -> None:
    figures.package = known.package
    for row in figures.decode:
        other = known.at_batch(row.batch)
        if other is not None:
            row.gemm, row.peer, row.package = other.gemm, other.peer, other.package
            row.default = other.greedy if figures.deterministic else None
    prompts = {row.tokens: row for row in known.prefill}
    for prompt in figures.prefill:
        same = prompts.get(prompt.tokens)
        if same is None:  # its model did not load
            continue
        prompt.gemm, prompt.peer, prompt.package = same.gemm, same.peer, same.package
        prompt.default = same.seconds if figures.deterministic else None


def _agreement(
    figures: ModelFigures, runner: ModelRunner, model: LanguageModel
) -> Agreement | None:
    """Decode greedily, and let the peer read the same tokens; None without a batch for it."""
    if not figures.decode:
        return None
    batch = min(16, max(row.batch for row in figures.decode))
    tolerance = TOLERANCES[figures.quantization or figures.dtype]
    peer = plain_decoder(model, batch, "eager")
    device = peer.tokens.device
    equal, worst = 0, 0.0
    with decoding(runner, batch, GREEDY) as ours:
        for _ in range(_AGREEMENT_STEPS):
            logits = peer.logits(torch.tensor(ours.tokens, device=device))  # [batch, vocab]
            ours.run(1)
            drawn = torch.tensor(ours.tokens, device=device).unsqueeze(1)
            gaps = (logits.amax(1) - logits.gather(1, drawn)[:, 0]) / logits.std(1)
            equal += int((gaps == 0).sum())
            worst = max(worst, float(gaps.max()))
    return Agreement(batch * _AGREEMENT_STEPS, equal, worst, tolerance)


def _peers(
    rows: _Rows, figures: ModelFigures, model: LanguageModel, asked: Asked, device: torch.device
) -> None:
    package = package_peer(model)
    figures.package = None if package is None else package.name
    for row in figures.decode:
        rows.fill(row, "peer", functools.partial(_peer_step, model, row.batch, asked))
        if package is not None and package.decodes:
            rows.fill(
                row, "package", functools.partial(_package_step, package, row.batch, asked, device)
            )
    for prompt in figures.prefill:
        ids = torch.tensor(random_prompt(prompt.tokens, model.config.vocab_size), device=device)
        rows.fill(prompt, "peer", functools.partial(_peer_prompt, model, ids, asked))
        if package is not None:
            rows.fill(prompt, "package", functools.partial(_package_prompt, package, ids, asked))


def _peer_step(model: LanguageModel, batch: int, asked: Asked) -> float:
    """Return the seconds of the peer's step; its tokens reach the host every few steps."""
    peer = plain_decoder(model, batch, asked.peer)

    def sample() -> float:
        start = perf_counter()
        for _ in range(_PEER_STEPS):
            peer.step()
        peer.tokens.tolist()
        return (perf_counter() - start) / _PEER_STEPS

    return typical(sample, asked.seconds)


def _peer_prompt(model: LanguageModel, ids: torch.Tensor, asked: Asked) -> float:
    read = plain_prompt_reader(model, len(ids), asked.peer)

    def sample() -> float:
        start = perf_counter()
        read(ids).argmax(-1).tolist()
        return perf_counter() - start

    return typical(sample, asked.seconds)


def _package_step(package: PackagePeer, batch: int, asked: Asked, device: torch.device) -> float:
    """Return the seconds of a step of the package; its tokens reach the host every few steps."""
    step = package.step(batch, device)

    def sample() -> float:
        start = perf_counter()
        for _ in range(_PEER_STEPS - 1):
            step()
        step().tolist()
        return (perf_counter() - start) / _PEER_STEPS

    return typical(sample, asked.seconds)


def _package_prompt(package: PackagePeer, ids: torch.Tensor, asked: Asked) -> float:
    def sample() -> float:
        start = perf_counter()
        package.prompt(ids).argmax(-1).tolist()
        return perf_counter() - start

    return typical(sample, asked.seconds)
