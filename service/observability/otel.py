"""OpenTelemetry traces, exported by OTLP over HTTP on a thread.

Each inference request over HTTP is one span, with the attribute names of OpenTelemetry's semantic
conventions for generative AI. Child spans are the time in the queue, in prefill and in decode of
its engine requests. Spans hold no text of prompts or answers. The SDK reads the standard OTEL_*
variables: endpoint, headers, sampling, the service's name and resource, queue sizes.

Only `load` imports the packages of the extra `otel` (`pip install 'minserve[otel]'`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from engine.errors import ConfigError
from engine.protocol.events import Finished
from engine.protocol.sampling_params import SamplingParams
from service.http.scope import ERROR_CODE, INFERENCE, OUTCOME, REQUEST_ID, STATUS
from service.observability.traces import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

CLOSE_SECONDS = 5.0  # to send the remaining spans at the end
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/generate": "text_completion",
    "/v1/score": "score",
}
# Fields of SamplingParams that are attributes. Stop strings are left out, because they are text.
PARAMETERS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


class Exporter:
    """Exports requests that have ended as spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate, trace

        self._api = trace
        self._extract = propagate.extract
        self._provider = provider
        self._tracer = provider.get_tracer("minserve")

    def take(self, scope: Scope, trace: Trace, came: int, ended: int) -> None:
        """Export one request; its traceparent header names the parent span.

        Args:
            scope: Its ASGI scope.
            trace: What was recorded about it.
            came: Its arrival, in nanoseconds since 1970.
            ended: Its end, in nanoseconds since 1970.
        """
        route = scope["path"]
        operation = OPERATIONS[route]
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        span = self._tracer.start_span(
            f"{operation} {trace.model}" if trace.model else operation,
            context=self._extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "minserve",
                "http.request.method": scope["method"],
                "http.route": route,
                "url.scheme": scope["scheme"],
            },
            start_time=came,
        )
        if span.is_recording():
            span.set_attributes(dict(_attributes(scope, trace)))
            code = scope.get(ERROR_CODE)
            if scope[STATUS] >= 500 or (code is not None and scope[STATUS] == 200):
                span.set_status(self._api.StatusCode.ERROR)
            inside = self._api.set_span_in_context(span)
            for sent_at, finished in trace.parts:
                for name, start, stop in _parts(sent_at, finished):
                    child = self._tracer.start_span(name, context=inside, start_time=start)
                    child.set_attribute("minserve.engine_request", finished.request)
                    child.end(stop)
        span.end(ended)

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_SECONDS."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _attributes(scope: Scope, trace: Trace) -> Iterator[tuple[str, Any]]:
    yield "minserve.request_id", scope[REQUEST_ID]
    yield "http.response.status_code", scope[STATUS]
    if scope[OUTCOME] is not None:
        yield "minserve.outcome", scope[OUTCOME]
    if scope.get(ERROR_CODE) is not None:
        yield "error.type", scope[ERROR_CODE]
    if trace.model is not None:
        yield "gen_ai.request.model", trace.model
        yield "gen_ai.response.model", trace.model
    if trace.first is None:
        return
    yield "minserve.requests", trace.requests
    yield "minserve.priority", trace.first.priority
    if trace.first.sampling.max_tokens:
        yield from _parameters(trace.first.sampling)
    yield "gen_ai.usage.input_tokens", scope[INFERENCE].tokens_in
    yield "gen_ai.usage.output_tokens", scope[INFERENCE].tokens_out
    if trace.finish_reasons:
        yield "gen_ai.response.finish_reasons", sorted(trace.finish_reasons)


def _parameters(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of sampling parameters; a span has those of its first prompt."""
    for name in PARAMETERS:
        yield f"gen_ai.request.{name}", getattr(params, name)


def _parts(sent_at: int, finished: Finished) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each phase of an engine request, in nanoseconds since 1970."""
    timing, start = finished.timing, sent_at
    for name, seconds in (
        ("queue", timing.queue),
        ("prefill", timing.prefill),
        ("decode", timing.decode),
    ):
        if seconds is not None:
            stop = start + int(seconds * 1e9)
            yield name, start, stop
            start = stop


def load() -> Exporter:
    """Return an exporter that is configured by the OTEL_* variables.

    Raises ConfigError if the packages are not installed or the variables cannot be used.
    """
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--traces otlp: {error}; pip install 'minserve[otel]'") from error
    try:
        named = Resource({"service.name": "minserve"})
        provider = TracerProvider(
            resource=Resource.create().merge(named).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BatchSpanProcessor(span_exporter()))
    except Exception as error:
        raise ConfigError(f"--traces otlp: {error}") from error
    return Exporter(provider)


def span_exporter() -> SpanExporter:
    """Return the OpenTelemetry SDK's exporter for OTLP over HTTP; tests replace it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
