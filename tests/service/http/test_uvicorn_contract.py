"""Each symbol of uvicorn's inside that HttpProtocol, Connection and Server use is there and does as
they rely on; an upgrade of uvicorn that drops or changes one fails here with the symbol's name."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from service.http import uvicorn_protocol

TABLE = re.findall(r"^\| `([\w.]+)` \|", uvicorn_protocol.__doc__ or "", re.MULTILINE)
HEAD = b"GET /path?x=1 HTTP/1.1\r\nhost: here\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def ok(scope: Any, receive: Any, send: Any) -> None:
    """Reads the request, then answers in two bytes."""
    await receive()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


def connected() -> tuple[Any, Transport]:
    """uvicorn's own protocol, as the server makes it, over a transport."""
    config = uvicorn.Config(ok, lifespan="off", log_config=None, server_header=False)
    config.load()
    state = ServerState()
    protocol: Any = HttpToolsProtocol(config=config, server_state=state, app_state={})
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


async def answered() -> tuple[Any, Transport]:
    """A protocol whose first request has been answered."""
    protocol, transport = connected()
    protocol.data_received(HEAD)
    await settle()
    return protocol, transport


async def connection_made() -> None:
    protocol, transport = connected()
    assert protocol.transport is transport and protocol in protocol.connections


async def connection_lost() -> None:
    protocol, _ = connected()
    protocol.data_received(HEAD)
    protocol.connection_lost(None)
    assert protocol.cycle.disconnected and protocol not in protocol.connections
    await settle()


async def data_received() -> None:
    _, transport = await answered()
    assert transport.written.endswith(b"\r\n\r\nok")
    assert parameters(HttpToolsProtocol.data_received) == ["self", "data"]


async def on_message_begin() -> None:
    protocol, _ = connected()
    protocol.on_message_begin()
    assert protocol.scope["type"] == "http" and protocol.url == b"" and protocol.headers == []


async def on_headers_complete() -> None:
    protocol, _ = connected()
    seen: list[Any] = []
    protocol._start_asgi_task = lambda cycle, app: seen.append((cycle, app))
    protocol.data_received(HEAD)
    assert seen == [(protocol.cycle, protocol.app)]
    assert protocol.cycle.scope is protocol.scope and protocol.scope["path"] == "/path"


async def on_body() -> None:
    protocol, _ = connected()
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\nab")
    assert protocol.cycle.body == b"ab" and protocol.cycle.more_body
    await settle()


async def on_message_complete() -> None:
    protocol, _ = connected()
    protocol.data_received(HEAD)
    assert not protocol.cycle.more_body and protocol.cycle.message_event.is_set()
    await settle()


async def on_response_complete() -> None:
    protocol, _ = connected()
    protocol.on_response_complete()
    assert protocol.timeout_keep_alive_task is not None
    protocol._unset_keepalive_if_required()


async def should_upgrade() -> None:
    protocol, _ = connected()
    asked: list[None] = []
    protocol._should_upgrade = lambda: bool(asked.append(None))
    protocol.data_received(UPGRADE)
    assert asked, "uvicorn upgrades without asking _should_upgrade"
    await settle()


async def start_asgi_task() -> None:
    protocol, _ = connected()
    protocol.data_received(HEAD)
    await settle()
    assert parameters(HttpToolsProtocol._start_asgi_task) == ["self", "cycle", "app"]
    cycle = SimpleNamespace(run_asgi=lambda app: app())
    done: list[None] = []

    async def app() -> None:
        done.append(None)

    protocol._start_asgi_task(cycle, app)
    await settle()
    assert done


async def unset_keepalive() -> None:
    protocol, _ = await answered()
    timer = protocol.timeout_keep_alive_task
    protocol._unset_keepalive_if_required()
    assert timer.cancelled() and protocol.timeout_keep_alive_task is None


async def timeout_keep_alive_task() -> None:
    protocol, _ = connected()
    assert protocol.timeout_keep_alive_task is None
    protocol, _ = await answered()
    assert protocol.timeout_keep_alive_task.when() > protocol.loop.time()
    protocol._unset_keepalive_if_required()


async def config() -> None:
    protocol, _ = connected()
    assert protocol.config.app is ok


