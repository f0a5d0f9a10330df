"""POST /v1/score: log-probabilities of texts, or of continuations that share a context."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response

from engine.errors import Draining, EngineError, TimedOut
from engine.messages import Finished, SamplingParams, TokenLogprobs, pack_ids
from service.admission import InferenceRoute, get_flight
from service.answer import LEAST_LOGPROB, usage
from service.flight import Flight
from service.inputs import (
    check_count,
    check_model,
    end_of_text,
    read_priority,
    read_prompt,
    read_timeout,
)
from service.runtime import Runtime, get_runtime
from service.schemas.common import statuses
from service.schemas.score import EXAMPLES, ScoreItem, ScoreRequest, ScoreResponse
from service.scope import REQUEST_ID
from service.size import RequestSize
from service.streaming import ends_all, error_body, unless_client_leaves
from service.wire import JSONResponse, render

router = APIRouter(route_class=InferenceRoute, tags=["inference"])

# Log-probabilities of a task's scored tokens, or what went wrong.
Scores = list[TokenLogprobs] | EngineError


@dataclass(frozen=True, slots=True)
class Task:
    """Tokens, of which those from `start` on are scored."""

    tokens: array[int]
    start: int = 1
    shared: bool = False  # other tasks begin with the same tokens before `start`: read them once


@router.post("/v1/score", responses=statuses(ScoreResponse))
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    runtime: Annotated[Runtime, Depends(get_runtime)],
    flight: Annotated[Flight, Depends(get_flight)],
) -> Response:
    """Scores `texts` from their second token on, or, for `items`, every token of each
    continuation after its context. Texts of an item are tokenised apart. An empty context stands
    for the end-of-text token, where the model has one."""
    check_model(body.model, runtime.model_name, runtime.info)
    timeout = read_timeout(body.timeout, runtime.settings)
    priority = read_priority(body.priority, flight.least_priority)
    if body.texts is not None:
        tasks = await _text_tasks(body.texts, runtime, flight)
    else:
        tasks = await _item_tasks(body.items or [], runtime, flight)
    work = _run(flight, tasks, timeout, priority)
    scores = await unless_client_leaves(request.receive, work)
    tokens = sum(len(task.tokens) for task in tasks)

    def answer() -> JSONResponse:
        results = (
            [_text_result(i, tasks[i], scores[i], runtime) for i in range(len(tasks))]
            if body.texts is not None
            else _item_results(body.items or [], scores)
        )
        return JSONResponse(
            {
                "id": f"score-{request.scope[REQUEST_ID]}",
                "model": runtime.model_name,
                "results": results,
                "usage": usage(tokens, 0),
            }
        )

    return await render(tokens, answer)


async def _text_tasks(texts: list[str | list[int]], runtime: Runtime, flight: Flight) -> list[Task]:
    check_count("texts", len(texts), runtime.settings.max_prompts, "texts")
    flight.reserve(len(texts))
    size = RequestSize("texts", runtime.settings)
    tasks = []
    for i, text in enumerate(texts):
        tokens = await read_prompt(text, f"texts[{i}]", runtime.tokenizer, runtime.info)
        size.add_prompt(len(tokens))
        size.add_reports(len(tokens))
        tasks.append(Task(tokens))
    return tasks


async def _item_tasks(items: list[ScoreItem], runtime: Runtime, flight: Flight) -> list[Task]:
    """One task per continuation, items one after the other."""
    total = sum(len(item.continuations) for item in items)
    check_count("items", total, runtime.settings.max_prompts, "continuations")
    flight.reserve(total)
    tokenizer, info = runtime.tokenizer, runtime.info
    size = RequestSize("items", runtime.settings)
    tasks = []
    for i, item in enumerate(items):
        if item.context:
            context = await read_prompt(item.context, f"items[{i}].context", tokenizer, info)
        else:
            context = array("i", end_of_text(f"items[{i}].context", info))
        for j, continuation in enumerate(item.continuations):
            name = f"items[{i}].continuations[{j}]"
            tokens = await read_prompt(continuation, name, tokenizer, info, special=False)
            size.add_prompt(len(context) + len(tokens))
            size.add_reports(len(tokens))
            shared = len(item.continuations) > 1
            tasks.append(Task(context + tokens, len(context), shared))
    return tasks


async def _run(flight: Flight, tasks: list[Task], timeout: float, priority: int) -> list[Scores]:
    """Every task's scores. Raises EngineError where no task was served."""
    scores: list[Scores] = [[] for _ in tasks]
    # A text of one token has nothing to score.
    submitted = [i for i, task in enumerate(tasks) if len(task.tokens) > task.start]
    flight.check_tokens(sum(len(tasks[i].tokens) for i in submitted), len(submitted))
    failed = 0
    for i in submitted:
        task = tasks[i]
        flight.submit(
            pack_ids(task.tokens),
            sampling=SamplingParams(max_tokens=0),
            stream=False,
            score=True,
            score_from=task.start,
            cache_points=(task.start - 1,) if task.shared and task.start > 1 else (),
            timeout=timeout,
            priority=priority,
        )
    async for batch in flight.arrivals():
        for which, came in batch:
            i = submitted[which]
            sofar = scores[i]
            error = came if isinstance(came, EngineError) else None
            if not isinstance(came, EngineError) and not isinstance(sofar, EngineError):
                sofar += came.scores
                if came.finished is not None:
                    error = _shortfall(came.finished, len(sofar), tasks[i])
            if error is not None:
                failed += 1
                if failed == len(submitted) or ends_all(error):
                    raise error
                scores[i] = error
    return scores


