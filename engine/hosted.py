"""HostedDraws: steps in whose draws the host has a part, for grammars and log-probabilities.

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
from engine.messages import TokenLogprobs
from engine.plan import Admission, Plan, Sampled
from engine.sampler import Allowed, Draws, Rows, Sampler
from engine.scoring import to_messages


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
        """Notes how tokens are to be drawn, for whoever draws any."""
        for admission in admissions:
            sampling = admission.request.sampling
            if sampling.max_tokens > 0:
                self._sampler.admit(admission.key, sampling)
                self._constraints.admit(admission.key, sampling)

    def release(self, keys: Sequence[int]) -> None:
        """Forgets sequences; unknown keys are ignored."""
        self._sampler.release(keys)
        self._constraints.release(keys)

    def draw(self, plan: Plan, prompts: Tensor | None) -> Draws | None:
        """Decodes, then draws for the chunks that end their prompt, whose logits `prompts` are, and
        for the decoded rows; None where there are none."""
        parts = [] if prompts is None else [prompts]
        if plan.decode:
            rows = plan.decode
            parts.append(self._step([row.token for row in rows], [row.slot for row in rows]))
        if not parts:
            return None
        logits, drawn = parts[0] if len(parts) == 1 else torch.cat(parts), rows_of(plan)
        return self._sampler.sample(drawn, logits, self._allowed(drawn.keys))

    def tops(self, plan: Plan) -> list[tuple[int, int]]:
        """Sampler.logprob_rows of its draws. Whose requests these are may be forgotten before the
        draws are known."""
        return self._sampler.logprob_rows(rows_of(plan).keys)

    def sampled(self, plan: Plan, draws: Draws, tops: Sequence[tuple[int, int]]) -> list[Sampled]:
        """What was drawn, on the host; the matchers follow it."""
        keys = rows_of(plan).keys
        logprobs: dict[int, TokenLogprobs] = {}
        if draws.logprobs is not None:
            messages = to_messages(draws.logprobs, [top for _, top in tops])
            logprobs = dict(zip((row for row, _ in tops), messages, strict=True))
        tokens, finite = draws.tokens.tolist(), draws.finite.tolist()
        complete = {
            row: self._constraints.take(keys[row], tokens[row])
            for row in self._constraints.rows(keys)
            if finite[row]
        }
        return [
            Sampled(key, token, logprobs.get(row), complete.get(row, False))
            for row, (key, token) in enumerate(zip(keys, tokens, strict=True))
        ]

    def rejected(self) -> dict[int, str]:
        """Constraints.rejected."""
        return self._constraints.rejected()

    def _allowed(self, keys: Sequence[int]) -> Allowed | None:
        """A GPU may still be busy with the logits while the masks are computed."""
        rows = self._constraints.rows(keys)
        if not rows:
            return None
        shape, on_gpu = (len(rows), self._constraints.words), self._device.type == "cuda"
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu)
        self._constraints.fill([keys[row] for row in rows], bits.numpy())
        return Allowed(
            upload(rows, torch.int64, self._device), bits.to(self._device, non_blocking=True)
        )


def rows_of(plan: Plan) -> Rows:
    """Whom a plan draws for, but for the batch of a plain one."""
    rows = Rows([], [], [], [])
    for chunk in plan.prefill:
        if chunk.sample:
            rows.add(chunk.key, chunk.slot, 0, 0)
    for row in [] if plan.plain else plan.decode:
        rows.add(row.key, row.slot, row.token, row.position)
    return rows
