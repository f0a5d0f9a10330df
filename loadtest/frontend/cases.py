"""The loads of the front end, each with its bar, and the steady pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENDLESS = 1_000_000  # tokens: a stream that outlives its measurement


@dataclass(frozen=True)
class Case:
    """A load: `connections` clients, each of which asks again when it has its answer."""

    name: str
    bar: float  # of the ceiling's tokens/s
    connections: int = 256
    prompts: int = 1  # of one request
    tokens: int = ENDLESS  # of one prompt
    stream: bool = True
    chunk: int = 1  # tokens of one event
    spread: int = 0  # streams are so many tokens shorter or longer, at most
    logprobs: bool = False  # with each token's own

    @property
    def body(self) -> dict[str, Any]:
        """The body of its requests."""
        return self.body_of(self.tokens)

    def body_of(self, tokens: int) -> dict[str, Any]:
        """Return the body of a request for this many tokens."""
        body: dict[str, Any] = {
            "prompts": ["ROMEO:"] * self.prompts,
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": 1,
        }
        if self.stream:
            # With stop strings the front end must see every token, so plain answers have none.
            body |= {"stream": True, "stop": ["\n\nJULIET:", "The end."]}
        if self.logprobs:
            body["logprobs"] = 0
        if self.chunk > 1:
            body["stream_interval"] = self.chunk
        return body

    @property
    def sample(self) -> dict[str, Any]:
        """The body of a request whose answer `Sample` is made from.

        A stream has three events per prompt, if the first one comes with the first token. A plain
        answer is whole.
        """
        return self.body | ({"max_tokens": 1 + 2 * self.chunk} if self.stream else {})


CASES = [
    Case("256 streams, a token an event", 0.65),
    Case("256 streams, 16 tokens an event", 0.65, chunk=16),
    Case("256 plain requests of 128 tokens", 0.50, tokens=128, stream=False),
    Case(
        "one plain batch of 256 prompts", 0.50, connections=1, prompts=256, tokens=128, stream=False
    ),
    Case("4 streams of 64 prompts", 0.65, connections=4, prompts=64),
    Case("256 short streams of 128 tokens", 0.65, tokens=128),
    Case("256 short streams of 64 to 192 tokens", 0.65, tokens=128, spread=64),
    Case(
        "256 plain requests of 128 tokens with log-probabilities",
        0.50,
        tokens=128,
        stream=False,
        logprobs=True,
    ),
]
