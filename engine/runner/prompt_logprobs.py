"""Log-probabilities of prompt tokens, computed in blocks of positions.

A prompt of any length can be scored, because logits exist only for one block of its positions at a
time. On a GPU the block is read while it is still in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.ops.upload import UploadRing
from engine.protocol.logprobs import MOST_TOP, PackedLogprobs, words_of_report
from engine.runner.sampling.random_streams import token_reports
from engine.step_plan import PrefillChunk, Scored

BLOCK_BYTES = 64 * 2**20  # fp32 logits that exist at a time
# Rows of a tile of the matrix product for the logits; with fewer, parts of the tile are idle.
_TILE_ROWS = 128


def score(
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden: Tensor,
    chunks: Sequence[PrefillChunk],
    uploads: UploadRing,
) -> Tensor | None:
    """Return the reports of all targets of `chunks`, in order; None without targets.

    Does not wait for the device.

    Args:
        logits: maps rows of `hidden` to fp32 [rows, vocab_size].
        vocab_size: number of logits.
        hidden: [tokens, d_model], the chunks' positions packed.
        chunks: the chunks.
        uploads: for the indices.

    Returns:
        int32 [targets, words]; each report has room for the largest number of top tokens requested.
    """
    positions, targets, base = [], [], 0
    for chunk in chunks:
        if chunk.targets is not None:
            wanted = np.frombuffer(chunk.targets, np.int32)
            scored = np.flatnonzero(wanted >= 0)
            positions.append(base + scored)
            targets.append(wanted[scored].astype(np.int64))
        base += len(chunk.tokens)
    if not any(map(len, positions)):
        return None
    top = max(chunk.score_top for chunk in chunks if chunk.targets is not None)
    block = _block_rows(vocab_size, hidden.device, in_cache=top <= MOST_TOP)
    both = np.stack([np.concatenate(positions), np.concatenate(targets)])
    at, tokens = uploads.put(both)
    blocks = [
        token_reports(logits(hidden[rows]), of_rows, top)
        for rows, of_rows in zip(at.split(block), tokens.split(block), strict=True)
    ]
    return torch.cat(blocks)


def _block_rows(vocab_size: int, device: torch.device, in_cache: bool) -> int:
    """Return how many positions' logits exist at a time.

    `in_cache`: they fill at most two thirds of the GPU's L2 cache, if that is enough for a tile of
    the matrix product.
    """
    row_bytes = 4 * vocab_size
    rows = BLOCK_BYTES // row_bytes
    if in_cache and device.type == "cuda":
        cached = torch.cuda.get_device_properties(device).L2_cache_size * 2 // 3 // row_bytes
        rows = min(rows, max(_TILE_ROWS, cached // _TILE_ROWS * _TILE_ROWS))
    return max(1, rows)


def to_scored(chunks: Sequence[PrefillChunk], reports: Tensor) -> tuple[list[Scored], list[int]]:
    """Return the scores of each chunk that has targets, and the keys with non-finite logits.

    `reports` is in host memory. A row whose logits contain NaN or infinity has only non-finite
    log-probabilities.
    """
    scored: list[Scored] = []
    non_finite: list[int] = []
    words, chosen, at = reports.numpy(), ops.read_reports(reports).chosen.numpy(), 0
    for chunk in chunks:
        if chunk.targets is None:
            continue
        indices = np.flatnonzero(np.frombuffer(chunk.targets, np.int32) >= 0)
        if not len(indices):
            continue
        end, start = at + len(indices), chunk.start + int(indices[0]) + 1
        mine = words[at:end, : words_of_report(chunk.score_top)].tobytes()
        scored.append(Scored(chunk.key, start, PackedLogprobs(chunk.score_top, mine)))
        if not np.isfinite(chosen[at:end]).all():
            non_finite.append(chunk.key)
        at = end
    return scored, non_finite
