"""create_app: builds the HTTP application of a server; `service.server.server` runs it."""

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
from service.app.openapi import describe
from service.app.router import FastRouter
from service.http import errors
from service.http.body import BodyLimit
from service.http.uvicorn_protocol import send_refusal
from service.inference.engines import Engines, OneEngine
from service.inference.inputs.grammar_check import GrammarCheck
from service.inference.inputs.session_header import SessionHeader
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
    load,
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
    """Build the application. Its lifespan starts the engines and closes them.

    Args:
        engines: The source of engines, or a client of a single one.
        settings: The server's settings.
        on_failure: Called when the engine cannot be started, the model cannot be loaded or the
            engine has died for good. Every stream then gets an error frame, and /health answers
            503.

    Raises ConfigError for API keys or traces that cannot be used.
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

    # File permissions control who may connect to a Unix socket, and its clients have no addresses.
    trusted = TRUSTED_PROXIES if settings.uds is None else "*"
    app = FastRouter(
        trusted=trusted,
        title="minserve",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page would load scripts from another host
        redoc_url=None,
    )
    app.state.lifecycle = lifecycle
    app.state.grammars = grammars
    errors.install(app)
    for module in (generate, score, completions, chat, tokenize, models, health, load, metrics):
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
    describe(app, access, SessionHeader.of(settings))
    # The middleware that is added last sees a request first.
    limits = {
        TEXT_PATH: lambda: settings.max_text_bytes,
        IMPORT_PATH: lifecycle.most_snapshot_bytes,
    }
    for_states = {
        route.path: lifecycle.most_inline_bytes
        for router in (
            generate.router,
            score.router,
            completions.router,
            chat.router,
            states.making,
        )
        for route in router.routes
        if isinstance(route, JsonRoute) and route.takes_state
    }
    app.add_middleware(
        BodyLimit, max_bytes=settings.max_body_bytes, others=limits, for_states=for_states
    )
    app.add_middleware(ApiKeyAuth, access=access)
    if settings.cors_origin:
        app.add_middleware(
            NamedOrigins,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # client libraries add their own headers
            expose_headers=["retry-after", "x-request-id"],
        )
    accounting = partial(
        RequestAccounting, metrics=lifecycle.metrics, log=log, template_of=app.template_of
    )
    app.refusals = accounting(send_refusal)
    app.add_middleware(accounting)
    if exporter is not None:
        app.add_middleware(TraceRequests, paths=otel.OPERATIONS, take=exporter.take)
        # Spans record the scheme that the proxy tells.
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=trusted)
    return app