async def connections() -> None:
    protocol, _ = connected()
    assert protocol.connections is protocol.server_state.connections


async def pipeline() -> None:
    protocol, transport = connected()
    protocol.data_received(HEAD + HEAD)
    assert isinstance(protocol.pipeline, deque) and len(protocol.pipeline) == 1
    cycle, app = protocol.pipeline[0]
    assert cycle is protocol.cycle and app is protocol.app
    protocol.data_received(HEAD)
    assert protocol.pipeline[0][0] is protocol.cycle  # the newest on the left
    await settle()
    assert transport.written.count(b"ok") == 3 and not protocol.pipeline


async def parser() -> None:
    protocol, _ = connected()
    protocol.data_received(HEAD)
    assert protocol.parser.get_method() == b"GET"
    assert protocol.parser.get_http_version() == "1.1"
    assert not protocol.parser.should_upgrade()
    await settle()


async def url_and_headers() -> None:
    protocol, _ = connected()
    protocol.data_received(HEAD)
    assert protocol.url == b"/path?x=1" and protocol.headers == [(b"host", b"here")]
    await settle()


async def per_connection() -> None:
    protocol, _ = connected()
    assert protocol.scope is None and protocol.cycle is None
    assert isinstance(protocol.flow, FlowControl)
    assert protocol.loop is asyncio.get_running_loop()
    assert protocol.logger.name == "uvicorn.error"
    assert protocol.access_logger.name == "uvicorn.access"
    assert isinstance(protocol.server_state.default_headers, list)


def cycle_of(head: bytes = HEAD) -> tuple[Any, Transport]:
    """A request's cycle before anything of it has run."""
    protocol, transport = connected()
    protocol._start_asgi_task = lambda cycle, app: None
    protocol.data_received(head)
    return protocol.cycle, transport


async def cycle_init() -> None:
    assert parameters(RequestResponseCycle.__init__)[1:] == [
        "scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers",
        "message_event", "expect_100_continue", "keep_alive", "on_response",
    ]  # fmt: skip


async def cycle_send() -> None:
    cycle, _ = cycle_of()
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(send.__self__)
        await ok(scope, receive, send)

    await cycle.run_asgi(app)
    assert seen == [cycle]


async def fresh_cycle() -> None:
    cycle, transport = cycle_of()
    assert cycle.transport is transport and cycle.scope["method"] == "GET"
    assert cycle.keep_alive is True and cycle.chunked_encoding is None
    assert not (cycle.disconnected or cycle.response_started or cycle.response_complete)
    assert not cycle.waiting_for_100_continue and cycle.expected_content_length == 0
    assert isinstance(cycle.default_headers, list) and isinstance(cycle.access_log, bool)


async def written_past_send() -> None:
    """What Connection writes by itself leaves the cycle as `send` would."""
    cycle, transport = cycle_of()
    ended: list[None] = []
    cycle.on_response = lambda: ended.append(None)
    headers = [(b"content-length", b"2")]
    await cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
    assert cycle.response_started and cycle.chunked_encoding is False
    assert cycle.expected_content_length == 2 and not ended
    cycle.message_event.clear()
    await cycle.send({"type": "http.response.body", "body": b"ok"})
    assert cycle.response_complete and ended and cycle.message_event.is_set()
    assert transport.written.startswith(STATUS_LINE[200])


async def chunked() -> None:
    cycle, _ = cycle_of()
    await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    assert cycle.chunked_encoding is True


async def flow() -> None:
    cycle, _ = cycle_of()
    assert cycle.flow.write_paused is False
    cycle.flow.pause_writing()
    assert cycle.flow.write_paused is True
    waiting = asyncio.create_task(cycle.flow.drain())
    await settle()
    assert not waiting.done()
    cycle.flow.resume_writing()
    await waiting
    cycle.flow.pause_reading()
    cycle.flow.resume_reading()
    assert cycle.flow.read_paused is False


async def disconnected() -> None:
    cycle, transport = cycle_of()
    cycle.disconnected = True
    assert (await cycle.receive())["type"] == "http.disconnect"
    await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
    assert transport.written == b""


