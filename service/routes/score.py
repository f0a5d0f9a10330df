"""POST /v1/score: log-probabilities of texts, or of continuations that share a context."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response

from engine.errors import Draining, EngineError, TimedOut
from engine.protocol.events import Finished
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from service.http.disconnect import unless_client_leaves
from service.http.errors import invalid
from service.http.json_response import JSONResponse, render
from service.http.scope import REQUEST_ID
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.continuations import Context
from service.inference.inputs.sampling import (
    check_count,
    check_model,
    read_priority,
    read_prompt,
    read_timeout,
)
from service.inference.inputs.states import FIELDS as STATES
from service.inference.inputs.states import NO_STATES, StateUse, check_points, kept_state, read_use
from service.inference.logprobs import LEAST_LOGPROB
from service.inference.output_text import usage
from service.inference.prefix_plan import Points, shared_prefixes
from service.inference.request_size import RequestSize
from service.inference.runtime import Runtime, get_runtime
from service.inference.sse import ends_all, error_body, render_each
from service.routes.base import InferenceRoute, get_inference
from service.schemas.common import statuses
from service.schemas.score import EXAMPLES, ScoreItem, ScoreRequest, ScoreResponse
from service.text.tokenizer import Tokenizer

router = APIRouter(route_class=InferenceRoute, tags=["inference"])


@dataclass(frozen=True, slots=True)
class Task:
    """Token ids to score from index `start` on."""

    tokens: array[int]
    start: int = 1
    shared: bool = False  # other tasks have the same tokens before `start`: read them once
    use: StateUse = NO_STATES
    text: str | None = None  # the client's text; None if the client sent token ids


@dataclass(slots=True)
class Scored:
    """The result of a task: log-probabilities of its scored tokens, or an error."""

    scores: list[TokenLogprobs] = field(default_factory=list)
    error: EngineError | None = None
    finished: Finished | None = None


@router.post("/v1/score", responses=statuses(ScoreResponse))
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    inference: Annotated[InferenceRequest, Depends(get_inference)],
) -> Response:
    """Return log-probabilities of `texts`, or of continuations of contexts (`items`).

    A text is scored from its second token on, or from its first token after a `state`. Every token
    of a continuation is scored. Context and continuation are tokenised together, and white space at
    the context's end belongs to the continuation. Without a `state`, an empty context stands for
    the tokens that the tokenizer puts before a text, or else for the model's end-of-text token.
    """
    check_model(body.model, runtime.model_name, runtime.info)
    timeout = read_timeout(body.timeout, runtime.settings)
    priority = read_priority(body.priority, inference.least_priority)
    if body.texts is not None:
        tasks = await _text_tasks(body, body.texts, runtime, inference, timeout)
    else:
        tasks = await _item_tasks(body, body.items or [], runtime, inference, timeout)
    work = _run(inference, tasks, timeout, priority)
    scored = await unless_client_leaves(request.scope, request.receive, work)
    tokens = sum(len(task.tokens) for task in tasks)
    cached = sum(one.finished.cached_tokens for one in scored if one.finished)

    def answer() -> JSONResponse:
        results = (
            render_each(
                len(tasks),
                lambda i: _text_result(i, tasks[i], scored[i], runtime),
                _failed_text,
            )
            if body.texts is not None
            else _item_results(body.items or [], scored)
        )
        return JSONResponse(
            {
                "id": f"score-{request.scope[REQUEST_ID]}",
                "model": runtime.model_name,
                "results": results,
                "usage": usage(tokens, 0, cached),
            }
        )

    return await render(tokens, answer)


async def _text_tasks(
    body: ScoreRequest,
    texts: list[str | list[int]],
    runtime: Runtime,
    inference: InferenceRequest,
    timeout: float,
) -> list[Task]:
    check_count("texts", len(texts), runtime.settings.max_prompts, "texts")
    inference.reserve(len(texts))
    size = RequestSize("texts", runtime.settings)
    tasks = []
    for i, text in enumerate(texts):
        use = await _use(body, runtime, inference, timeout, text)
        tokens = await read_prompt(
            text,
            f"texts[{i}]",
            runtime.tokenizer,
            runtime.info,
            begins=use.begins,
            ends=use.keep is None,  # a kept state may be continued, so its text has no end
        )
        check_points(use, len(tokens))
        size.add_prompt(len(tokens))
        size.add_reports(len(tokens))
        given = text if isinstance(text, str) else None
        tasks.append(Task(tokens, use.first_scored, use=use, text=given))
    return tasks


async def _use(
    body: ScoreRequest,
    runtime: Runtime,
    inference: InferenceRequest,
    timeout: float,
    prompt: str | list[int],
) -> StateUse:
    values = {name: getattr(body, name, None) for name in STATES}
    return await read_use(values, runtime, inference, timeout, prompt)


async def _item_tasks(
    body: ScoreRequest,
    items: list[ScoreItem],
    runtime: Runtime,
    inference: InferenceRequest,
    timeout: float,
) -> list[Task]:
    """Return one task for each continuation, item by item."""
    if body.return_state:
        raise invalid("return_state", "allowed with texts only")
    total = sum(len(item.continuations) for item in items)
    check_count("items", total, runtime.settings.max_prompts, "continuations")
    inference.reserve(total)
    size = RequestSize("items", runtime.settings)
    tasks = []
    for i, item in enumerate(items):
        use = await _use(body, runtime, inference, timeout, item.context)
        context = Context(
            item.context,
            f"items[{i}].context",
            runtime.tokenizer,
            runtime.info,
            begins=use.begins,
            goes_on=use.goes_on,
        )
        check_points(use, len(await context.ids()))
        for j, continuation in enumerate(item.continuations):
            name = f"items[{i}].continuations[{j}]"
            tokens, start = await context.followed_by(continuation, name)
            size.add_prompt(len(tokens))
            size.add_reports(len(tokens) - start)
            tasks.append(Task(tokens, start, len(item.continuations) > 1, use))
    return tasks


async def _run(
    inference: InferenceRequest, tasks: list[Task], timeout: float, priority: int
) -> list[Scored]:
    """Return every task's scores. Raises EngineError if no task was served."""
    scored = [Scored() for _ in tasks]
    # A text of one token has nothing to score.
    submitted = [
        i
        for i, task in enumerate(tasks)
        if len(task.tokens) > task.start or task.use.keep is not None
    ]
    inference.check_tokens(sum(len(tasks[i].tokens) for i in submitted), len(submitted))
    inference.check_kept([tasks[i].use.source for i in submitted if tasks[i].use.source])
    failed = 0
    contexts = [pack_ids(tasks[i].tokens[: max(tasks[i].start - 1, 0)]) for i in submitted]
    points: Points = {}
    if len(contexts) > 1:  # only tokens that are not scored can be shared
        points = shared_prefixes(
            (tasks[i].use.company, context)
            for i, context in zip(submitted, contexts, strict=True)
            if context and not tasks[i].use.no_cache
        )
    for i, context in zip(submitted, contexts, strict=True):
        task = tasks[i]
        found = points.get((task.use.company, context), ())
        inference.submit(
            pack_ids(task.tokens),
            sampling=SamplingParams(max_tokens=0),
            stream=False,
            score=len(task.tokens) > task.start,
            score_from=task.start,
            timeout=timeout,
            priority=priority,
            **task.use.fields(
                (*found, task.start - 1) if task.shared and task.start > 1 else found
            ),
        )
    while batch := await inference.next_arrivals():
        for which, came in batch:
            i = submitted[which]
            one = scored[i]
            if isinstance(came, EngineError):
                one.error = came
            else:
                one.scores += came.scores
                if came.finished is not None:
                    one.finished = came.finished
                    one.error = _shortfall(came.finished, len(one.scores), tasks[i])
            if one.error is not None:
                failed += 1
                if failed == len(submitted) or ends_all(one.error):
                    raise one.error
    return scored


