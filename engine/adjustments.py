"""Adjustments: what requests penalise, favour and rule out among tokens, by slot, on the device.

`ops.adjust_` lays it on the logits of a step. It finds a sequence's record by its slot, so a step
needs to know nothing of who is in it; who asked for nothing has an empty one. Rows of counts are
made as requests with penalties come, and never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine import ops
from engine.indices import to_device
from engine.messages import SamplingParams, unpack_ids
from engine.ops.adjust import IN_PROMPT, RECORD_WORDS, Entry, pack_entries, record
from engine.plan import Admission
from engine.sequence import endings, has_penalties, is_adjusted

_MOST_FLOAT = float(torch.finfo(torch.float32).max)
_ALWAYS = 2**31 - 1  # positions are below
_ROWS = 8  # of counts that are made together


class Adjustments:
    """Of `slots` slots."""

    def __init__(
        self, slots: int, vocab_size: int, eos_token_id: int | None, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._device = device
        self._records = torch.zeros(slots, RECORD_WORDS, dtype=torch.int32, device=device)
        self._used: set[int] = set()  # slots whose records are not empty
        self._counts: dict[int, Tensor] = {}  # by slot, [vocab]
        self._free: list[Tensor] = []  # such rows
        self._entries: dict[int, Tensor] = {}  # by slot

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes what these requests ask for; the device goes on with who had their slots before."""
        changed: dict[int, bytes] = {}
        for admission in admissions:
            slot, params = admission.slot, admission.request.sampling
            wanted = params.max_tokens > 0 and is_adjusted(params)
            if slot in self._used:
                self._forget(slot)
                changed[slot] = bytes(4 * RECORD_WORDS)
            if wanted:
                changed[slot] = self._record(slot, params, admission.request.prompt)
                self._used.add(slot)
        if changed:
            records = self._upload(b"".join(changed.values())).view(-1, RECORD_WORDS)
            self._records.index_copy_(0, to_device(list(changed), self._device), records)

    def concern(self, slots: Iterable[int]) -> bool:
        """Whether a request of these asked for any."""
        return not self._used.isdisjoint(slots)

    def apply(
        self,
        logits: Tensor,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        masks: Tensor | None = None,
        mask_of: Tensor | None = None,
    ) -> None:
        """`ops.adjust_`, once for each token that is read."""
        ops.adjust_(logits, tokens, slots, positions, self._records, masks, mask_of)

    def _forget(self, slot: int) -> None:
        self._used.discard(slot)
        self._entries.pop(slot, None)
        counts = self._counts.pop(slot, None)
        if counts is not None:
            self._free.append(counts)

    def _record(self, slot: int, params: SamplingParams, prompt: bytes) -> bytes:
        entries: list[Entry] = [
            (id, _bounded(value), _ALWAYS) for id, value in params.logit_bias.items()
        ]
        if params.min_tokens and params.grammar is None:  # else its masks see to that
            ends = endings(params, self._eos_token_id)
            if len(ends) < self._vocab_size:  # or no token would be left
                entries += [(id, -torch.inf, params.min_tokens) for id in sorted(ends)]
        there = 0
        if entries:
            self._entries[slot] = self._upload(pack_entries(entries))
            there = self._entries[slot].data_ptr()
        counts = self._count(slot, prompt) if has_penalties(params) else 0
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        repetition, presence, frequency = map(_bounded, penalties)
        return record(counts, (repetition, presence, frequency), there, len(entries))

    def _count(self, slot: int, prompt: bytes) -> int:
        """Counts a prompt (messages.pack_ids), and returns where."""
        if not self._free:
            shape = _ROWS, self._vocab_size
            self._free += torch.zeros(shape, dtype=torch.int32, device=self._device).unbind()
        counts = self._counts[slot] = self._free.pop()
        ids = sorted(set(unpack_ids(prompt)))
        counts.zero_()
        counts.index_fill_(0, to_device(ids, self._device), IN_PROMPT)
        return counts.data_ptr()

    def _upload(self, packed: bytes) -> Tensor:
        """int32 words, on the device."""
        words = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        if self._device.type == "cpu":
            return words
        return words.pin_memory().to(self._device, non_blocking=True)


def _bounded(value: float) -> float:
    """What float32 cannot hold becomes its nearest finite value."""
    return min(max(value, -_MOST_FLOAT), _MOST_FLOAT)
