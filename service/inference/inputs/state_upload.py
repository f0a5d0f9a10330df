"""Reads prompts into kept states, and texts of any length while they are uploaded.

A text is cut into pieces, as `minserve score` cuts files. Each piece is an engine request that
continues the state of the piece before, so memory does not grow with the text. The pieces use a
temporary state, which gets its id when the whole text has been read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.errors import Draining, EngineError, TimedOut
from engine.protocol.events import Finished
from engine.protocol.requests import KeepState
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateInfo
from engine.protocol.token_ids import pack_ids
from service.http.errors import invalid
from service.http.upload import Upload
from service.inference.inference_request import InferenceRequest
from service.inference.inputs.sampling import read_prompt, read_timeout
from service.inference.inputs.states import NO_STATES, StateUse, read_use
from service.inference.runtime import Runtime
from service.schemas.states import TextQuery
from service.text.tokenizer import Tokenizer
from service.text.utf8_chunks import NotUtf8, Pieces

PIECE = 2**16  # least characters of a piece
PIECE_TTL = 600.0  # lifetime in seconds of the state between two pieces, if the client is lost


async def read_whole(inference: InferenceRequest) -> Finished:
    """Wait for the end of a single engine request that keeps a state; return its last event.

    Raises EngineError, also if no state was kept.
    """
    finished: Finished | None = None
    while batch := await inference.next_arrivals():
        for _, came in batch:
            if isinstance(came, EngineError):
                raise came
            finished = came.finished or finished
    assert finished is not None
    if finished.state is None and not finished.snapshot:
        if finished.reason == "timeout":
            raise TimedOut("the request timed out before its prompt was read")
        raise Draining("the server is shutting down; nothing was kept")
    return finished


async def read_text(
    body: Upload, runtime: Runtime, inference: InferenceRequest, query: TextQuery, priority: int
) -> tuple[StateInfo, int, int]:
    """Read the text of a request's body into a kept state.

    The upload has one place in the queue from its beginning to its end.

    Args:
        body: The body.
        runtime: The model.
        inference: The HTTP request.
        query: The state to continue, and the new state's id and lifetime.
        priority: The priority of each piece.

    Returns: the state, the tokens of the text, and how many of them were prefix cache hits.

    Raises ApiError and EngineError.
    """
    inference.reserve(1)
    timeout = read_timeout(None, runtime.settings)
    use = NO_STATES
    if query.state is not None:
        use = await read_use({"state": query.state}, runtime, inference, timeout, "text")
    if runtime.tokenizer is None:
        raise invalid(
            "text", "cannot be read, because the model has no tokenizer.json or tokenizer.model"
        )
    tokenizer = runtime.tokenizer
    pieces = text_pieces(body, tokenizer, runtime.settings.receive_timeout)
    info: StateInfo | None = None
    tokens = cached = 0
    async with aclosing(pieces):
        async for piece in pieces:
            ids = await read_prompt(
                piece, "text", tokenizer, runtime.info, begins=use.begins, may_be_empty=True
            )
            if not ids:  # for example white space that the tokenizer drops
                continue
            finished = await _read_piece(runtime, inference, pack_ids(ids), use, timeout, priority)
            assert finished.state is not None
            if info is None:
                inference.borrow(finished.state.id)
            info = finished.state
            tokens, cached = tokens + len(ids), cached + finished.cached_tokens
            keep = KeepState(id=info.id, ttl=PIECE_TTL, brief=True)
            use = StateUse(source=info.id, begins=False, keep=keep)
    if info is None:
        raise invalid("text", "is empty; at least one token is needed")
    reply = await inference.ask_state("move", id=info.id, target=query.id or "", ttl=query.ttl)
    return reply.states[0], tokens, cached


async def _read_piece(
    runtime: Runtime,
    inference: InferenceRequest,
    prompt: bytes,
    use: StateUse,
    timeout: float,
    priority: int,
) -> Finished:
    """Read one piece as an engine request, in the queue place of the whole upload."""
    with runtime.begin_beside(inference) as part, inference.lending(part):
        part.submit(
            prompt,
            sampling=SamplingParams(max_tokens=0),
            stream=False,
            timeout=timeout,
            priority=priority,
            **{**use.fields(), "keep": use.keep or KeepState(ttl=PIECE_TTL, brief=True)},
        )
        inference.tokens_in += part.tokens_in
        return await read_whole(part)


async def text_pieces(
    body: Upload, tokenizer: Tokenizer, patience: float
) -> AsyncGenerator[str, None]:
    """Yield the body's text in pieces of at least PIECE characters, except for the last one.

    Raises ApiError 400 if the body is not UTF-8, and 408 if nothing arrives for `patience` seconds.
    """
    pieces = Pieces(PIECE, tokenizer.last_cut)
    try:
        while (data := await body.next(patience)) is not None:
            if piece := pieces.feed(data):
                yield piece
        if piece := pieces.finish():
            yield piece
    except NotUtf8 as error:
        raise invalid("text", f"is not UTF-8: {error.reason} at byte {error.at}") from error
