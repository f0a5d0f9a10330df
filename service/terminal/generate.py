"""`minserve generate`: generates the text of one prompt and writes it as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from engine.client.client import EngineClient
from engine.client.router import EngineRouter
from engine.errors import ConfigError, InvalidRequest
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from service.text.stop import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer


async def generate_text(
    client: EngineClient,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingParams,
    stops: Sequence[str],
    write: Callable[[str], None],
) -> None:
    """Write the text that the model generates after `prompt`, up to the first of `stops`.

    Starts the client's engine and closes the client, on cancellation, too. Raises EngineError.
    """
    engines = EngineRouter([client])
    await client.start()
    try:
        await engines.ready()
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
        request = Request(id=engines.new_id(), prompt=pack_ids(ids), sampling=sampling)
        strings = StopStrings(stops, tokenizer.special_ids)
        decoder, matcher = tokenizer.decoder(after=ids), StopMatcher(strings)
        async for update in engines.submit(request):
            texts = (decoder.feed(token) + strings.marks.get(token, "") for token in update.tokens)
            write(matcher.feed("".join(texts)))
            if matcher.stopped:
                engines.abort([request.id], "stop")
        if not matcher.stopped:
            write(matcher.feed(decoder.flush()) + matcher.flush())
    finally:
        await client.close()


def seed_of(asked: int | None) -> int:
    """Return the engine's seed for a seed as the HTTP API takes it; a random one for None.

    Raises ConfigError for a seed that is out of range.
    """
    if asked is None:
        return secrets.randbelow(2**63)
    if not -(2**63) <= asked < 2**63:
        raise ConfigError(
            f"--seed is {asked}; allowed: an integer from {-(2**63)} to {2**63 - 1}", param="seed"
        )
    return asked % 2**63


def top_k_of(asked: int) -> int:
    """Return the engine's top_k for a top_k as the HTTP API takes it. Raises ConfigError."""
    if not -1 <= asked < 2**31:
        raise ConfigError(
            f"--top-k is {asked}; allowed: 0 or -1 (off) or an integer up to {2**31 - 1}",
            param="top_k",
        )
    return max(asked, 0)
