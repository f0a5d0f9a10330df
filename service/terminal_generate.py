"""`minserve generate`: one prompt's text, written as it comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from engine.client import EngineClient
from engine.errors import InvalidRequest
from engine.messages import Request, SamplingParams, pack_ids
from service.stop import StopMatcher, StopStrings
from service.tokenizer import Tokenizer


async def generate_text(
    client: EngineClient,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingParams,
    stops: Sequence[str],
    write: Callable[[str], None],
) -> None:
    """Starts the client's engine, writes the answer to `prompt` up to the first of `stops`, and
    closes the client, also when it is cancelled. Raises EngineError."""
    await client.start()
    try:
        await client.ready()
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
        request = Request(id=client.new_id(), prompt=pack_ids(ids), sampling=sampling)
        strings = StopStrings(stops, tokenizer.special_ids)
        decoder, matcher = tokenizer.decoder(after=ids), StopMatcher(strings)
        async for update in client.submit(request):
            texts = (decoder.feed(token) + strings.marks.get(token, "") for token in update.tokens)
            write(matcher.feed("".join(texts)))
            if matcher.stopped:
                client.abort([request.id], "stop")
        if not matcher.stopped:
            write(matcher.feed(decoder.flush()) + matcher.flush())
    finally:
        await client.close()


def random_seed() -> int:
    """A seed for those who do not ask for one."""
    return secrets.randbelow(2**63)
