"""RequestBodies: the random request bodies of a load test."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from service.terminal.bench.lengths import Lengths
from service.terminal.bench.prompts import Passages, Text, Unit

Endpoint = Literal["generate", "score", "completions"]
PATHS: dict[Endpoint, str] = {
    "generate": "/v1/generate",
    "score": "/v1/score",
    "completions": "/v1/completions",
}


@dataclass(frozen=True)
class RequestOptions:
    """The options of a workload's requests."""

    prompt_lengths: Lengths  # characters, or token ids
    answer_lengths: Lengths  # tokens
    endpoint: Endpoint = "generate"
    stream: bool = True
    batch: int = 1  # prompts of one request
    books: tuple[Path, ...] = ()  # files and folders whose passages are the prompts; or
    unit: Unit = "chapter"  # of their passages
    text: Path | None = None  # a text file to cut prompts from; or
    lines: Path | None = None  # a text file with one prompt per line; or
    vocabulary: int | None = None  # prompts are token ids below this number
    temperature: float = 0.8
    model: str | None = None
    extra: dict[str, Any] | None = None  # further fields of the body

    @property
    def streams(self) -> bool:
        """Whether the requests ask for streams."""
        return self.stream and self.endpoint != "score"


class Body(NamedTuple):
    """A request's body."""

    data: bytes
    prompt_bytes: int  # of its prompts in UTF-8; 0 for token ids


class RequestBodies:
    """An endless sequence of request bodies, the same for the same seed."""

    def __init__(self, asked: RequestOptions, seed: int) -> None:
        """Load the prompts. Raises OSError and ValueError for a file that cannot be used."""
        if asked.batch < 1:
            raise ValueError(f"--batch is {asked.batch}; allowed: at least 1")
        self._asked = asked
        self._random = random.Random(seed)
        self._prompt = self._source(asked)

    def _source(self, asked: RequestOptions) -> Callable[[], str | list[int]]:
        lengths, choice = asked.prompt_lengths, self._random
        if asked.vocabulary is not None:
            ids = range(asked.vocabulary)
            return lambda: choice.choices(ids, k=lengths.draw(choice))
        if asked.lines is not None:
            lines = [line for line in asked.lines.read_text(encoding="utf-8").splitlines() if line]
            if not lines:
                raise ValueError(f"{asked.lines} has no lines")
            return lambda: choice.choice(lines)
        if asked.books:
            passages = Passages(asked.books, asked.unit)
            return lambda: passages.draw(choice)
        text = Text(asked.text)
        return lambda: text.cut(lengths.draw(choice), choice)

    def draw(self) -> Body:
        """Return the next body."""
        asked = self._asked
        prompts = [self._prompt() for _ in range(asked.batch)]
        body: dict[str, Any] = {}
        if asked.model is not None:
            body["model"] = asked.model
        if asked.endpoint == "score":
            body["texts"] = prompts
        else:
            body |= {
                "max_tokens": asked.answer_lengths.draw(self._random),
                "temperature": asked.temperature,
                "ignore_eos": True,
                "seed": self._random.getrandbits(31),
            }
            if asked.endpoint == "generate":
                body |= {"prompts": prompts, "stream": asked.stream}
            else:
                body |= {"prompt": prompts if len(prompts) > 1 else prompts[0]}
                if asked.stream:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
        size = sum(len(prompt.encode()) for prompt in prompts if isinstance(prompt, str))
        return Body(msgspec.json.encode(body | (asked.extra or {})), size)
