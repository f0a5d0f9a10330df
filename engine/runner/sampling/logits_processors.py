"""LogitsProcessors: penalties, biases and banned tokens of requests, by slot, on the device.

`ops.apply_logits_processors_` applies them to the logits of a step. It finds a sequence's record by
its slot, so a step needs no knowledge of its sequences; requests without any have an empty record.
Rows of token counts are allocated as requests with penalties arrive, and never move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine import ops
from engine.ops.logits_processors import IN_PROMPT, RECORD_WORDS, Entry, pack_entries, record
from engine.ops.upload import UploadRing
from engine.protocol.sampling_params import SamplingParams, endings, has_penalties, is_adjusted
from engine.protocol.token_ids import unpack_ids
from engine.step_plan import Admission

_MOST_FLOAT = float(torch.finfo(torch.float32).max)
_ALWAYS = 2**31 - 1  # a position that is never reached
_ROWS = 8  # rows of counts allocated together


class _Asked(NamedTuple):
    """The tensors to which a slot's record points, which must live as long as the record."""

    record: bytes
    counts: Tensor | None  # [vocab]
    entries: Tensor | None


class LogitsProcessors:
    """The logits processors of `slots` slots."""

    def __init__(
        self, slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], uploads: UploadRing
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device = uploads.device
        self._uploads = uploads
        self._records = torch.zeros(slots, RECORD_WORDS, dtype=torch.int32, device=device)
        self._asked: dict[int, _Asked] = {}  # by slot; other slots' records are empty
        self._free: list[Tensor] = []  # unused rows of counts

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Set the records of these requests, after all device work that was queued before."""
        changed: dict[int, _Asked | None] = {}
        for admission in admissions:
            slot, params = admission.slot, admission.request.sampling
            if params.max_tokens > 0 and is_adjusted(params):
                changed[slot] = self._ask(params, admission.request.prompt)
            elif slot in self._asked:
                changed[slot] = None
        if not changed:
            return
        nothing = bytes(4 * RECORD_WORDS)
        records = [nothing if one is None else one.record for one in changed.values()]
        there = self._upload(b"".join(records)).view(-1, RECORD_WORDS)
        self._records.index_copy_(0, self._uploads.put(list(changed)), there)
        # Only now does no record refer to the previous tensors.
        for slot, asked in changed.items():
            before = self._asked.pop(slot, None)
            if before is not None and before.counts is not None:
                self._free.append(before.counts)
            if asked is not None:
                self._asked[slot] = asked

    def concern(self, slots: Iterable[int]) -> bool:
        """Return whether any of these slots has a logits processor."""
        return not self._asked.keys().isdisjoint(slots)

    def apply(
        self,
        logits: Tensor,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        masks: Tensor | None = None,
        mask_of: Tensor | None = None,
    ) -> None:
        """Apply the records to the logits of a step; call it once for each token that is read."""
        ops.apply_logits_processors_(
            logits, tokens, slots, positions, self._records, masks, mask_of
        )

    def _ask(self, params: SamplingParams, prompt: bytes) -> _Asked:
        entries: list[Entry] = [
            (id, _bounded(value), _ALWAYS) for id, value in params.logit_bias.items()
        ]
        if params.min_tokens and params.grammar is None:  # with a grammar, its masks do this
            ends = sorted(endings(params, self._eos_token_ids))
            entries += [(id, -torch.inf, params.min_tokens) for id in ends]
        there = self._upload(pack_entries(entries)) if entries else None
        counts = self._count(prompt) if has_penalties(params) else None
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        repetition, presence, frequency = map(_bounded, penalties)
        packed = record(
            0 if counts is None else counts.data_ptr(),
            (repetition, presence, frequency),
            0 if there is None else there.data_ptr(),
            len(entries),
        )
        return _Asked(packed, counts, there)

    def _count(self, prompt: bytes) -> Tensor:
        """Return a row of counts that marks the tokens of a packed prompt (token_ids.pack_ids)."""
        if not self._free:
            shape = _ROWS, self._vocab_size
            self._free += torch.zeros(shape, dtype=torch.int32, device=self._device).unbind()
        counts = self._free.pop()
        counts.zero_()
        counts.index_fill_(0, self._uploads.put(sorted(set(unpack_ids(prompt)))), IN_PROMPT)
        return counts

    def _upload(self, packed: bytes) -> Tensor:
        """Upload packed int32 words to the device."""
        words = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        if self._device.type == "cpu":
            return words
        return words.pin_memory().to(self._device, non_blocking=True)


def _bounded(value: float) -> float:
    """Replace a value that float32 cannot represent by the nearest finite one."""
    return min(max(value, -_MOST_FLOAT), _MOST_FLOAT)
