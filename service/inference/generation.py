"""Generation: runs prompts on the engine and gathers or streams their texts.

All generating endpoints use it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from engine.client.request_stream import Update
from engine.errors import EngineError
from engine.protocol.sampling_params import SamplingParams
from service.http.json_response import TOKENS_AT_ONCE
from service.inference.event_template import Template
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.states import NO_STATES, StateUse
from service.inference.output_text import EndRule, OutputText, Piece, Whole
from service.inference.prefix_plan import Points, shared_prefixes
from service.inference.runtime import Runtime
from service.inference.sse import EventSource, ends_all
from service.text.stop import StopStrings

logger = logging.getLogger(__name__)

RUN_ON = 2**16  # tokens beyond max_tokens that the engine may generate until the end is found here
MOST_TOKENS = 2**31 - 1  # largest max_tokens of a request


class GenerationTask(msgspec.Struct, frozen=True):
    """One sample of one prompt, with all its parameters."""

    prompt: array[int]
    packed: bytes  # the prompt packed by token_ids.pack_ids; samples of one prompt share both
    params: SamplingParams
    stop: StopStrings | None
    timeout: float  # seconds from the HTTP request's arrival
    priority: int
    interval: int  # tokens in one event of a stream
    score_top: int | None = None  # score the prompt too, with the k most likely tokens
    shared: bool = False  # other tasks have the same prompt: read it once
    ends: frozenset[int] = frozenset()  # see OutputText
    use: StateUse = NO_STATES
    grammar_field: str | None = None  # the field of the client's request that gave the grammar

    def output(self, runtime: Runtime) -> OutputText:
        """Return a new OutputText for this task."""
        return OutputText(
            runtime.tokenizer,
            self.prompt,
            self.stop,
            self.ends,
            before=self.use.recent,
            # A grammar matches every space of the text, so no leading space is removed.
            begins=self.params.grammar is None and not self.use.goes_on,
            keeps=self.use.keep is not None,
            rule=self._rule(runtime.info.eos_token_ids) if self._runs_on else None,
        )

    @property
    def _runs_on(self) -> bool:
        """Whether the text's end is found here and not by the engine.

        This is so if a state is kept and there are stop strings. The engine runs ahead: if it ended
        the text itself and kept the state before a stop string is found here, the state would have
        read beyond the stop string. With a grammar or min_tokens only the engine knows the end.
        """
        params = self.params
        ruled = params.grammar is not None or params.min_tokens > 0
        return self.use.keep is not None and self.stop is not None and not ruled

    def _rule(self, eos: tuple[int, ...]) -> EndRule:
        stops = set(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            stops.update(eos)
        return EndRule(self.params.max_tokens, frozenset(stops))

    @property
    def scored(self) -> int:
        """Number of prompt tokens that have log-probabilities when the prompt is scored."""
        return max(len(self.prompt) - self.use.first_scored, 0)

    def submit(
        self, inference: InferenceRequest, *, stream: bool, junctions: tuple[int, ...] = ()
    ) -> None:
        """Submit the task as one engine request of `inference`, which has admitted it.

        Args:
            inference: The HTTP request.
            stream: Whether tokens are wanted as they are generated.
            junctions: Lengths in tokens of the prefixes that the prompt shares within its batch.

        Raises EngineUnavailable, and Draining if the server is shutting down.
        """
        params, run_on = self.params, 0
        if self._runs_on:
            run_on = min(RUN_ON, MOST_TOKENS - params.max_tokens)
            params = msgspec.structs.replace(
                params, max_tokens=params.max_tokens + run_on, ignore_eos=True, stop_token_ids=()
            )
        inference.submit(
            self.packed,
            interval=self.interval if stream else 1,
            grammar_field=self.grammar_field,
            sampling=params,
            run_on=run_on,
            # Without stop strings the tokens of a text that is not streamed are needed at its end
            # only.
            stream=stream or self.stop is not None,
            score=self.score_top is not None and self.scored > 0,
            score_from=self.use.first_scored,
            score_top=self.score_top or 0,
            timeout=self.timeout,
            priority=self.priority,
            **self.use.fields((*junctions, *self._points())),
        )

    def _points(self) -> tuple[int, ...]:
        """Return the prompt length at which tasks with the same prompt share a state, if any.

        A task that keeps a state has to read the last token by itself.
        """
        length = len(self.prompt) - (self.use.keep is not None)
        return (length,) if self.shared and length > 0 else ()


class Outcome:
    """The result of a task that is not streamed: its text, or its error."""

    __slots__ = ("_texts", "_wants_pieces", "error", "output", "tokens", "told")

    def __init__(self, output: OutputText, wants_pieces: bool) -> None:
        self.output = output
        self.error: Exception | None = None
        self.tokens: list[int] = []
        self.told: Whole | list[Piece] = []  # its pieces, if log-probabilities were asked for
        self._texts: list[str] = []
        self._wants_pieces = wants_pieces

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces one by one; empty if log-probabilities were not asked for."""
        return self.told.pieces() if isinstance(self.told, Whole) else self.told

    def take(self, update: Update) -> None:
        """Add an update of the engine."""
        if self._wants_pieces:
            if (whole := self.output.take_whole(update)) is not None:
                self.told, self.tokens, self._texts = whole, whole.tokens, whole.texts
                return
            if update.finished is not None and update.finished.reports is not None:
                update.logprobs = update.finished.logprobs
            pieces = self.output.take(update)
            assert isinstance(self.told, list)  # nothing follows a whole text
            self.told += pieces
            self.tokens += [piece.token for piece in pieces if piece.token is not None]
            self._texts += [piece.text for piece in pieces]
        else:
            text, tokens = self.output.take_text(update)
            self._texts.append(text)
            self.tokens += tokens


