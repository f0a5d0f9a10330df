"""The whole product: a real process, a real socket, bundled models, the real openai client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Server
from tests.golden.greedy import GOLDEN


def _generate(url: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_golden_texts_in_one_batch(server: Server) -> None:
    texts = [one for one in GOLDEN if one["model"] == server.model]  # type: ignore[attr-defined]
    answer = _generate(
        server.url,
        prompts=[one["prompt"] for one in texts],
        max_tokens=[one["tokens"] for one in texts],
        temperature=0,
        ignore_eos=True,
    )
    assert [result["text"] for result in answer["results"]] == [one["text"] for one in texts]
    assert {result["finish_reason"] for result in answer["results"]} == {"length"}


def test_streamed_text_equals_the_plain_one(server: Server) -> None:
    body = {"prompts": ["ROMEO:", "JULIET:"], "max_tokens": 40, "temperature": 0.9, "seed": 7}
    plain = [result["text"] for result in _generate(server.url, **body)["results"]]
    streamed = ["", ""]
    with httpx.stream(
        "POST", f"{server.url}/v1/generate", json={**body, "stream": True}, timeout=120
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        frame = json.loads(line.removeprefix("data: "))
        if "index" in frame:
            streamed[frame["index"]] += frame["text"]
    assert streamed == plain
    assert plain[0] != plain[1]


def test_concurrent_clients_get_what_each_gets_alone(server: Server) -> None:
    prompts = [f"{'What news, my lord? ' * n}Speak, number {n}:" for n in range(1, 13)]
    body = {"max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": True}

    def ask(prompt: str) -> dict[str, Any]:
        result: dict[str, Any] = _generate(server.url, prompts=[prompt], **body)["results"][0]
        return result

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    for one, other in zip(alone, together, strict=True):
        pairs = zip(one["token_ids"], other["token_ids"], strict=True)
        for position, (mine, theirs) in enumerate(pairs):
            if mine == theirs:
                continue
            best = sorted(one["logprobs"]["top_logprobs"][position].values(), reverse=True)
            assert best[0] - best[1] < 1e-4, "a text changed where its margin was wide"
            break


def test_score_is_the_sum_of_what_generate_reports(server: Server) -> None:
    result = _generate(
        server.url, prompts=["KING:"], max_tokens=20, temperature=0, logprobs=0, ignore_eos=True
    )["results"][0]
    item = {"context": "KING:", "continuations": [result["text"]]}
    response = httpx.post(f"{server.url}/v1/score", json={"items": [item]}, timeout=120)
    assert response.status_code == 200, response.text
    scored = response.json()["results"][0]["continuations"][0]
    assert scored["is_greedy"] is True
    assert abs(scored["logprob"] - sum(result["logprobs"]["token_logprobs"])) < 1e-3


def test_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    request = {"model": model, "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0, "seed": 1}
    plain = client.completions.create(**request)  # type: ignore[call-overload]
    parts = list(client.completions.create(**request, stream=True))  # type: ignore[call-overload]
    assert plain.usage.completion_tokens == 16
    assert "".join(part.choices[0].text for part in parts if part.choices) == plain.choices[0].text


def test_lm_eval_finds_the_greedy_continuations(server: Server) -> None:
    """By its own rule: a token is greedy where its log-probability is the very float of the best
    alternative, over the echo without the one token that is drawn after it."""
    contexts = ["ROMEO:", "KING HENRY VI:\n", "To be, or not to be", "Enter the"]
    answers = _generate(
        server.url, prompts=contexts, max_tokens=24, temperature=0, ignore_eos=True
    )["results"]
    pairs = []
    for context, answer in zip(contexts, answers, strict=True):
        before, after = list(context.encode()), answer["token_ids"]
        changed = [*after[:-1], (after[-1] + 1) % 256]
        pairs += [(before, after), (before, changed), (before, list(b"zq9\xff"))]
    request = {
        "model": server.model,  # type: ignore[attr-defined]
        "prompt": [before + after for before, after in pairs],
        "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=120)
    assert response.status_code == 200, response.text
    items = [{"context": before, "continuations": [after]} for before, after in pairs]
    scored = httpx.post(f"{server.url}/v1/score", json={"items": items}, timeout=120).json()
    verdicts = []
    for choice, (before, after), item in zip(
        response.json()["choices"], pairs, scored["results"], strict=True
    ):
        own = choice["logprobs"]["token_logprobs"][len(before) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(before) : -1]
        assert len(own) == len(after)
        verdicts.append(all(one == max(top.values()) for one, top in zip(own, tops, strict=True)))
        (same,) = item["continuations"]
        assert verdicts[-1] is same["is_greedy"]
        assert abs(sum(own) - same["logprob"]) < 1e-3
    assert verdicts == [True, False, False] * len(contexts)


def test_no_chat_without_a_template(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(
            model=server.model,  # type: ignore[attr-defined]
            messages=[{"role": "user", "content": "Speak"}],
        )


def test_bad_requests_leave_the_engine_alive(server: Server) -> None:
    for body, status in (
        (b"{", 400),
        (b'{"prompts": ["\xff"]}', 400),
        (b'{"prompts": []}', 400),
        (b'{"prompts": [""]}', 400),
        (b'{"prompts": [[100000]]}', 400),
        (b'{"prompts": ["a"], "temperature": NaN}', 400),
        (b'{"prompts": ["a"], "nonsense": 1}', 400),
    ):
        response = httpx.post(
            f"{server.url}/v1/generate",
            content=body,
            headers={"content-type": "application/json"},
        )
        assert response.status_code == status, body
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, body
    assert len(_generate(server.url, prompts=["a"], max_tokens=3)["results"]) == 1


def test_metrics_count_what_was_served(server: Server) -> None:
    def generated() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        name = "minserve_generation_tokens_total "
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))

    before = generated()
    _generate(server.url, prompts=["a"], max_tokens=5, ignore_eos=True)
    assert generated() == before + 5


@pytest.mark.slow
def test_the_default_model_is_told_at_start_and_offers_authors() -> None:
    running = Server("--device", "cpu", "--threads", "1", model=None)
    try:
        (model,) = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert model["id"] == "library-mingru" and len(model["starts"]) == 6
        start = model["starts"][0]["text"]
        (result,) = _generate(running.url, prompts=[start], max_tokens=20, seed=1)["results"]
        assert len(result["token_ids"]) == 20 and result["text"]
    finally:
        assert running.stop() == 0
    told = [line for line in running.lines if "--model shakespeare-mingru" in line]
    assert len(told) == 1


def test_sigterm_lets_a_stream_of_a_server_of_8_bit_weights_finish() -> None:
    running = Server("--quantize", "int8", "--device", "cpu", "--threads", "2")
    model = httpx.get(f"{running.url}/v1/models").json()["data"][0]
    assert model["quantization"] == "int8"
    body = {"prompts": ["ROMEO:"], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/generate", json=body, timeout=120) as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert running.stop() == 0


def test_death_of_the_engine_fails_the_stream_and_ends_a_server_without_restarts() -> None:
    running = Server("--device", "cpu", "--threads", "1", "--engine-restarts", "0")
    body = {"prompts": ["ROMEO:"], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text()
    with httpx.stream("POST", f"{running.url}/v1/generate", json=body, timeout=120) as response:
        lines = response.iter_lines()
        next(line for line in lines if line)
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert running.process.wait(timeout=30) != 0
    assert "Traceback" not in "".join(running.lines)


def test_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", "serve", "--port", port],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2, (done.stdout, done.stderr, time.monotonic() - begun)
    assert port in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
