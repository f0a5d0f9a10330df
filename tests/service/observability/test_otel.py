"""Traces: one span per request, its parts, whose child it is, and nothing that was said."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.errors import ConfigError
from service.observability import otel
from service.observability.traces import MOST_TOLD
from tests.service.chat import chat_runner
from tests.service.harness import Service, fake_runner, running, until
from tests.service.inference.test_lifecycle import LONG, Connection

ROOT = Path(__file__).resolve().parents[3]
SECRET = "secret words"
ANY = {"ignore_eos": True}  # every answer has a token
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where spans go; by themselves at once."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(otel, "span_exporter", lambda: memory)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    return memory


@pytest.fixture
async def traced(byte_folder: Path, spans: InMemorySpanExporter) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder), traces="otlp") as service:
        yield service


async def roots(spans: InMemorySpanExporter, count: int = 1) -> list[ReadableSpan]:
    """So many spans of requests, no more."""

    def found() -> list[ReadableSpan]:
        return [one for one in spans.get_finished_spans() if one.kind is SpanKind.SERVER]

    await until(lambda: len(found()) >= count)
    assert len(found()) == count
    return found()


def children(spans: InMemorySpanExporter, root: ReadableSpan) -> list[ReadableSpan]:
    id = root.context.span_id
    found = [one for one in spans.get_finished_spans() if one.parent and one.parent.span_id == id]
    return sorted(found, key=lambda one: (one.start_time, one.end_time))


def all_text(spans: InMemorySpanExporter) -> str:
    return "".join(one.to_json() for one in spans.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_parts(
    traced: Service, spans: InMemorySpanExporter, stream: bool
) -> None:
    body = {
        "prompts": [SECRET], "max_tokens": 4, "temperature": 0.5, "top_k": 3, "seed": 7,
        "stop": ["zzz never"], "priority": 2, "stream": stream, **ANY,
    }  # fmt: skip
    response = await traced.http.post(
        "/v1/generate", json=body, headers={"traceparent": PARENT, "x-request-id": "mine"}
    )
    assert response.status_code == 200
    (root,) = await roots(spans)
    assert root.name == "text_completion fake"
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert dict(root.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "minserve",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "http.request.method": "POST",
        "http.route": "/v1/generate",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "minserve.request_id": "mine",
        "minserve.outcome": "ok",
        "minserve.requests": 1,
        "minserve.priority": 2,
    }
    assert root.status.status_code is StatusCode.UNSET
    parts = children(spans, root)
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    times = [root.start_time, *(part.start_time for part in parts)]
    ends = [part.end_time for part in parts]
    assert times == sorted(times) and ends == sorted(ends)
    assert [part.end_time for part in parts[:2]] == [part.start_time for part in parts[1:]]
    text = all_text(spans)
    assert "secret" not in text and "never" not in text


async def test_every_endpoint_has_its_operation(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with running(chat_runner(tmp_path), traces="otlp") as service:
        await service.post("/v1/generate", {"prompts": ["ab", "cd"], "max_tokens": 1, **ANY})
        await service.post("/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 1, **ANY})
        messages = [{"role": "user", "content": SECRET}]
        await service.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **ANY})
        await service.post("/v1/score", {"texts": [SECRET]})
        await service.http.get("/health")
        await service.http.get("/v1/models")
        found = await roots(spans, 4)
    assert [root.name for root in found] == [
        "text_completion fake", "text_completion fake", "chat fake", "score fake",
    ]  # fmt: skip
    requests = [(root.attributes or {})["minserve.requests"] for root in found]
    assert requests == [2, 2, 1, 1]
    assert [len(children(spans, root)) for root in found] == [6, 6, 3, 2]
    assert "gen_ai.request.max_tokens" not in (found[3].attributes or {})
    assert "secret" not in all_text(spans)


async def test_what_goes_wrong_is_told(traced: Service, spans: InMemorySpanExporter) -> None:
    await traced.post("/v1/generate", {"prompts": [SECRET], "max_tokens": 0}, 400)
    traced.runner.failures.append(RuntimeError("a step goes wrong"))
    await traced.post("/v1/generate", {"prompts": [SECRET]}, 500)
    invalid, failed = await roots(spans, 2)
    assert (invalid.attributes or {})["error.type"] == "invalid_value"
    assert (invalid.attributes or {})["minserve.outcome"] == "invalid"
    assert invalid.status.status_code is StatusCode.UNSET, "which is the client's fault"
    assert (failed.attributes or {})["error.type"] == "step_failed"
    assert failed.status.status_code is StatusCode.ERROR
    assert "secret" not in all_text(spans)


async def test_what_is_refused_before_its_route_is_told(
    byte_folder: Path, spans: InMemorySpanExporter
) -> None:
    key = "abcdefghijklmnop"
    options = {"traces": "otlp", "api_keys": f"alice:{key}", "max_body_bytes": 100}
    async with running(fake_runner(byte_folder), **options) as service:
        await service.post("/v1/generate", {"prompts": [SECRET]}, 401)
        service.http.headers["x-api-key"] = key
        await service.post("/v1/generate", {"prompts": [SECRET * 9]}, 413)
        stranger, long = await roots(spans, 2)
    assert (stranger.attributes or {})["error.type"] == "invalid_api_key"
    assert (long.attributes or {})["error.type"] == "body_too_large"


async def test_an_unexpected_error_is_told(
    traced: Service, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("service.routes.generate.gather", fail)
    await traced.post("/v1/generate", {"prompts": ["a"]}, 500)
    (root,) = await roots(spans)
    assert (root.attributes or {})["error.type"] == "server_error"
    assert root.status.status_code is StatusCode.ERROR
    assert SECRET not in all_text(spans)


async def test_a_client_that_leaves_has_its_span(
    byte_folder: Path, spans: InMemorySpanExporter
) -> None:
    async with running(fake_runner(byte_folder, step_seconds=0.005), traces="otlp") as service:
        connection = Connection("/v1/generate", {"prompts": ["a"], **LONG, "stream": True})
        connection.gone.set()
        await service.app(connection.scope, connection.receive, connection.send)
        (root,) = await roots(spans)
    assert (root.attributes or {})["minserve.outcome"] == "cancelled"
    assert (root.attributes or {})["http.response.status_code"] == 499


async def test_of_a_large_batch_some_parts_are_told(
    byte_folder: Path, spans: InMemorySpanExporter
) -> None:
    async with running(fake_runner(byte_folder), traces="otlp") as service:
        count = MOST_TOLD + 20
        await service.post("/v1/generate", {"prompts": ["a"] * count, "max_tokens": 1, **ANY})
        (root,) = await roots(spans)
        assert (root.attributes or {})["minserve.requests"] == count
        assert len(children(spans, root)) == 3 * MOST_TOLD


async def test_the_standard_variables_hold(
    byte_folder: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shakespeare")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=poets")
    async with running(fake_runner(byte_folder), traces="otlp") as service:
        await service.post("/v1/generate", {"prompts": ["a"], "max_tokens": 1})
        (root,) = await roots(spans)
    assert root.resource.attributes["service.name"] == "shakespeare"
    assert root.resource.attributes["team"] == "poets"


async def test_samplers_hold_and_parents_decide(
    byte_folder: Path, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with running(fake_runner(byte_folder), traces="otlp") as service:
        await service.post("/v1/generate", {"prompts": ["a"], "max_tokens": 1})
        sampled = {"traceparent": PARENT}
        await service.http.post("/v1/generate", json={"prompts": ["a"]}, headers=sampled)
        (root,) = await roots(spans)
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]


async def test_a_service_has_a_name(traced: Service, spans: InMemorySpanExporter) -> None:
    await traced.post("/v1/generate", {"prompts": ["a"], "max_tokens": 1})
    (root,) = await roots(spans)
    assert root.resource.attributes["service.name"] == "minserve"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter posts."""

    taken: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.taken.append((self.path, self.rfile.read(length)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    taken: list[tuple[str, bytes]] = []
    handler = type("Handler", (Collector,), {"taken": taken})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", taken
    server.shutdown()
    thread.join()
    server.server_close()


async def test_spans_are_sent_by_otlp_also_the_last_ones(
    byte_folder: Path,
    collector: tuple[str, list[tuple[str, bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, taken = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    async with running(fake_runner(byte_folder), traces="otlp") as service:
        await service.post("/v1/generate", {"prompts": ["a"], "max_tokens": 2, **ANY})
    names = []
    for path, body in taken:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode", "prefill", "queue", "text_completion fake"]


async def test_nobody_notices_a_collector_that_is_not_there(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(otel, "CLOSE_SECONDS", 0.1)
    async with running(fake_runner(byte_folder), traces="otlp") as service:
        await service.post("/v1/generate", {"prompts": ["a"], "max_tokens": 2, **ANY})


def test_without_the_packages_it_is_a_mistake_in_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'minserve\[otel\]'"):
        otel.load()


def test_nothing_is_imported_where_no_traces_are_taken() -> None:
    code = (
        "import sys\n"
        "from engine.client.client import EngineClient\n"
        "from engine.config import EngineConfig\n"
        "from engine.client.socket_transport import ProcessTransport\n"
        "from service.app.app import create_app\n"
        "from service.settings import Settings\n"
        "create_app(EngineClient(ProcessTransport(EngineConfig())), Settings())\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google')\n"
        "print([name for name in sys.modules if name.startswith(parts)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
