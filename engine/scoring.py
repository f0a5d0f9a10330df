"""Log-probabilities of prompt tokens, in blocks of rows.

A prompt of any length can be scored: at no time are there logits for more than a block of its
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from engine.device import upload
from engine.distribution import Logprobs, token_logprobs
from engine.messages import TokenLogprobs
from engine.plan import PrefillChunk, Scored

BLOCK_BYTES = 64 * 2**20  # of fp32 logits that exist at a time


def score(
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden: Tensor,
    chunks: Sequence[PrefillChunk],
) -> Logprobs | None:
    """Log-probabilities of every target of `chunks`, one after the other; None without targets.

    hidden [tokens, d_model] holds the chunks' positions packed; `logits` maps rows of it to fp32
    [rows, vocab_size]. Does not wait for the device.
    """
    positions: list[int] = []
    targets: list[int] = []
    base = 0
    for chunk in chunks:
        for index, target in enumerate(chunk.targets or ()):
            if target >= 0:
                positions.append(base + index)
                targets.append(target)
        base += len(chunk.tokens)
    if not positions:
        return None
    top = max(chunk.score_top for chunk in chunks if chunk.targets is not None)
    block = max(1, BLOCK_BYTES // (4 * vocab_size))
    at = upload(positions, torch.int64, hidden.device).split(block)
    wanted = upload(targets, torch.int64, hidden.device).split(block)
    blocks = [
        token_logprobs(logits(hidden[rows]), tokens, top)
        for rows, tokens in zip(at, wanted, strict=True)
    ]
    return Logprobs(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def to_scored(chunks: Sequence[PrefillChunk], logprobs: Logprobs) -> list[Scored]:
    """The scores of each chunk that has targets; `logprobs` is in host memory."""
    spans = [
        (chunk, [index for index, target in enumerate(chunk.targets or ()) if target >= 0])
        for chunk in chunks
    ]
    tops = [chunk.score_top for chunk, indices in spans for _ in indices]
    tokens = iter(to_messages(logprobs, tops))
    return [
        Scored(chunk.key, chunk.start + indices[0] + 1, list(islice(tokens, len(indices))))
        for chunk, indices in spans
        if indices
    ]


def to_messages(logprobs: Logprobs, tops: Sequence[int]) -> list[TokenLogprobs]:
    """One message per row, with tops[row] of the best; `logprobs` is in host memory."""
    columns = (part.tolist() for part in logprobs)
    return [
        TokenLogprobs(chosen, ids[:top], best[:top], is_greedy)
        for top, chosen, is_greedy, ids, best in zip(tops, *columns, strict=True)
    ]
