"""Logits processors: penalties, biases and bans, applied on the device before sampling.

What a request asks for lies in the record of its slot, int32 words as `record` packs them, so that
a step in a CUDA graph follows whatever sequences its rows have. A record names the addresses of
entries, of tokens whose logits change, and of the words in which penalties count tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)

RECORD_WORDS = 8
IN_PROMPT, IN_ANSWER = 1, 2  # what a token adds to its count: once, and each time
_MOST = torch.finfo(torch.float32).max

Entry = tuple[int, float, int]  # a token, what is added to its logit, at positions below this one


def pack_entries(entries: Sequence[Entry]) -> bytes:
    """Three int32 words for each. An infinite value makes a token impossible."""
    return b"".join([struct.pack("<ifi", *entry) for entry in entries])


def record(
    counts: int, penalties: tuple[float, float, float], entries: int, entry_count: int
) -> bytes:
    """RECORD_WORDS words.

    Args:
        counts: the address of int32 [vocab] on the device of the logits, which has to stay there;
            0: nothing is penalised.
        penalties: repetition, presence and frequency, as float32.
        entries: the address of `entry_count` entries on that device, likewise.
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
    """Applies the record of each row's slot to the row's logits, where there is one.

    The row's token, which the step has read, is counted first where it belongs to the answer, i.e.
    where positions[r] is above 0: once for each step. Tokens that the row's mask does not have
    become impossible. Then, of those that were counted, repetition (Keskar et al., arXiv
    1909.05858) divides a positive logit and multiplies a negative one, for tokens of prompt and
    answer; presence and frequency (OpenAI) are subtracted, once and for each time, for tokens of
    the answer. Then finite entries are added, and last the infinite ones. Finite logits stay
    finite, but for the impossible, and those that are not stay as they are.

    Nothing waits for the device, and a row's result does not depend on the others.

    Args:
        logits: float32 [rows, vocab], vocab below 2**24; **changed in place**.
        tokens: int32 [rows].
        slots: int32 [rows]; rows with one beyond the records are left as they are.
        positions: int64 [rows]: how many tokens the answer has.
        records: int32 [slots, RECORD_WORDS], each as `record` packs it; their counts are changed.
        masks: int32 [masked, words], words at least vocab / 32: bit t of a mask, counted from the
            lowest bit of the first word, says that token t is possible.
        mask_of: int32 [rows]: which of the masks is the row's; negative: none.

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
    """What becomes of a row, logits [vocab] with int32 counts [vocab] and a mask that has bool
    [vocab]: the same in float64."""
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
    """Returns nothing; what it changes keeps its shape."""


torch.library.register_fake("minserve::adjust_", _fake)
