"""Log-probabilities of prompt tokens, in blocks of rows.

A prompt of any length can be scored: at no time are there logits for more than a block of its
positions. On a GPU the block is read while it is still in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.device import upload
from engine.distribution import token_reports
from engine.plan import PrefillChunk, Scored
from engine.reports import Reports

BLOCK_BYTES = 64 * 2**20  # of fp32 logits that exist at a time
# Rows of the matrix product that forms the logits: fewer leave parts of its tiles without work.
_TILE_ROWS = 128


def score(
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden: Tensor,
    chunks: Sequence[PrefillChunk],
) -> Tensor | None:
    """Reports of every target of `chunks`, one after the other; None without targets.

    hidden [tokens, d_model] holds the chunks' positions packed; `logits` maps rows of it to fp32
    [rows, vocab_size]. Reports have room for the most best tokens that a chunk wants. Does not wait
    for the device.
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
    block = _block_rows(vocab_size, hidden.device, in_cache=top <= ops.MOST_TOP)
    at = upload(positions, torch.int64, hidden.device).split(block)
    wanted = upload(targets, torch.int64, hidden.device).split(block)
    blocks = [
        token_reports(logits(hidden[rows]), tokens, top)
        for rows, tokens in zip(at, wanted, strict=True)
    ]
    return torch.cat(blocks)


def _block_rows(vocab_size: int, device: torch.device, in_cache: bool) -> int:
    """Positions whose logits exist at a time; in_cache: in two thirds of the GPU's L2, where that
    is enough for a tile of the matrix product."""
    row_bytes = 4 * vocab_size
    rows = BLOCK_BYTES // row_bytes
    if in_cache and device.type == "cuda":
        cached = torch.cuda.get_device_properties(device).L2_cache_size * 2 // 3 // row_bytes
        rows = min(rows, max(_TILE_ROWS, cached // _TILE_ROWS * _TILE_ROWS))
    return max(1, rows)


def to_scored(chunks: Sequence[PrefillChunk], reports: Tensor) -> tuple[list[Scored], list[int]]:
    """The scores of each chunk that has targets, and the keys whose logits were not finite: there
    every log-probability is none. `reports` is in host memory."""
    scored: list[Scored] = []
    non_finite: list[int] = []
    words, chosen, at = reports.numpy(), ops.read_reports(reports).chosen.numpy(), 0
    for chunk in chunks:
        targets = chunk.targets or ()
        first = next((index for index, target in enumerate(targets) if target >= 0), None)
        if first is None:
            continue
        end = at + sum([target >= 0 for target in targets])
        mine = words[at:end, : ops.words_of_report(chunk.score_top)].tobytes()
        scored.append(Scored(chunk.key, chunk.start + first + 1, Reports(chunk.score_top, mine)))
        if not np.isfinite(chosen[at:end]).all():
            non_finite.append(chunk.key)
        at = end
    return scored, non_finite
