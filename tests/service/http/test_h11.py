"""Where httptools is not installed, h11 reads the requests: what goes past ASGI on httptools'
connections has to be done by ASGI there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SERVE = r"""
import json, socket, sys
from pathlib import Path

sys.modules["httptools"] = None
import httpx

from service.http.uvicorn_protocol import AutoHTTPProtocol
from tests.service.harness import fake_runner, parse_events, save_byte_tokenizer
from tests.service.live import address, listening, wait_for

assert AutoHTTPProtocol.__name__ == "H11Protocol"
asked = {"prompts": ["ka"], "max_tokens": 4, "temperature": 0}
runner = fake_runner(save_byte_tokenizer(Path(sys.argv[1])), step_seconds=0.002)
with listening(runner, max_body_bytes=300) as (url, service):
    plain = httpx.post(f"{url}/v1/generate", json=asked).json()
    streamed = httpx.post(f"{url}/v1/generate", json={**asked, "stream": True})
    *events, done = parse_events(streamed.text)
    assert done == "[DONE]"
    assert "".join(event["text"] for event in events) == plain["results"][0]["text"]

    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    assert httpx.post(f"{url}/v1/generate", json=asked, headers=upgrade).json()["results"]

    # h11 takes this length for nothing, beside chunks.
    head = b"POST /v1/generate HTTP/1.1\r\nhost: here\r\ncontent-length: "
    with socket.create_connection(address(url), timeout=5) as client:
        chunks = head.replace(b"v1/generate", b"tokenize")
        chunks += b"1\r\ntransfer-encoding: chunked\r\n\r\n200\r\n"
        client.sendall(chunks + bytes(512))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")

    requests = service.lifecycle.runtime.requests
    body = json.dumps({**asked, "max_tokens": 100_000, "ignore_eos": True}).encode()
    with socket.create_connection(address(url), timeout=5) as client:
        client.sendall(head + b"%d\r\n\r\n%b" % (len(body), body))
        wait_for(lambda: requests)
    wait_for(lambda: not requests)
"""


def test_answers_streams_limits_and_leavings(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SERVE, str(tmp_path)], check=True, timeout=60)
