"""A runner without a model, for tests of everything around it.

`FakeRunner` carries plans out on rows which hold the very tokens they have read, and checks at
every step that a sequence's row is its prompt and answer so far: a scheduler that mixes up slots,
skips a token or forks the wrong prefix makes `run` raise AssertionError.

Its language model is a bigram table (`log_probabilities`). After token t
    1/2   `successor(t)`: t + 1 modulo the vocabulary, but end-of-text after b"z"
    1/4   t + 2 modulo the vocabulary
    1/4   all other tokens in equal parts
so that greedy decoding recites the alphabet: b"abc" continues as b"defghijklmnopqrstuvwxyz" and
then stops.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from array import array
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from engine.config import SHARE_SLOTS, SLOTS, EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, DeviceLost
from engine.protocol.events import ModelInfo
from engine.protocol.logprobs import PackedLogprobs, TokenLogprobs, words_of_report
from engine.protocol.requests import Request
from engine.protocol.sampling_params import is_adjusted, is_greedy, is_plain, stop_ids, top_of
from engine.protocol.token_ids import unpack_ids
from engine.state_spec import StateSpec
from engine.step_plan import (
    INITIAL,
    Copy,
    Drawn,
    Load,
    Sampled,
    Scored,
    StepPlan,
    StepResult,
)
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.matchers import GrammarMatchers
from tests.reports import log32, packed


def successor(token: int, vocab_size: int = 257, eos: int | None = 256) -> int:
    """The most likely next token."""
    if token == ord("z") and eos is not None:
        return eos
    return (token + 1) % vocab_size


@lru_cache(maxsize=4096)
def log_probabilities(
    token: int, vocab_size: int = 257, eos: int | None = 256
) -> tuple[float, ...]:
    """The natural log-probability of every next token; `vocab_size` is at least 4."""
    row = [log32(0.25 / (vocab_size - 2))] * vocab_size
    row[(token + 2) % vocab_size] = log32(0.25)
    row[successor(token, vocab_size, eos)] = log32(0.5)
    return tuple(row)


def recite(prompt: bytes | list[int], count: int, vocab_size: int = 257) -> list[int]:
    """The first `count` tokens of the greedy answer when end-of-text cannot stop it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(successor(tokens[-1], vocab_size, None))
    return tokens[-count:] if count else []


class FakeClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class FakeRow:
    """What a device keeps of one decoding sequence; `slot` is negative once the row has ended."""

    key: int
    slot: int
    token: int
    position: int
    left: int
    stop_ids: frozenset[int]