async def gather(
    runtime: Runtime, inference: InferenceRequest, tasks: list[GenerationTask]
) -> list[Outcome]:
    """Run tasks and return their outcomes; a task that fails has its error in its outcome.

    Raises the error if no task was served, or if it concerns all of them (`sse.ends_all`).
    """
    outcomes = [Outcome(task.output(runtime), task.params.logprobs is not None) for task in tasks]
    failed = 0
    _submit(inference, tasks, stream=False)
    while batch := await inference.next_arrivals():
        for which, came in batch:
            outcome = outcomes[which]
            if outcome.error is not None:
                continue
            if isinstance(came, EngineError):
                outcome.error = came
            else:
                try:
                    if len(came.tokens) > TOKENS_AT_ONCE:  # a whole text may arrive at once
                        await asyncio.to_thread(outcome.take, came)
                    else:
                        outcome.take(came)
                    _stop(inference, which, outcome.output, came)
                    continue
                except Exception as error:  # it concerns this text alone
                    logger.exception("an answer could not be read")
                    outcome.error = error
                    inference.drop(which)
            failed += 1
            if failed == len(tasks) or ends_all(outcome.error):
                raise outcome.error
    return outcomes


def choose(outcomes: list[Outcome], draws: int, keep: int) -> list[Outcome]:
    """Return the `keep` most likely of every `draws` outcomes, best first (OpenAI's `best_of`).

    If `keep` equals `draws`, returns all outcomes in their order.
    """
    if draws == keep:
        return outcomes
    chosen: list[Outcome] = []
    for first in range(0, len(outcomes), draws):
        chosen += sorted(outcomes[first : first + draws], key=_merit, reverse=True)[:keep]
    return chosen


def _merit(outcome: Outcome) -> tuple[int, float]:
    """Return a sort key: the mean log-probability of the outcome's tokens.

    Empty texts come after all others, and failed outcomes after these. Equal outcomes stay in the
    order of their samples.
    """
    if outcome.error is not None:
        return 0, 0.0
    values = [piece.logprobs.logprob for piece in outcome.pieces if piece.logprobs is not None]
    return (2, math.fsum(values) / len(values)) if values else (1, 0.0)


# Renders the events of a task's new pieces; returns a coroutine if there is much to render.
RenderPieces = Callable[[int, OutputText, list[Piece]], bytes | Coroutine[Any, Any, bytes]]


