"""Generation: prompts in, texts out, gathered or streamed. All generating endpoints use it."""

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

RUN_ON = 2**16  # tokens that a text may have until its end is found here
MOST_TOKENS = 2**31 - 1  # that a request may ask for


class GenerationTask(msgspec.Struct, frozen=True):
    """One prompt, and what to do with it."""

    prompt: array[int]
    packed: bytes  # the prompt as token_ids.pack_ids gives it; samples of one prompt share both
    params: SamplingParams
    stop: StopStrings | None
    timeout: float
    priority: int
    interval: int  # tokens in one event of a stream
    score_top: int | None = None  # score the prompt too, with the k best at each position
    shared: bool = False  # other tasks have the same prompt: read it once
    ends: frozenset[int] = frozenset()  # see OutputText
    use: StateUse = NO_STATES
    grammar_field: str | None = None  # by which the client asked for the grammar

    def output(self, runtime: Runtime) -> OutputText:
        """A new OutputText of this task, by the tokenizer of the runtime's model."""
        return OutputText(
            runtime.tokenizer,
            self.prompt,
            self.stop,
            self.ends,
            before=self.use.recent,
            # A grammar has every space of the text: none is taken off.
            begins=self.params.grammar is None and not self.use.goes_on,
            keeps=self.use.keep is not None,
            rule=self._rule(runtime.info.eos_token_ids) if self._runs_on else None,
        )

    @property
    def _runs_on(self) -> bool:
        """Whether the text's end is found here and not by the engine.

        The engine runs ahead: had it ended the text, and kept its state, before a stop string is
        found, the state would have read that too. (What a grammar or min_tokens say of the end only
        the engine can know.)
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
        """How many tokens of the prompt have log-probabilities, where they are asked for."""
        return max(len(self.prompt) - self.use.first_scored, 0)

    def submit(
        self, inference: InferenceRequest, *, stream: bool, junctions: tuple[int, ...] = ()
    ) -> None:
        """Submits the task as one engine request of `inference`, which has admitted it.

        `stream`: tokens are wanted as they come. `junctions`: lengths of the prompt, in tokens, at
        which others of the same batch part from it. Raises EngineUnavailable, Draining.
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
            # Without stop strings nobody looks at the tokens of a text that is not streamed.
            stream=stream or self.stop is not None,
            score=self.score_top is not None and self.scored > 0,
            score_from=self.use.first_scored,
            score_top=self.score_top or 0,
            timeout=self.timeout,
            priority=self.priority,
            **self.use.fields((*junctions, *self._points())),
        )

    def _points(self) -> tuple[int, ...]:
        """Up to where tasks with the same prompt read it once. What leaves a state has to read the
        last token by itself."""
        length = len(self.prompt) - (self.use.keep is not None)
        return (length,) if self.shared and length > 0 else ()


class Outcome:
    """What came of a task: the text, or the error."""

    __slots__ = ("_texts", "_wants_pieces", "error", "output", "tokens", "told")

    def __init__(self, output: OutputText, wants_pieces: bool) -> None:
        self.output = output
        self.error: Exception | None = None
        self.tokens: list[int] = []
        self.told: Whole | list[Piece] = []  # its pieces, where log-probabilities are asked for
        self._texts: list[str] = []
        self._wants_pieces = wants_pieces

    @property
    def text(self) -> str:
        """What has come so far, as one string."""
        return "".join(self._texts)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces one by one; empty where log-probabilities are not asked for."""
        return self.told.pieces() if isinstance(self.told, Whole) else self.told

    def take(self, update: Update) -> None:
        """Adds what has come."""
        if self._wants_pieces:
            if (whole := self.output.take_whole(update)) is not None:
                self.told, self.tokens, self._texts = whole, whole.tokens, whole.texts
                return
            if update.finished is not None and update.finished.reports is not None:
                update.logprobs = update.finished.logprobs
            pieces = self.output.take(update)
            assert isinstance(self.told, list)  # no more comes after what came whole
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
    """The outcome of every task. Raises the error where no task was served."""
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
                    if len(came.tokens) > TOKENS_AT_ONCE:  # a whole text may come at once
                        await asyncio.to_thread(outcome.take, came)
                    else:
                        outcome.take(came)
                    _stop(inference, which, outcome.output, came)
                    continue
                except Exception as error:  # of this text alone
                    logger.exception("an answer could not be read")
                    outcome.error = error
                    inference.drop(which)
            failed += 1
            if failed == len(tasks) or ends_all(outcome.error):
                raise outcome.error
    return outcomes


def choose(outcomes: list[Outcome], draws: int, keep: int) -> list[Outcome]:
    """The `keep` likeliest of every `draws` outcomes, best first: OpenAI's `best_of`.

    All of them, in order, where as many are kept as were drawn.
    """
    if draws == keep:
        return outcomes
    chosen: list[Outcome] = []
    for first in range(0, len(outcomes), draws):
        chosen += sorted(outcomes[first : first + draws], key=_merit, reverse=True)[:keep]
    return chosen


def _merit(outcome: Outcome) -> tuple[int, float]:
    """The mean log-probability of the outcome's tokens, as a key to sort by.

    Empty texts come after all others, and failed outcomes after these; of equals the first drawn
    comes first.
    """
    if outcome.error is not None:
        return 0, 0.0
    values = [piece.logprobs.logprob for piece in outcome.pieces if piece.logprobs is not None]
    return (2, math.fsum(values) / len(values)) if values else (1, 0.0)


# Gives the events of a task's new pieces; a coroutine where they are many.
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
        """`which` of the engine requests of `inference` the task is."""
        self.output = task.output(runtime)
        self._inference = inference
        self._which = which
        self._interval = task.interval
        # Log-probabilities are rendered for each token.
        self._plain = task.params.logprobs is None and task.score_top is None
        self._render_pieces = render_pieces
        self._template_of = template_of
        self._template: Template | None = None  # of all its plain tokens to come

    def render(self, update: Update) -> bytes | Coroutine[Any, Any, bytes]:
        begun = b""
        if self._plain and update.tokens:
            tokens, interval = update.tokens, self._interval
            if update.finished is not None:
                # The last event says more than the others.
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
    """Submits the tasks and returns the source of their events.

    `render_pieces` and `render_error` give the events of a task, by its position, `last` those
    before [DONE]. `template_of` gives the template of all of a task's plain tokens to come, where
    their events have one already. Raises EngineUnavailable, Draining; later errors come from the
    source.
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
    """All of them, or none: then raises EngineError."""
    inference.check_tokens(sum(len(task.prompt) for task in tasks), len(tasks))
    inference.check_kept([task.use.source for task in tasks if task.use.source])
    points: Points = {}
    if tasks[0].packed is not tasks[-1].packed:  # else one prompt, or its samples
        points = shared_prefixes((task.use.company, task.packed) for task in tasks)
    for task in tasks:
        found = points.get((task.use.company, task.packed), ()) if points else ()
        task.submit(inference, stream=stream, junctions=found)


def _stop(inference: InferenceRequest, which: int, output: OutputText, update: Update) -> None:
    """Tells the engine where a stop string ended the text that took the update."""
    if output.stopped and update.finished is None:
        inference.stop(which, output.kept_tokens())
