"""HostedDraws: steps in whose draws the host has a part, for grammars (and for more stop ids, or
more best tokens, than the device sees to).

The device computes logits, while the host asks the matchers of grammars for their masks; then the
sampler draws, and the host takes in what was drawn before it can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.constraints import Constraints
from engine.decoding import LogitsStep
from engine.device import upload
from engine.plan import Admission, Plan
from engine.sampler import Allowed, Drawing, Rows, Sampler


class HostedDraws:
    """Of one model; sequences are known from `admit` to `release`."""

    def __init__(
        self, step: LogitsStep, sampler: Sampler, constraints: Constraints, device: torch.device
    ) -> None:
        self._step = step
        self._sampler = sampler
        self._constraints = constraints
        self._device = device

    def capture(self, sizes: list[int], vocab_size: int, pool: Any) -> None:
        """As LogitsStep.capture."""
        self._step.capture(sizes, vocab_size, pool)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes what grammars answers have to match."""
        for admission in admissions:
            sampling = admission.request.sampling
            if sampling.max_tokens > 0:
                self._constraints.admit(admission.key, sampling)

    def release(self, keys: Sequence[int]) -> None:
        """Forgets sequences; unknown keys are ignored."""
        self._constraints.release(keys)

    def draw(self, plan: Plan, rows: Rows, prompts: Tensor | None) -> Drawing | None:
        """Decodes, then draws for `rows`, which are the plan's: for the chunks that end their
        prompt, whose logits `prompts` are, and for the decoded rows; None where there are none."""
        parts = [] if prompts is None else [prompts]
        if plan.decode:
            decode = plan.decode
            parts.append(self._step([row.token for row in decode], [row.slot for row in decode]))
        if not parts:
            return None
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._sampler.sample(rows, logits, self._allowed(rows))

    def take(self, keys: Sequence[int], tokens: Sequence[int]) -> set[int]:
        """The matchers follow what was drawn, of which negative tokens are none. Returns whose
        grammars let nothing follow. On a GPU the masks of the next step are begun."""
        constraints, masked = self._constraints, self._constraints.rows(keys)
        complete = {
            keys[row]
            for row in masked
            if tokens[row] >= 0 and constraints.take(keys[row], tokens[row])
        }
        if self._device.type == "cuda":  # elsewhere the model needs the processor
            constraints.begin([keys[row] for row in masked if keys[row] not in complete])
        return complete

    def rejected(self) -> dict[int, str]:
        """Constraints.rejected."""
        return self._constraints.rejected()

    def _allowed(self, rows: Rows) -> Allowed | None:
        """A GPU may still be busy with the logits while masks are computed."""
        masked = self._constraints.rows(rows.keys)
        if not masked:
            return None
        shape, on_gpu = (len(masked), self._constraints.words), self._device.type == "cuda"
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu)
        keys = [rows.keys[row] for row in masked]
        self._constraints.fill(keys, [rows.positions[row] for row in masked], bits.numpy())
        mask_of = [-1] * len(rows.keys)
        for which, row in enumerate(masked):
            mask_of[row] = which
        return Allowed(
            bits.to(self._device, non_blocking=True), upload(mask_of, torch.int32, self._device)
        )


def rows_of(plan: Plan) -> Rows:
    """Whom a plan draws for, but for the batch of a plain one."""
    chunks = [chunk for chunk in plan.prefill if chunk.sample]
    decode = [] if plan.plain else plan.decode
    nothing = [0] * len(chunks)
    return Rows(
        [*(chunk.key for chunk in chunks), *(row.key for row in decode)],
        [*(chunk.slot for chunk in chunks), *(row.slot for row in decode)],
        [*nothing, *(row.token for row in decode)],
        [*nothing, *(row.position for row in decode)],
    )