class TaskRenderer:
    """Renders the events of one task in a stream: an EventRenderer (service.inference.sse)."""

    __slots__ = (
        "_inference", "_interval", "_plain", "_render_pieces", "_template", "_template_of",
        "_which", "output",
    )  # fmt: skip

    def __init__(
        self,
        runtime: Runtime,
        inference: InferenceRequest,
        which: int,
        task: GenerationTask,
        render_pieces: RenderPieces,
        template_of: Callable[[int], Template | None],
    ) -> None:
        """`which`: the task's position among the engine requests of `inference`."""
        self.output = task.output(runtime)
        self._inference = inference
        self._which = which
        self._interval = task.interval
        # Events with log-probabilities have no template.
        self._plain = task.params.logprobs is None and task.score_top is None
        self._render_pieces = render_pieces
        self._template_of = template_of
        self._template: Template | None = None  # of the events of all further plain tokens

    def render(self, update: Update) -> bytes | Coroutine[Any, Any, bytes]:
        begun = b""
        if self._plain and update.tokens:
            tokens, interval = update.tokens, self._interval
            if update.finished is not None:
                # The last event has more fields than the others, so it is not rendered here.
                tokens = tokens[: (len(tokens) - 1) // interval * interval]
            if tokens and (told := self.render_tokens(tokens)) is not None:
                begun = told
                if update.finished is None:
                    return begun
                update.tokens = update.tokens[len(tokens) :]
        output = self.output
        pieces = output.take(update)
        _stop(self._inference, self._which, output, update)
        rendered = self._render_pieces(self._which, output, pieces)
        return begun + rendered if isinstance(rendered, bytes) else _joined(begun, rendered)

    def render_tokens(self, tokens: Sequence[int]) -> bytes | None:
        template = self._template or self._find_template()
        if template is None or not self.output.take_plain(tokens):
            return None
        return template.events(tokens, self._interval)

    def _find_template(self) -> Template | None:
        if self._plain:
            self._template = self._template_of(self._which)
        return self._template


async def _joined(begun: bytes, rendered: Coroutine[Any, Any, bytes]) -> bytes:
    return begun + await rendered


def stream(
    runtime: Runtime,
    inference: InferenceRequest,
    tasks: list[GenerationTask],
    render_pieces: RenderPieces,
    render_error: Callable[[int, Exception], bytes],
    last: Callable[[list[OutputText]], bytes],
    template_of: Callable[[int], Template | None],
) -> EventSource:
    """Submit tasks and return the source of their events.

    Args:
        runtime: The model.
        inference: The HTTP request, which has admitted the tasks.
        tasks: The tasks; the functions below get a task's position.
        render_pieces: Renders the events of a task's new pieces.
        render_error: Renders the event of a task that failed.
        last: Renders the events before [DONE], from the outputs of all tasks.
        template_of: Returns the template for the events of a task's further plain tokens, or None
            if they have none yet.

    Raises EngineError if the tasks cannot be submitted; the source raises later errors.
    """
    renderers = [
        TaskRenderer(runtime, inference, which, task, render_pieces, template_of)
        for which, task in enumerate(tasks)
    ]
    _submit(inference, tasks, stream=True)
    return EventSource(
        inference,
        renderers,
        render_error,
        lambda: last([renderer.output for renderer in renderers]),
    )


def _submit(inference: InferenceRequest, tasks: list[GenerationTask], *, stream: bool) -> None:
    """Submit all tasks, or none and raise EngineError."""
    inference.check_tokens(sum(len(task.prompt) for task in tasks), len(tasks))
    inference.check_kept([task.use.source for task in tasks if task.use.source])
    points: Points = {}
    if tasks[0].packed is not tasks[-1].packed:  # else they are samples of one prompt
        points = shared_prefixes(
            (task.use.company, task.packed) for task in tasks if not task.use.no_cache
        )
    for task in tasks:
        found = points.get((task.use.company, task.packed), ()) if points else ()
        task.submit(inference, stream=stream, junctions=found)


def _stop(inference: InferenceRequest, which: int, output: OutputText, update: Update) -> None:
    """Stop the engine request if a stop string or rule has ended its text with this update."""
    if output.stopped and update.finished is None:
        inference.stop(which, output.kept_tokens())
