"""Damaged snapshots: every one is refused with a reason, or is a state that works.

Real files are downloaded first. Each is then sent with something wrong in its bytes, its length or
its header, as an import or along with a request. Every other one is sent as format 1, which has no
digest, so that all other checks are reached. A snapshot that is taken must give an answer and come
back as it was sent.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.with_httpx import httpx

KEPT = 20  # answers that should not be, to be shown
REASONS = {
    "state_malformed", "state_mismatch", "body_too_large", "invalid_value", "invalid_json",
}  # fmt: skip
ID = "fuzzed"
NUMBERS: list[Any] = [
    0, -1, 1, 2, 127, 128, 129, 2**31, 2**32, 2**53, 2**63, 2**64, 1.0, 1e300, True, None, "4", [],
    {},
]  # fmt: skip
TEXTS = [
    "",
    "0",
    "-1",
    "1",
    "1e9",
    "9" * 30,
    "٣",
    "nan",
    "\0",
    "\ud800",
    "x" * 5000,
    "1,1,1,1,1",
    "F64",
]


@dataclass
class Outcome:
    """The statuses with their error codes, and everything that was wrong."""

    endings: Counter[str] = field(default_factory=Counter)
    taken: int = 0
    wrong: list[str] = field(default_factory=list)

    def complain(self, words: str) -> None:
        if len(self.wrong) < KEPT:
            self.wrong.append(words)


def fuzz_snapshots(
    url: str, requests: int, seed: int, watch: Callable[[int], None] = lambda done: None
) -> Outcome:
    """Send `requests` snapshots, one after the other.

    `watch` is called now and then with the number done. Raises httpx.HTTPError if the server is
    gone.
    """
    chance, outcome = random.Random(seed), Outcome()
    with httpx.Client(base_url=url, timeout=60.0) as client:
        files = _download(client)
        for done in range(requests):
            content = chance.choice(files)
            if chance.random() < 0.5:
                content = without_digest(content)
            content = damaged(content, chance)
            if chance.random() < 0.125:
                _send_along(client, content, outcome)
            else:
                _import(client, content, outcome, check=chance.random() < 0.25)
            if done % 100 == 99:
                watch(done + 1)
        client.delete(f"/v1/states/{ID}")
    return outcome


def _download(client: httpx.Client) -> list[bytes]:
    """Return states after prompts of several lengths, and after an answer."""
    files = []
    for ids in ([1], [1, 2, 3], list(range(20)) * 20):
        made = client.post("/v1/states", json={"prompt": ids, "id": ID}).raise_for_status().json()
        files.append(client.get(f"/v1/states/{made['id']}/content").raise_for_status().content)
    body = {"prompts": [[5, 6]], "max_tokens": 3, "return_state": "snapshot", "ignore_eos": True}
    (result,) = client.post("/v1/generate", json=body).raise_for_status().json()["results"]
    return [*files, base64.b64decode(result["state"]["snapshot"])]


def _import(client: httpx.Client, content: bytes, outcome: Outcome, check: bool) -> None:
    answer = client.post(f"/v1/states/import?id={ID}&ttl=600", content=content)
    if not _taken(answer, outcome) or not check:
        return
    body = {"prompts": [""], "state": ID, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
    used = client.post("/v1/generate", json=body)
    back = client.get(f"/v1/states/{ID}/content")
    if used.status_code != 200 or back.status_code != 200:
        outcome.complain(f"a state that was taken cannot be used: {used.text[:300]}")
    elif _tensors(back.content) != _tensors(content):
        outcome.complain("a state that was taken is another one now")


def _send_along(client: httpx.Client, content: bytes, outcome: Outcome) -> None:
    state = {"snapshot": base64.b64encode(content).decode()}
    body = {"prompts": [[1]], "state": state, "max_tokens": 1}
    _taken(client.post("/v1/generate", json=body), outcome)


def _taken(answer: httpx.Response, outcome: Outcome) -> bool:
    if answer.status_code == 200:
        outcome.endings["200"] += 1
        outcome.taken += 1
        return True
    error = answer.json()["error"]
    outcome.endings[f"{answer.status_code} {error['code']}"] += 1
    if answer.status_code not in (400, 413) or error["code"] not in REASONS or not error["message"]:
        outcome.complain(f"{answer.status_code}: {error}")
    return False


def _tensors(content: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", content)
    return content[8 + length :]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the file with one or several random errors."""
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        content = chance.choice(DAMAGES)(content, chance)
    return content


def without_digest(content: bytes) -> bytes:
    """Return a file of format 2 as a whole file of format 1."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]["digest"]
    header["__metadata__"]["format"] = "minserve.state.1"
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _bits(content: bytes, chance: random.Random) -> bytes:
    raw = bytearray(content)
    for _ in range(chance.choice([1, 1, 4, 32])):
        if raw:
            end = chance.choice([8, 400, len(raw)])
            raw[chance.randrange(min(end, len(raw)))] ^= 1 << chance.randrange(8)
    return bytes(raw)


def _cut(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + content[at + chance.choice([1, 4, 100, len(content)]) :]


def _put_in(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.randbytes(chance.choice([1, 4, 5000, 2**20])) + content[at:]


def _length(content: bytes, chance: random.Random) -> bytes:
    lengths = [0, 1, 2, 300, 2**16, 2**16 + 1, 2**31, 2**63, 2**64 - 1, len(content) - 8]
    return struct.pack("<Q", chance.choice(lengths) % 2**64) + content[8:]


def _number(content: bytes, chance: random.Random) -> bytes:
    """Change a float of the state, perhaps to one that is not finite, or a token."""
    words = [0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x80000000, 0xFFFFFFFF]
    at = len(content) - 4 * chance.randrange(1, 40)
    if at < 8:
        return content
    return content[:at] + struct.pack("<I", chance.choice(words)) + content[at + 4 :]


def _header(content: bytes, chance: random.Random) -> bytes:
    """Change a value somewhere in the header, or add or remove a name."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
    except (struct.error, ValueError, RecursionError):
        return content
    if not isinstance(header, dict):
        return content
    inner: Any = header
    while isinstance(inner, dict | list) and inner:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = chance.choice(keys)
        if isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.85:
            inner = inner[key]
            continue
        match chance.randrange(4):
            case 0:
                del inner[key]
            case 1 if isinstance(inner, dict):
                inner[f"{key}x"] = inner[key]
            case _:
                inner[key] = chance.choice(TEXTS if isinstance(inner[key], str) else NUMBERS)
        break
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _deep(content: bytes, chance: random.Random) -> bytes:
    text = chance.choice([b"[", b'{"a":', b'"', b"9"]) * chance.choice([10, 1000, 10000])
    return struct.pack("<Q", len(text)) + text + content[8:]


DAMAGES = (_bits, _cut, _put_in, _length, _number, _header, _header, _header, _deep)
