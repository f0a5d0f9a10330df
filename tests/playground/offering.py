"""A quick service whose model offers texts to begin from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

AUTHORS = ("Jane Austen", "Charles Dickens", "Mark Twain", "Lewis Carroll")
STARTS = [
    {"name": name.lower().replace(" ", "-"), "title": name, "text": f"Author: {name}\n\n"}
    for name in AUTHORS
]
AUSTEN, DICKENS, TWAIN, CARROLL = (f"start:{start['name']}" for start in STARTS)
SENTENCE = "It was a dark night, and"


@contextmanager
def offering(folder: Path, starts: Any = STARTS, **settings: Any) -> Iterator[str]:
    """Its address. `starts`: the content of starts.json; None: there is no such file."""
    if starts is not None:
        (folder / "starts.json").write_text(json.dumps(starts))
    with listening(fake_runner(save_byte_tokenizer(folder)), **settings) as (url, _):
        yield url


def kept(url: str, **headers: str) -> dict[str, int]:
    """The tokens that each kept state has read, by its id."""
    states = httpx.get(f"{url}/v1/states", headers=headers).json()["data"]
    return {state["id"]: state["tokens"] for state in states}