def _shortfall(finished: Finished, scored: int, task: Task) -> EngineError | None:
    """Why a task ended without all of its scores; None where it has them."""
    wanted = len(task.tokens) - task.start
    if scored == wanted:
        return None
    progress = f"{scored} of {wanted} tokens were scored"
    if finished.reason == "timeout":
        return TimedOut(f"the request's time was over; {progress}")
    return Draining(f"the server is shutting down; {progress}")


def _text_result(index: int, task: Task, scores: Scores, runtime: Runtime) -> dict[str, Any]:
    if isinstance(scores, EngineError):
        return {"index": index, **error_body(scores)}
    logprobs = [max(score.logprob, LEAST_LOGPROB) for score in scores]
    total = math.fsum(logprobs)
    scored = task.tokens[task.start :]
    size = runtime.tokenizer.count_bytes(scored) if runtime.tokenizer else 0
    return {
        "index": index,
        "token_ids": list(task.tokens),
        "token_logprobs": [None, *logprobs],
        "total_logprob": total,
        "num_scored_tokens": len(logprobs),
        "perplexity": _perplexity(total, len(logprobs)),
        "bits_per_byte": -total / math.log(2) / size if size else None,
    }


def _perplexity(total: float, count: int) -> float | None:
    """exp of the mean negative log-probability; None for no tokens, or where a float is too small
    to hold it."""
    mean = -total / count if count else math.inf
    return math.exp(mean) if mean < 709 else None


def _item_results(items: list[ScoreItem], scores: list[Scores]) -> list[dict[str, Any]]:
    left = iter(scores)
    return [
        {"index": i, "continuations": [_continuation(next(left)) for _ in item.continuations]}
        for i, item in enumerate(items)
    ]


def _continuation(scores: Scores) -> dict[str, Any]:
    if isinstance(scores, EngineError):
        return error_body(scores)
    logprobs = [max(score.logprob, LEAST_LOGPROB) for score in scores]
    return {
        "logprob": math.fsum(logprobs),
        "num_tokens": len(logprobs),
        "token_logprobs": logprobs,
        "is_greedy": all(score.is_greedy for score in scores),
    }
