"""create_app: the HTTP application around one engine; `service.server` runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI

from engine.client import EngineClient
from engine.errors import EngineError
from service import errors
from service.body_limit import BodyLimit
from service.middleware import HttpMetrics, RequestIds
from service.routes import completions, generate, health, metrics, models, score
from service.runtime import Runtime
from service.settings import Settings

DESCRIPTION = """Minimal recurrent language models (minGRU, minLSTM) over HTTP.

Log-probabilities are natural logarithms, from the log-softmax of the raw logits. Every error is
`{"error": {"message", "type", "param", "code"}}`."""


def create_app(
    client: EngineClient,
    settings: Settings,
    on_failure: Callable[[EngineError], None] | None = None,
) -> FastAPI:
    """The application; its lifespan starts `client` and closes it.

    `on_failure` is called when the engine cannot be started, the model cannot be loaded or the
    engine dies: every stream then gets an error frame and /health answers 503.
    """
    runtime = Runtime(client, settings, on_failure)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await client.start()
        except EngineError as error:  # the server starts all the same, and tells it like any death
            runtime.fail(error)
        life = asyncio.create_task(runtime.live())
        try:
            yield
        finally:
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
            await client.close()

    app = FastAPI(
        title="minserve",
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        strict_content_type=False,
    )
    app.state.runtime = runtime
    errors.install(app)
    for module in (generate, score, completions, models, health, metrics):
        app.include_router(module.router)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(HttpMetrics, metrics=runtime.metrics)
    app.add_middleware(RequestIds)
    return app
