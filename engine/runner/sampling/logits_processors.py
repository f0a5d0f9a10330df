"""LogitsProcessors: what requests penalise, favour and rule out among tokens, by slot, on the
device.

`ops.apply_logits_processors_` applies it to the logits of a step. It finds a sequence's record by
its slot, so a step needs to know nothing of who is in it; who asked for nothing has an empty one.
Rows of counts are made as requests with penalties come, and never moved.
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
_ALWAYS = 2**31 - 1  # positions are below
_ROWS = 8  # of counts that are made together


class _Asked(NamedTuple):
    """What the record of a slot names, which lives as long as that does."""

    record: bytes
    counts: Tensor | None  # [vocab]
    entries: Tensor | None


class LogitsProcessors:
    """Of `slots` slots."""

    def __init__(
        self, slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], uploads: UploadRing
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device = uploads.device
        self._uploads = uploads
        self._records = torch.zeros(slots, RECORD_WORDS, dtype=torch.int32, device=device)
        self._asked: dict[int, _Asked] = {}  # by slot; other slots' records are empty
        self._free: list[Tensor] = []  # rows of counts

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes what these requests ask for; the device goes on with who had their slots before."""
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
        # Only now does no record name what was there before.
        for slot, asked in changed.items():
            before = self._asked.pop(slot, None)
            if before is not None and before.counts is not None:
                self._free.append(before.counts)
            if asked is not None:
                self._asked[slot] = asked

    def concern(self, slots: Iterable[int]) -> bool:
        """Whether a request of these asked for any."""
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
        """Applies the records, once for each token that is read."""
        ops.apply_logits_processors_(
            logits, tokens, slots, positions, self._records, masks, mask_of
        )

    def _ask(self, params: SamplingParams, prompt: bytes) -> _Asked:
        entries: list[Entry] = [
            (id, _bounded(value), _ALWAYS) for id, value in params.logit_bias.items()
        ]
        if params.min_tokens and params.grammar is None:  # else its masks see to that
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
        """Counts a prompt (token_ids.pack_ids)."""
        if not self._free:
            shape = _ROWS, self._vocab_size
            self._free += torch.zeros(shape, dtype=torch.int32, device=self._device).unbind()
        counts = self._free.pop()
        counts.zero_()
        counts.index_fill_(0, self._uploads.put(sorted(set(unpack_ids(prompt)))), IN_PROMPT)
        return counts

    def _upload(self, packed: bytes) -> Tensor:
        """int32 words, on the device."""
        words = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        if self._device.type == "cpu":
            return words
        return words.pin_memory().to(self._device, non_blocking=True)


def _bounded(value: float) -> float:
    """What float32 cannot hold becomes its nearest finite value."""
    return min(max(value, -_MOST_FLOAT), _MOST_FLOAT)
