"""Mutations: valid requests with something wrong in their values, their bytes or their heads."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# Valid, and cheap to answer.
GENERATE: dict[str, Any] = {
    "prompts": ["ROMEO:", [74, 85, 76]],
    "max_tokens": [2, 3],
    "temperature": 0.8,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.05,
    "seed": 7,
    "stop": ["\n\n"],
    "logprobs": 2,
    "logit_bias": {"17": -1.5},
    "stop_token_ids": [3, 4],
    "timeout": 5.0,
}
COMPLETION: dict[str, Any] = {
    "model": "shakespeare-mingru",
    "prompt": ["To be", "or not"],
    "max_tokens": 3,
    "n": 2,
    "best_of": 2,
    "echo": True,
    "logprobs": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "stop": "x",
    "user": "u",
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/generate", GENERATE),
    ("/v1/generate", {**GENERATE, "stream": True}),
    ("/v1/score", {"texts": ["To be, or not to be", [1, 2, 3]]}),
    ("/v1/score", {"items": [{"context": "a", "continuations": ["b", "cd"]}]}),
    ("/v1/completions", COMPLETION),
    (
        "/v1/completions",
        {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", {"prompt": "To be"}),
    ("/detokenize", {"tokens": [84, 111]}),
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**40,
    0.5,
    -0.0,
    1e308,
    5e-324,
    "",
    "a",
    "\x00",
    "\ud800",
    "\U0010ffff",
    "é" * 40,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [[[[]]]],
    ["a"] * 50,
    list(range(300)),
    {"0": 0},
    {"-1": 1},
    "1",
    "NaN",
]
TOKENS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-",
    b"01",
    b"null",
    b"true",
    b"[" * 200,
    b"{" * 200,
    b'{"a":' * 100,
    b"]",
    b"}",
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\xc3",
    b"\x00",
    b",",
    b":",
    b"9" * 400,
    b"\xef\xbb\xbf",
    b"/**/",
    b"'",
    b"\r\n",
    b" " * 1000,
]
HEADERS = [
    b"content-length: 5",
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip",
    b"content-type: text/plain",
    b"content-type: application/json; charset=utf-16",
    b"content-type:",
    b"content-encoding: gzip",
    b"expect: 100-continue",
    b"connection: close",
    b"connection: upgrade\r\nupgrade: websocket",
    b"upgrade: h2c",
    b"x-request-id: \xff\x00",
    b"x-request-id: " + b"a" * 500,
    b"a" * 9000 + b": b",
    b"x: " + b"y" * 40_000,
    b": empty",
    b" folded: line",
    b"no colon",
    b"host:",
    b"authorization: Bearer",
    b"authorization: Bearer \xe9",
    b"origin: null",
    b"range: bytes=0-1",
    b"accept-encoding: gzip",
]
PATHS = [
    b"/", b"", b"*", b"//v1/generate", b"/v1/generate/", b"/v1/generate?x=1", b"/v1/%67enerate",
    b"/v1/models/%00", b"/v1/models/%ff", b"/v1/models/../../etc/passwd", b"/metrics", b"/health",
    b"/openapi.json", b"/docs", b"/admin", b"/admin/reload", b"http://x/v1/generate", b"/\xff",
    b"/v1/models/" + b"a" * 5000, b"/v1/generate#x", b"/v1\\generate", b"/ready",
]  # fmt: skip
METHODS = [
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"PATCH",
    b"TRACE",
    b"X",
    b"get",
]


class Mutator:
    """An endless sequence of wrong requests, as bytes; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> bytes:
        """Return a request with a wrong body and, now and then, a wrong head."""
        choice = self._random
        path, seed = choice.choice(SEEDS)
        value: Any = copy.deepcopy(seed)
        for _ in range(choice.choice([0, 1, 1, 2, 4])):
            value = self._wrong_value(value)
        body = json.dumps(value).encode("utf-8", "surrogatepass")
        for _ in range(choice.choice([0, 0, 1, 1, 3, 10])):
            body = self._wrong_bytes(body)
        method, target = b"POST", path.encode()
        headers = [b"host: x", b"content-type: application/json"]
        length = b"content-length: %d" % len(body)
        if choice.random() < 0.25:
            match choice.randrange(5):
                case 0:
                    method = choice.choice(METHODS)
                case 1:
                    target = choice.choice(PATHS)
                case 2:
                    headers.insert(choice.randrange(3), choice.choice(HEADERS))
                case 3:
                    headers.append(b"transfer-encoding: chunked")
                    length = b"x: y"
                    body = self._chunked(body)
                case _:
                    headers.pop(choice.randrange(2))
        head = b"\r\n".join([method + b" " + target + b" HTTP/1.1", *headers, length])
        if choice.random() < 0.05:
            head = self._wrong_bytes(head)
        return head + b"\r\n\r\n" + body

    def _chunked(self, body: bytes) -> bytes:
        cut = self._random.randrange(len(body) + 1)
        parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part]
        whole = b"".join(parts) + b"0\r\n\r\n"
        return self._wrong_bytes(whole) if self._random.random() < 0.3 else whole

    def _wrong_value(self, value: Any) -> Any:
        """Replace, remove, add or double something anywhere in a JSON value."""
        choice = self._random
        if isinstance(value, dict) and value and choice.random() < 0.8:
            key = choice.choice(list(value))
            match choice.randrange(8):
                case 0:
                    del value[key]
                case 1:
                    value[choice.choice(["x", key + " ", key.upper(), "", "\x00"])] = value[key]
                case _:
                    value[key] = self._wrong_value(value[key])
            return value
        if isinstance(value, list) and value and choice.random() < 0.8:
            place = choice.randrange(len(value))
            match choice.randrange(4):
                case 0:
                    del value[place]
                case 1:
                    value *= choice.choice([2, 20])
                case _:
                    value[place] = self._wrong_value(value[place])
            return value
        return copy.deepcopy(choice.choice(VALUES))

    def _wrong_bytes(self, data: bytes) -> bytes:
        choice = self._random
        start = choice.randrange(len(data) + 1)
        end = min(len(data), start + choice.choice([1, 1, 2, 8, 64]))
        match choice.randrange(5):
            case 0:
                return data[:start] + data[end:]
            case 1:
                return data[:start] + choice.randbytes(end - start) + data[end:]
            case 2:
                return data[:end] + data[start:]
            case 3:
                return data[:start]
            case _:
                return data[:start] + choice.choice(TOKENS) + data[start:]