async def waiting_for_100_continue() -> None:
    post = b"POST / HTTP/1.1\r\nhost: here\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n"
    cycle, transport = cycle_of(post)
    assert cycle.waiting_for_100_continue
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
    await cycle.receive()
    assert transport.written == b""


async def ended_early() -> None:
    """A refusal ends a body that is being read: the request is told, and closes at its end."""
    cycle, transport = cycle_of(
        b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    cycle.more_body = cycle.keep_alive = False
    cycle.message_event.set()
    assert (await cycle.receive())["more_body"] is False
    await ok(cycle.scope, lambda: asyncio.sleep(0), cycle.send)
    assert transport.closed and b"connection: close\r\n" in transport.written


async def status_line() -> None:
    assert STATUS_LINE[431] == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"


async def capture_signals() -> None:
    assert parameters(uvicorn.Server.capture_signals) == ["self"]
    assert hasattr(uvicorn.Server(uvicorn.Config(ok)).capture_signals(), "__enter__")


async def handle_exit() -> None:
    assert parameters(uvicorn.Server.handle_exit) == ["self", "sig", "frame"]


async def serve() -> None:
    assert parameters(uvicorn.Server.serve) == ["self", "sockets"]
    assert inspect.iscoroutinefunction(uvicorn.Server.serve)


async def server_state() -> None:
    assert uvicorn.Server(uvicorn.Config(ok)).server_state.connections == set()


async def should_exit() -> None:
    assert uvicorn.Server(uvicorn.Config(ok)).should_exit is False


async def base_class() -> None:
    assert AutoHTTPProtocol is HttpToolsProtocol
    assert issubclass(uvicorn_protocol.HttpProtocol, AutoHTTPProtocol)


OF_PROTOCOL = {
    "_should_upgrade": should_upgrade,
    "_start_asgi_task": start_asgi_task,
    "_unset_keepalive_if_required": unset_keepalive,
    "access_logger": per_connection,
    "config": config,
    "connection_lost": connection_lost,
    "connection_made": connection_made,
    "connections": connections,
    "cycle": per_connection,
    "data_received": data_received,
    "flow": per_connection,
    "headers": url_and_headers,
    "logger": per_connection,
    "loop": per_connection,
    "on_body": on_body,
    "on_headers_complete": on_headers_complete,
    "on_message_begin": on_message_begin,
    "on_message_complete": on_message_complete,
    "on_response_complete": on_response_complete,
    "parser": parser,
    "pipeline": pipeline,
    "scope": per_connection,
    "server_state": per_connection,
    "timeout_keep_alive_task": timeout_keep_alive_task,
    "transport": connection_made,
    "url": url_and_headers,
}
OF_CYCLE = {
    "__init__": cycle_init,
    "access_log": fresh_cycle,
    "chunked_encoding": chunked,
    "default_headers": fresh_cycle,
    "disconnected": disconnected,
    "expected_content_length": written_past_send,
    "flow": flow,
    "keep_alive": ended_early,
    "message_event": written_past_send,
    "more_body": ended_early,
    "on_response": written_past_send,
    "response_complete": written_past_send,
    "response_started": written_past_send,
    "scope": fresh_cycle,
    "send": cycle_send,
    "transport": fresh_cycle,
    "waiting_for_100_continue": waiting_for_100_continue,
}
OF_SERVER = {
    "capture_signals": capture_signals,
    "handle_exit": handle_exit,
    "serve": serve,
    "server_state": server_state,
    "should_exit": should_exit,
}
CHECKS = {"AutoHTTPProtocol": base_class, "STATUS_LINE": status_line}
CHECKS |= {f"AutoHTTPProtocol.{name}": check for name, check in OF_PROTOCOL.items()}
CHECKS |= {f"RequestResponseCycle.{name}": check for name, check in OF_CYCLE.items()}
CHECKS |= {f"Server.{name}": check for name, check in OF_SERVER.items()}


@pytest.mark.parametrize("symbol", sorted(CHECKS))
async def test_uvicorn_has_it(symbol: str) -> None:
    try:
        await CHECKS[symbol]()
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        pytest.fail(f"uvicorn {uvicorn.__version__}: {symbol} is gone or changed: {error}")


def test_the_table_lists_what_is_checked() -> None:
    assert sorted(TABLE) == sorted(CHECKS)
