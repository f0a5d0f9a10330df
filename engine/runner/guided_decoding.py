"""GuidedSampler: steps in whose draws the host has a part, for grammars (and for more stop ids, or
more best tokens, than the device sees to).

The device computes logits, while the host asks the matchers of grammars for their masks; then the
device draws, and the host takes in what was drawn before it can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import upload
from engine.runner.guided_step import GuidedStep, Masks
from engine.runner.sampling.sampler import Allowed, Rows, Sampler, SampleStep
from engine.step_plan import Admission, StepPlan
from engine.structured_output.matchers import GrammarMatchers


class GuidedSampler:
    """Of one model; sequences are known from `admit` to `release`."""

    def __init__(
        self, step: GuidedStep, sampler: Sampler, constraints: GrammarMatchers, device: torch.device
    ) -> None:
        self._step = step
        self._sampler = sampler
        self._constraints = constraints
        self._device = device

    def capture(self, sizes: list[int], pool: Any) -> None:
        """As GuidedStep.capture."""
        self._step.capture(sizes, pool)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes what grammars answers have to match."""
        for admission in admissions:
            sampling = admission.request.sampling
            if sampling.max_tokens > 0:
                self._constraints.admit(admission.key, sampling)

    def release(self, keys: Sequence[int]) -> None:
        """Forgets sequences; unknown keys are ignored."""
        self._constraints.release(keys)

    def draw(self, plan: StepPlan, rows: Rows, prompts: Tensor | None) -> list[SampleStep]:
        """Decodes, then draws for `rows`, which are the plan's: for the chunks that end their
        prompt, whose logits `prompts` are, and for the decoded rows."""
        chunks = len(rows.keys) - len(plan.decode)
        of_chunks, decoded = (
            Rows(*(column[part] for column in rows))
            for part in (slice(chunks), slice(chunks, None))
        )
        # While a GPU is busy with the step, the host is with all masks.
        masks = None
        if plan.decode:
            self._step.begin(decoded)
            masks = self._masks(decoded)
        allowed = self._allowed(of_chunks)
        drawings = []
        if prompts is not None:
            drawings.append(self._sampler.sample(of_chunks, prompts, allowed))
        if plan.decode:
            drawings.append(self._step.draw(decoded, masks))
        return drawings

    def _masks(self, rows: Rows) -> Masks | None:
        """Of the rows of the step that has begun."""
        masked = self._constraints.rows(rows.keys)
        if not masked:
            return None
        masks = self._step.masks(len(rows.keys), len(masked))
        masks.of[masked] = range(len(masked))
        self._fill(rows, masked, masks.bits)
        return masks

    def _fill(self, rows: Rows, masked: Sequence[int], bits: NDArray[np.int32]) -> None:
        """The masks of the rows that have one; matchers may have more tokens than `bits`, or
        fewer."""
        keys, positions = (
            [rows.keys[row] for row in masked],
            [rows.positions[row] for row in masked],
        )
        words, room = self._constraints.words, bits.shape[1]
        if words == room:
            self._constraints.fill(keys, positions, bits)
            return
        whole = np.empty((len(masked), words), np.int32)
        self._constraints.fill(keys, positions, whole)
        bits[:, : min(words, room)] = whole[:, :room]

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
        """Of rows whose logits are there already."""
        masked = self._constraints.rows(rows.keys)
        if not masked:
            return None
        shape, on_gpu = (len(masked), self._constraints.words), self._device.type == "cuda"
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu)
        self._fill(rows, masked, bits.numpy())
        mask_of = [-1] * len(rows.keys)
        for which, row in enumerate(masked):
            mask_of[row] = which
        return Allowed(
            bits.to(self._device, non_blocking=True), upload(mask_of, torch.int32, self._device)
        )


def rows_of(plan: StepPlan) -> Rows:
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
