"""Log-probabilities of prompt tokens, in blocks of rows.

A prompt of any length can be scored: at no time are there logits for more than a block of its
positions. Where only the targets' own log-probabilities are wanted, one pass over a block finds
them, on a GPU while the block is still in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from engine import ops
from engine.device import upload
from engine.distribution import Logprobs, token_logprobs
from engine.messages import TokenLogprobs
from engine.plan import PrefillChunk, Scored

BLOCK_BYTES = 64 * 2**20  # of fp32 logits that exist at a time
# Rows of the matrix product that forms the logits: fewer leave parts of its tiles without work.
_TILE_ROWS = 128


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
    block = _block_rows(vocab_size, hidden.device, in_cache=top == 0)
    at = upload(positions, torch.int64, hidden.device).split(block)
    wanted = upload(targets, torch.int64, hidden.device).split(block)
    blocks = [
        _logprobs(logits(hidden[rows]), tokens, top)
        for rows, tokens in zip(at, wanted, strict=True)
    ]
    return Logprobs(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    if top:
        return token_logprobs(logits, tokens, top)
    chosen, is_greedy = ops.target_logprobs(logits, tokens)
    none = tokens.new_empty(len(tokens), 0)
    return Logprobs(chosen, is_greedy, none, chosen.new_empty(len(tokens), 0))


def _block_rows(vocab_size: int, device: torch.device, in_cache: bool) -> int:
    """Positions whose logits exist at a time; in_cache: in two thirds of the GPU's L2, where that
    is enough for a tile of the matrix product."""
    row_bytes = 4 * vocab_size
    rows = BLOCK_BYTES // row_bytes
    if in_cache and device.type == "cuda":
        cached = torch.cuda.get_device_properties(device).L2_cache_size * 2 // 3 // row_bytes
        rows = min(rows, max(_TILE_ROWS, cached // _TILE_ROWS * _TILE_ROWS))
    return max(1, rows)


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
