"""Logits processors: penalties, biases and bans, applied on the device before sampling.

A request's parameters are in the record of its slot, int32 words packed by `record`, so that a step
in a CUDA graph works with whatever sequences its rows have. A record has the addresses of entries
(tokens whose logits change) and of the words in which tokens are counted for penalties.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)

RECORD_WORDS = 8
# what a token adds to its count: once if in the prompt, and for each time in the answer
IN_PROMPT, IN_ANSWER = 1, 2
_MOST = torch.finfo(torch.float32).max

# (token, value added to its logit, position up to which it is added, exclusive)
Entry = tuple[int, float, int]


def pack_entries(entries: Sequence[Entry]) -> bytes:
    """Pack entries, three int32 words each. A value of -infinity bans the token."""
    return b"".join([struct.pack("<ifi", *entry) for entry in entries])


def record(
    counts: int, penalties: tuple[float, float, float], entries: int, entry_count: int
) -> bytes:
    """Pack a record of RECORD_WORDS words.

    Args:
        counts: address of int32 [vocab] on the device of the logits, which must stay allocated; 0:
            no penalties.
        penalties: repetition, presence and frequency, as float32.
        entries: address of the packed entries on that device, likewise.
        entry_count: number of entries.
    """
    return struct.pack("<qq3fi", counts, entries, *penalties, entry_count)


def apply_logits_processors_(
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    records: Tensor,
    masks: Tensor | None = None,
    mask_of: Tensor | None = None,
) -> None:
    """Apply the record of each row's slot, if there is one, to the row's logits.

    It works in this order, once for each step:

    1. The row's token, which the step has read, is counted if it belongs to the answer, i.e. if
       positions[r] is above 0.
    2. Tokens that are not in the row's mask are banned.
    3. Penalties of counted tokens: repetition (Keskar et al., arXiv 1909.05858) divides a positive
       logit and multiplies a negative one, for tokens of prompt and answer. Presence and frequency
       (OpenAI) are subtracted, once and for each occurrence, for tokens of the answer.
    4. Finite entries are added, and last the infinite ones.

    Finite logits stay finite unless banned; logits that are not finite stay as they are. Nothing
    waits for the device, and a row's result does not depend on the others.

    Args:
        logits: float32 [rows, vocab], vocab below 2**24; **changed in place**.
        tokens: int32 [rows].
        slots: int32 [rows]; rows with a slot outside of the records are left unchanged.
        positions: int64 [rows]: number of tokens in the answer.
        records: int32 [slots, RECORD_WORDS], each packed by `record`; their counts are changed.
        masks: int32 [masked, words], words at least vocab / 32: bit t of a mask, counted from the
            lowest bit of the first word, says that token t is allowed.
        mask_of: int32 [rows]: index of the row's mask; negative: none.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    torch.ops.minserve.adjust_(logits, tokens, slots, positions, records, masks, mask_of)


def reference(
    logits: Tensor,
    counts: Tensor,
    penalties: tuple[float, float, float],
    entries: Sequence[Entry],
    position: int,
    possible: Tensor | None = None,
) -> Tensor:
    """Reference in float64 for one row.

    logits [vocab], int32 counts [vocab], and optionally bool [vocab] of the tokens that are
    allowed.
    """
    repetition, presence, frequency = penalties
    x, times = logits.double(), counts // IN_ANSWER
    scaled = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(counts > 0, scaled, x) - presence * (times > 0) - frequency * times
    banned = torch.zeros(len(x), dtype=torch.bool) if possible is None else ~possible
    for id, value, until in entries:
        if position < until and value == -torch.inf:
            banned[id] = True
        elif position < until:
            x[id] += value
    x = torch.where(logits.isfinite(), x.clamp(-_MOST, _MOST), logits.double())
    broken = logits.isnan() | logits.isposinf()
    return x.masked_fill(banned & ~broken, -torch.inf)


def _fake(*_: Tensor | None) -> None:
    """Return nothing; the changed tensors keep their shapes."""


torch.library.register_fake("minserve::adjust_", _fake)
