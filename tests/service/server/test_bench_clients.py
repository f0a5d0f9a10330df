"""What `vllm bench serve` sends to completions and chat, and how it reads the stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.chat import chat_runner
from tests.service.live import listening

TOKENS = 12


def complete(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """One streamed request as a benchmark makes it: chunks with choices are tokens, the first one's
    time is the time to first token; a chunk without choices brings the usage."""
    seen: dict[str, Any] = {"text": "", "chunks": 0, "usage": None, "done": False}
    headers = {"x-request-id": "bench-7-0", "authorization": "Bearer none"}
    with httpx.stream("POST", url, json=payload, headers=headers, timeout=30) as response:
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "bench-7-0"
        for line in response.iter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                seen["done"] = True
                continue
            chunk = json.loads(data)
            assert chunk["id"].endswith("-bench-7-0")
            if choices := chunk.get("choices"):
                choice = choices[0]
                text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                seen["text"] += text or ""
                seen["chunks"] += 1
            elif usage := chunk.get("usage"):
                seen["usage"] = usage
    return seen


PAYLOAD = {
    "model": "fake", "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None,
    "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
}  # fmt: skip
CHAT = {
    "model": "fake", "max_completion_tokens": TOKENS, "stream": True,
    "stream_options": {"include_usage": True}, "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        ("/v1/completions", {**PAYLOAD, "prompt": "hello uvwx"}),
        ("/v1/completions", {**PAYLOAD, "prompt": [117, 118, 119, 120]}),
        ("/v1/chat/completions", CHAT),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0}])
def test_every_token_is_a_chunk_and_the_usage_comes_last(
    tmp_path: Path, path: str, payload: dict[str, Any], extra: dict[str, Any]
) -> None:
    with listening(chat_runner(tmp_path)) as (url, _):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert (model["id"], model["root"]) == ("fake", "fake")
        seen = complete(f"{url}{path}", {**payload, **extra})
    assert seen["done"]
    # End-of-text is ignored: the answer goes on behind z.
    assert seen["chunks"] == seen["usage"]["completion_tokens"] == TOKENS
    assert seen["usage"]["prompt_tokens"] > 0


def test_an_answer_without_text_is_a_chunk_still(tmp_path: Path) -> None:
    with listening(chat_runner(tmp_path)) as (url, _):
        payload = {**PAYLOAD, "prompt": "z", "ignore_eos": False, "temperature": 0}
        seen = complete(f"{url}/v1/completions", payload)
    assert (seen["chunks"], seen["text"], seen["usage"]["completion_tokens"]) == (1, "", 0)
