"""create_app: the HTTP application around one engine; `service.server.server` runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from engine.client.client import EngineClient
from engine.errors import EngineError
from service.app.auth import ApiKeyAuth, load_access
from service.app.cors import NamedOrigins
from service.app.middleware import RequestAccounting
from service.app.openapi import describe_access
from service.app.router import FastRouter
from service.http import errors
from service.http.body import BodyLimit
from service.http.uvicorn_protocol import send_refusal
from service.inference.engines import Engines, OneEngine
from service.inference.inputs.grammar_check import GrammarCheck
from service.inference.lifecycle import Lifecycle
from service.observability import otel
from service.observability.access_log import AccessLog, LineWriter
from service.observability.traces import TraceRequests
from service.routes import (
    admin,
    chat,
    completions,
    generate,
    health,
    metrics,
    models,
    playground,
    reference,
    score,
    states,
    tokenize,
)
from service.routes.base import JsonRoute
from service.settings import TRUSTED_PROXIES, Settings

STDOUT = 1
TEXT_PATH, IMPORT_PATH = "/v1/states/text", "/v1/states/import"

DESCRIPTION = """Minimal recurrent language models (minGRU, minLSTM) over HTTP.

Log-probabilities are natural logarithms, from the log-softmax of the raw logits. Every error is
`{"error": {"message", "type", "param", "code"}}`."""


def create_app(
    engines: Engines | EngineClient,
    settings: Settings,
    on_failure: Callable[[EngineError], None] | None = None,
) -> FastAPI:
    """The application; its lifespan starts `engines` (one client stands for itself) and closes
    them.

    `on_failure` is called when the engine cannot be started, the model cannot be loaded or the
    engine has died for good: every stream then gets an error frame and /health answers 503. Raises
    ConfigError for keys and traces that cannot be used.
    """
    if isinstance(engines, EngineClient):
        engines = OneEngine(engines, settings.load_timeout)
    lifecycle = Lifecycle(engines, settings, on_failure)
    access = load_access(settings)
    grammars = GrammarCheck(settings.grammar_timeout, lifecycle.metrics.grammar_checked)
    lines = LineWriter(STDOUT, shared=settings.api_workers > 1)
    log = AccessLog(settings.access_log, lines.write)
    exporter = otel.load() if settings.traces == "otlp" else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(lifecycle.live()),
            asyncio.create_task(lifecycle.end_those_behind()),
        ]
        if access.keys is not None:
            tasks.append(asyncio.create_task(access.keys.watch()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await grammars.close()
            await lifecycle.close()
            lines.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)

    # Who may connect to a unix socket stands in its mode; there are no addresses to know them by.
    trusted = TRUSTED_PROXIES if settings.uds is None else "*"
    app = FastRouter(
        trusted=trusted,
        title="minserve",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # it would load its scripts from elsewhere
        redoc_url=None,
    )
    app.state.lifecycle = lifecycle
    app.state.grammars = grammars
    errors.install(app)
    for module in (generate, score, completions, chat, tokenize, models, health, metrics):
        app.include_router(module.router)
        for route in module.router.routes:
            if isinstance(route, JsonRoute):
                app.lead_to(route)
    app.include_router(states.making)
    app.include_router(states.router)
    app.include_router(reference.router)
    if settings.playground:
        app.include_router(playground.router)
    if access.has_admin:
        app.include_router(admin.router)
    describe_access(app, access)
    # The last one added is the first to see a request.
    limits = {
        TEXT_PATH: lambda: settings.max_text_bytes,
        IMPORT_PATH: lifecycle.most_snapshot_bytes,
    }
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, others=limits)
    app.add_middleware(ApiKeyAuth, access=access)
    if settings.cors_origin:
        app.add_middleware(
            NamedOrigins,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients add their own; a page has to know a key to send it
            expose_headers=["retry-after", "x-request-id"],
        )
    accounting = partial(
        RequestAccounting, metrics=lifecycle.metrics, log=log, template_of=app.template_of
    )
    app.refusals = accounting(send_refusal)
    app.add_middleware(accounting)
    if exporter is not None:
        app.add_middleware(TraceRequests, paths=otel.OPERATIONS, take=exporter.take)
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=trusted)  # spans tell them
    return app
