"""Golden texts: how they are written, and which stand in greedy.json.

    python -m tests.golden.greedy MODEL

writes those of a bundled model anew, on the CPU: after its weights have changed, and only then. Of
the texts after PROMPTS it takes the TEXTS with the most different tokens before a small margin.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import resolve
from engine.protocol.events import Finished
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from service.text.tokenizer import Tokenizer

FILE = Path(__file__).parent / "greedy.json"
LEAST_MARGIN = 0.01  # nats between the two best tokens
PROMPTS = (  # beside the model's starts
    "ROMEO:\n",
    "GLOUCESTER:\n",
    "What say you",
    "It was a dark night, and the rain",
    "The old man looked at the sea",
    "Once upon a time there was",
)
TEXTS = 2  # of a model
MOST_TOKENS = 98  # of a text
MOST_BYTES = 160
LEAST_BYTES = 48


class Golden(TypedDict):
    """A greedy text: what a model writes after a prompt, in so many tokens."""

    model: str
    prompt: str
    tokens: int
    text: str


GOLDEN: list[Golden] = json.loads(FILE.read_text(encoding="utf-8"))


class Writer:
    """A bundled model in fp32."""

    def __init__(self, model: str, device: str) -> None:
        self._engine = Engine.load(
            EngineConfig(model=model, device=device, dtype="float32", max_slots=2)
        )
        folder = resolve(model)
        tokenizer = Tokenizer.load(folder, self._engine.info.vocab_size)
        assert tokenizer is not None
        self._tokenizer = tokenizer

    def write(self, prompt: str, tokens: int) -> tuple[str, float]:
        """The greedy text after a prompt, and the smallest margin of its choices in nats."""
        found, margins = self.choose(prompt, tokens)
        return self.decode(found), min(margins)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def choose(self, prompt: str, tokens: int) -> tuple[list[int], list[float]]:
        """The most likely tokens after a prompt, and the margin of each in nats."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2)
        ids = pack_ids(self._tokenizer.encode(prompt))
        self._engine.add(None, Request(id=1, prompt=ids, sampling=sampling, stream=False))
        finished: list[Finished] = []
        while self._engine.has_work:
            for events in self._engine.step().values():
                assert not events.failed
                finished += events.finished
        (answer,) = finished
        margins = [best.top_logprobs[0] - best.top_logprobs[1] for best in answer.logprobs]
        return list(answer.tokens), margins


def _bytes(writer: Writer, tokens: Sequence[int]) -> int:
    return len(writer.decode(tokens).encode())


def rewrite(model: str) -> list[Golden]:
    """The golden texts of a model as it writes now. Raises ValueError if too few are safe."""
    writer = Writer(model, "cpu")
    starts = resolve(model) / "starts.json"
    given = json.loads(starts.read_text(encoding="utf-8")) if starts.exists() else []
    found: list[tuple[int, Golden]] = []
    for prompt in (*(start["text"] for start in given), *PROMPTS):
        tokens, margins = writer.choose(prompt, MOST_TOKENS)
        safe = next((n for n, margin in enumerate(margins) if margin <= 2 * LEAST_MARGIN), None)
        count = max(
            n for n in range(len(tokens[:safe]) + 1) if _bytes(writer, tokens[:n]) <= MOST_BYTES
        )
        if _bytes(writer, tokens[:count]) >= LEAST_BYTES:
            text = writer.decode(tokens[:count])
            golden = Golden(model=model, prompt=prompt, tokens=count, text=text)
            found.append((len(set(tokens[:count])), golden))
    if len(found) < TEXTS:
        raise ValueError(f"{model}: {len(found)} texts have margins above {2 * LEAST_MARGIN}")
    return [golden for _, golden in sorted(found, key=lambda one: -one[0])[:TEXTS]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a bundled model")
    model = parser.parse_args().model
    others = [golden for golden in GOLDEN if golden["model"] != model]
    written = json.dumps([*others, *rewrite(model)], indent=2, ensure_ascii=False)
    FILE.write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