class FakeRunner:
    """Runs plans as engine.runner.model_runner.ModelRunner does, on lists of tokens.

    Of SamplingParams it follows temperature, top_k, logit_bias, min_tokens, stop_token_ids,
    ignore_eos, seed, choice, logprobs and, where `folder` holds a tokenizer.json, grammar; the
    other parameters change nothing.
    `failures` holds exceptions that the next rounds end with, first one first, and
    `start_failures` those that the next ones begin with; `step_seconds` makes every round take that
    long. The requests whose ids are in `spoiled` are reported to have logits that are not finite.

    With `most_steps` above 1 it takes plain plans: it keeps their rows and knows of later tokens
    only what it drew itself, as a device does. With `overlaps` a round may be started before the
    one before it is finished. What a round does to the rows happens when it is started, in the
    order in which a device would do it.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        eos: int | None = 256,
        more_eos: tuple[int, ...] = (),
        slots: int = 8,
        share_slots: int = 4,
        max_step_tokens: int = 256,
        max_waiting: int = 64,
        max_waiting_tokens: int = 2**26,
        step_seconds: float = 0.0,
        failures: list[Exception] | None = None,
        most_steps: int = 1,
        overlaps: bool = False,
        folder: Path | None = None,
        host_rows: int = 0,
        **config: Any,
    ) -> None:
        state_bytes, d_model = 1024, 16
        self.config = EngineConfig(
            model="fake",
            device="cpu",
            dtype="float32",
            max_slots=slots,
            share_slots=share_slots,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            host_state_bytes=host_rows * (state_bytes + 4 * d_model),
            threads=1,
            **config,
        )
        self.info = ModelInfo(
            name="fake",
            folder="" if folder is None else str(folder),
            fingerprint="fake",
            family="minrnn",
            cell="mingru",
            vocab_size=vocab_size,
            eos_token_ids=(() if eos is None else (eos,)) + more_eos,
            parameters=0,
            d_model=d_model,
            state_bytes=state_bytes,
            slots=slots,
            device="cpu",
            device_name="fake",
            dtype="float32",
            state=(StateSpec("cell", 1, (state_bytes // 4,)),),
        )
        self.grammars = GrammarCache(folder, vocab_size)
        self.constraints = GrammarMatchers(self.grammars, self.info.eos_token_ids)
        self.step_seconds = step_seconds
        self.failures = failures if failures is not None else []
        self.start_failures: list[Exception] = []
        self.decode_seconds = 1e-6  # of a step, as the engine is told
        self.most_steps = most_steps
        self.overlaps = overlaps
        self.spoiled: set[int] = set()
        self.steps = 0  # rounds that were begun
        self.begun: list[StepResult | Exception] = []  # and are not finished
        self.batch: list[FakeRow] = []  # of the latest plain plan
        self._latest = StepPlan()
        # What has been read to the state at each place, and at those with a hidden state, of which
        # text.
        self.rows: dict[int, list[int]] = {}
        self.hidden: dict[int, list[int]] = {}
        self.outside: dict[bytes, list[int]] = {}  # exported states, by their bytes
        self.texts: dict[int, list[int]] = {}  # by key: what is to be read, the state's text too
        self.requests: dict[int, Request] = {}  # by key
        self.admitted: list[Request] = []  # all that ever were, in order
        self.answers: dict[int, list[int]] = {}  # by key: the tokens drawn so far

    def warm_up(self) -> None:
        """Nothing to compile."""

    def run(self, plan: StepPlan) -> StepResult:
        return self.finish(self.start(plan))

    def start(self, plan: StepPlan) -> StepResult | Exception:
        self.steps += 1
        if self.start_failures:
            raise self.start_failures.pop(0)
        assert len(self.begun) <= self.overlaps, "too many rounds are under way"
        if self.begun:
            assert not (self._latest.apart and plan.apart), "the host cannot know what to draw"
            assert plan.again or not (self._latest.plain and plan.plain), "two batches"
        self._latest = plan
        result = self._carry_out(plan)
        self.begun.append(self.failures.pop(0) if self.failures else result)
        return self.begun[-1]

    def is_done(self, pending: StepResult | Exception) -> bool:
        return True

    def finish(self, pending: StepResult | Exception) -> StepResult:
        oldest = self.begun.pop(0)
        assert pending is oldest, "rounds are finished in their order"
        if isinstance(pending, Exception):
            raise pending
        return pending

    def _carry_out(self, plan: StepPlan) -> StepResult:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        for key in plan.release:
            self.requests.pop(key, None)
            self.answers.pop(key, None)
            self.texts.pop(key, None)
        self.constraints.release(plan.release)
        for move in plan.before:
            self._move(move)
        for admission in plan.admit:
            prefix = [] if admission.source is None else self._row(admission.source)
            assert len(prefix) == admission.before + admission.cached_tokens
            text = unpack_ids(admission.text or admission.request.prompt)
            self.texts[admission.key] = [*prefix[: admission.before], *text]
            self.rows[admission.slot] = list(prefix)
            assert admission.key not in self.requests
            self.requests[admission.key] = admission.request
            self.admitted.append(admission.request)
            self.constraints.admit(admission.key, admission.request.sampling)
            self.answers[admission.key] = []
        if plan.plain:
            self._change(plan)
        beginning = {row.key for row in plan.decode if row.token < 0}
        slots = [chunk.slot for chunk in plan.prefill if chunk.key not in beginning]
        if plan.plain:  # rows that have ended leave their slots to others
            slots += [row.slot for row in self.batch if row.slot >= 0]
        else:
            slots += [row.slot for row in plan.decode]
        slots += [row.slot for row in plan.decode if row.token < 0]
        assert len(slots) == len(set(slots)), "a slot is used twice in one step"
        seconds = self.decode_seconds * plan.steps
        result = StepResult(prefill_seconds=1e-6, decode_seconds=seconds)
        for chunk in plan.prefill:
            row, text = self._row(chunk.slot), self.texts[chunk.key]
            assert (len(chunk.tokens) > 0) == (chunk.source is None)
            row.extend(chunk.tokens)
            assert row == text[: len(row)]
            if chunk.source is not None:
                assert self.hidden[chunk.source] == row == text and chunk.sample
            if chunk.targets is not None:
                scored = self._score(chunk.start, chunk.tokens, chunk.targets, chunk.score_top)
                if scored is not None:
                    result.scored.append(Scored(chunk.key, *scored))
            if chunk.sample:
                assert len(row) == len(text)
                result.sampled.append(self._draw(chunk.key, 0))
        assert len({copy.target for copy in plan.after}) == len(plan.after)
        for copy in plan.after:
            self._move(copy)
            if copy.key >= 0:
                assert self.rows[copy.target] == self.texts[copy.key]
                self.hidden[copy.target] = self.texts[copy.key]
        if plan.plain:
            self._join(plan)
            self._decode(plan, result)
        for decode in [] if plan.plain else plan.decode:
            row = self._row(decode.slot)
            row.append(decode.token)
            expected = [*self.texts[decode.key], *self.answers[decode.key]]
            assert row == expected, f"row {decode.slot} holds {row}, not {expected}"
            assert decode.position == len(self.answers[decode.key])
            result.sampled.append(self._draw(decode.key, decode.position))
        for export in plan.exports:
            row = self._row(export.source)
            width = self.info.state_bytes // 4
            if export.hidden:
                assert self.hidden[export.source] == row
                width += self.info.d_model
            state = np.full(width, len(self.outside), np.float32).tobytes()
            for known, read in self.outside.items():
                if read == row and len(known) == len(state):
                    state = known  # the same state has the same bytes
            self.outside[state] = list(row)
            result.exports[export.ticket] = state
        keys = {sampled.key for sampled in result.sampled}
        result.rejected = self.constraints.rejected()
        result.non_finite += [key for key in keys if self.requests[key].id in self.spoiled]
        return result

    def _move(self, move: Copy | Load) -> None:
        if isinstance(move, Load):
            row = self.outside[move.state]
        else:
            row = [] if move.source == INITIAL else self._row(move.source)
        self.rows[move.target] = list(row)
        self.hidden.pop(move.target, None)
        if isinstance(move, Load) and len(move.state) > self.info.state_bytes:
            self.hidden[move.target] = list(row)
        if isinstance(move, Copy) and move.source in self.hidden:
            self.hidden[move.target] = self.hidden[move.source]

    def _change(self, plan: StepPlan) -> None:
        """Ends rows of the batch, and makes room for those that join it."""
        if not plan.again:
            assert plan.leave == [] and plan.at == list(range(len(plan.decode)))
            self.batch = []
        for row in plan.leave:
            self.batch[row].slot = -1
        assert len(plan.at) == len(plan.decode) == len(set(plan.at))
        more = max([0, *(row + 1 - len(self.batch) for row in plan.at)])
        self.batch += [FakeRow(-1, -1, 0, 0, 0, frozenset()) for _ in range(more)]
        assert all(self.batch[row].slot < 0 for row in plan.at), "a row is taken from another"

    def _join(self, plan: StepPlan) -> None:
        for at, row in zip(plan.at, plan.decode, strict=True):
            self.batch[at] = self._upload(row.key, row.slot, row.token, row.position)

    def _decode(self, plan: StepPlan, result: StepResult) -> None:
        """As the device does it."""
        assert 1 <= plan.steps <= self.most_steps and self.most_steps > 1
        drawing = [self.requests[row.key].sampling for row in self.batch if row.slot >= 0]
        assert not plan.greedy or all(is_greedy(params) for params in drawing)
        assert plan.adjusted or not any(is_adjusted(params) for params in drawing)
        assert plan.top >= max((top_of(params) for params in drawing), default=-1)
        tokens, counts = array("i"), []
        words = words_of_report(max(0, plan.top))
        reports = np.full((len(self.batch), plan.steps, words), -7, np.int32)
        for index, device_row in enumerate(self.batch):
            drawn: list[int] = []
            while device_row.slot >= 0 and len(drawn) < plan.steps:
                token, report = self._move_on(device_row)
                if report is not None:
                    mine = np.frombuffer(report.packed, np.int32)
                    reports[index, len(drawn), : len(mine)] = mine
                drawn.append(token)
                if drawn[-1] < 0:
                    result.non_finite.append(device_row.key)
            counts.append(len(drawn))
            tokens.extend([*drawn, *[-7] * (plan.steps - len(drawn))])
        ended = {i: counts[i] for i, row in enumerate(self.batch) if row.slot < 0}
        result.drawn = Drawn(tokens.tobytes(), ended, None if plan.top < 0 else reports)

    def _upload(self, key: int, slot: int, token: int, position: int) -> FakeRow:
        request = self.requests[key]
        params = request.sampling
        assert is_plain(params, self.info.eos_token_ids)
        assert position == len(self.answers[key])
        stops = stop_ids(params, self.info.eos_token_ids)
        if token < 0:
            assert position == 1
            token = self.answers[key][-1]
            ended = token in stops or params.max_tokens == 1 or request.id in self.spoiled
            slot = -1 if ended else slot
        elif position:
            assert token == self.answers[key][-1]
        return FakeRow(key, slot, token, position, params.max_tokens - position, stops)

    def _move_on(self, device_row: FakeRow) -> tuple[int, PackedLogprobs | None]:
        """Reads one token and draws the next, with a report if its request asked for one."""
        key = device_row.key
        row = self._row(device_row.slot)
        row.append(device_row.token)
        expected = [*self.texts[key], *self.answers[key]]
        assert row == expected, f"row {device_row.slot} holds {row}, not {expected}"
        token, report = -1, None
        if self.requests[key].id not in self.spoiled:
            sampled = self._draw(key, device_row.position)
            token = device_row.token = sampled.token
            report = sampled.report
        device_row.position += 1
        device_row.left -= 1
        if token < 0 or token in device_row.stop_ids or device_row.left == 0:
            device_row.slot = -1
        return token, report

    def _row(self, slot: int) -> list[int]:
        assert slot in self.rows, f"nothing was ever put at place {slot}"
        return self.rows[slot]

    def _log_probabilities(self, token: int) -> tuple[float, ...]:
        return log_probabilities(token, self.info.vocab_size, self.info.eos_token_id)

    def _report(self, row: tuple[float, ...], token: int, top: int) -> TokenLogprobs:
        best = sorted(range(len(row)), key=lambda other: (-row[other], other))
        return TokenLogprobs(
            logprob=row[token],
            top_ids=best[:top],
            top_logprobs=[row[other] for other in best[:top]],
            is_greedy=token == best[0],
        )

    def _score(
        self, start: int, tokens: array[int], targets: array[int], top: int
    ) -> tuple[int, PackedLogprobs] | None:
        assert len(targets) == len(tokens)
        wanted = [i for i, target in enumerate(targets) if target >= 0]
        if not wanted:
            return None
        assert wanted == list(range(wanted[0], wanted[-1] + 1)), "scored tokens have gaps"
        reports = [
            self._report(self._log_probabilities(tokens[i]), targets[i], top) for i in wanted
        ]
        return start + wanted[0] + 1, packed(reports, top)

    def _draw(self, key: int, position: int) -> Sampled:
        request, answer = self.requests[key], self.answers[key]
        params = request.sampling
        last = answer[-1] if answer else self.texts[key][-1]
        row = self._log_probabilities(last)
        logits = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(row)]
        constrained = bool(self.constraints.rows([key]))
        if constrained:
            mask = np.zeros((1, self.constraints.words), np.int32)
            self.constraints.fill([key], [position], mask)
            allowed = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
            logits = [value if allowed[token] else -math.inf for token, value in enumerate(logits)]
        if position < params.min_tokens and not constrained:
            for token in stop_ids(params, self.info.eos_token_ids):
                logits[token] = -math.inf
        order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
        if is_greedy(params):
            token = order[0]
        else:
            kept = order[: params.top_k or None]
            weights = [math.exp(logits[token] / params.temperature) for token in kept]
            generator = random.Random(f"{params.seed} {params.choice} {position}")
            token = generator.choices(kept, weights)[0]
        answer.append(token)
        report = None
        if params.logprobs is not None:
            best = self._report(row, token, params.logprobs)
            report = packed([best], params.logprobs)
        complete = constrained and self.constraints.take(key, token)
        return Sampled(key, token, report, complete)


def _runner(config: EngineConfig, **options: Any) -> FakeRunner:
    return FakeRunner(
        slots=config.max_slots or SLOTS,
        share_slots=SHARE_SLOTS if config.share_slots is None else config.share_slots,
        max_step_tokens=config.max_step_tokens or 256,
        max_waiting=config.max_waiting,
        engines=config.engines,
        rank=config.rank,
        **options,
    )


# For `engine.worker --engine tests.engine.fake:...`.


def fake_engine(config: EngineConfig) -> Engine:
    """A sound engine."""
    return Engine(_runner(config))


def slow_engine(config: EngineConfig) -> Engine:
    """An engine whose every step takes 10 ms."""
    return Engine(_runner(config, step_seconds=0.01))


def cuda_error_engine(config: EngineConfig) -> Engine:
    """An engine whose first step loses the device."""
    return Engine(_runner(config, failures=[DeviceLost("CUDA error: device-side assert")]))


def folder_engine(config: EngineConfig) -> Engine:
    """An engine whose model folder tells what befalls it: with a file `broken` it cannot be loaded,
    with `slow` that takes as many seconds as stand there, less if it is removed meanwhile, and with
    `fatal` every step ends in a CUDA error. A step takes 2 ms."""
    folder = Path(config.model)
    slow, broken = folder / "slow", folder / "broken"
    with suppress(FileNotFoundError):
        end = time.monotonic() + float(slow.read_text())
        while slow.exists() and time.monotonic() < end:
            time.sleep(0.01)
    if broken.exists() or not folder.is_dir():
        raise CheckpointError(f"{folder.name}: the checkpoint cannot be used")
    runner = _runner(config, step_seconds=0.002, folder=folder)
    runner.info = structs.replace(runner.info, name=folder.name)

    def start(plan: StepPlan) -> Any:
        if (folder / "fatal").exists():
            raise DeviceLost("CUDA error: device-side assert")
        return FakeRunner.start(runner, plan)

    runner.start = start  # type: ignore[method-assign]
    return Engine(runner)


def stuck_engine(config: EngineConfig) -> Engine:
    """An engine whose model takes a minute to load."""
    time.sleep(60)
    return Engine(_runner(config))


def missing_engine(config: EngineConfig) -> Engine:
    """An engine whose checkpoint is not there."""
    raise CheckpointError(f"{config.model}: no such folder")


def crashing_engine(config: EngineConfig) -> Engine:
    """An engine with an unforeseen failure while it loads."""
    raise KeyError("weights")