def _shortfall(finished: Finished, scored: int, task: Task) -> EngineError | None:
    """Return why a task ended without all of its scores, or None if it has them."""
    wanted = max(len(task.tokens) - task.start, 0)
    if scored == wanted:
        return None
    progress = f"{scored} of {wanted} tokens were scored"
    if finished.reason == "timeout":
        return TimedOut(f"the request timed out; {progress}")
    return Draining(f"the server is shutting down; {progress}")


def _failed_text(index: int, error: Exception) -> dict[str, Any]:
    return {"index": index, **error_body(error)}


def _text_result(index: int, task: Task, one: Scored, runtime: Runtime) -> dict[str, Any]:
    if one.error is not None:
        return _failed_text(index, one.error)
    logprobs = [max(score.logprob, LEAST_LOGPROB) for score in one.scores]
    total = math.fsum(logprobs)
    size = _scored_bytes(task, runtime.tokenizer)
    result = {
        "index": index,
        "token_ids": list(task.tokens),
        "token_logprobs": [*[None] * task.start, *logprobs],
        "total_logprob": total,
        "num_scored_tokens": len(logprobs),
        "perplexity": _perplexity(total, len(logprobs)),
        "bits_per_byte": -total / math.log(2) / size if size else None,
    }
    if task.use.keep is not None:
        result["state"] = kept_state(one.finished)
    return result


def _scored_bytes(task: Task, tokenizer: Tokenizer | None) -> int:
    """Return the UTF-8 bytes of the scored tokens' text; 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    before, scored = task.tokens[: task.start], task.tokens[task.start :]
    if task.text is not None:
        return tokenizer.bytes_behind(task.text, before)
    return tokenizer.count_bytes(scored, before, begins=not task.use.goes_on)


def _perplexity(total: float, count: int) -> float | None:
    """Return exp of the mean negative log-probability.

    None without tokens, or if the value is too large for a float.
    """
    mean = -total / count if count else math.inf
    return math.exp(mean) if mean < 709 else None


def _item_results(items: list[ScoreItem], scored: list[Scored]) -> list[dict[str, Any]]:
    left = iter(scored)
    return [
        {"index": i, "continuations": [_continuation(next(left)) for _ in item.continuations]}
        for i, item in enumerate(items)
    ]


def _continuation(one: Scored) -> dict[str, Any]:
    if one.error is not None:
        return error_body(one.error)
    logprobs = [max(score.logprob, LEAST_LOGPROB) for score in one.scores]
    return {
        "logprob": math.fsum(logprobs),
        "num_tokens": len(logprobs),
        "token_logprobs": logprobs,
        "is_greedy": all(score.is_greedy for score in one.scores),
    }
