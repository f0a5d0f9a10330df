"""The two test losses, in nats per scored token.

`windows_loss`: non-overlapping windows that cover the whole text, each read from the initial
state; how the paper's table and most others count. `CarriedLoss`: the state is carried through
the whole text, as when the text is served; a text of any length at constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine import ops
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState

# Tokens that the carried loss reads at once: bounds its memory. A multiple of SCAN_CHUNK, as the
# pieces are in which a server reads.
CHUNK = 1024


@dataclass(frozen=True)
class Loss:
    """The sum of the negative log-likelihoods, and of how many tokens."""

    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Nats per scored token; NaN where there is none."""
        return self.nats / self.tokens if self.tokens else math.nan


def covering_windows(ids: Tensor, window: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, [windows, time] each, that predict every token but the first once.

    Full windows come in batches; the last, shorter one comes alone.
    """
    targets = ids.numel() - 1
    full = targets // window * window
    inputs = ids[:full].view(-1, window).long()
    successors = ids[1 : full + 1].view(-1, window).long()
    for first in range(0, inputs.shape[0], batch):
        yield inputs[first : first + batch], successors[first : first + batch]
    if full < targets:
        yield ids[None, full:-1].long(), ids[None, full + 1 :].long()


@torch.inference_mode()
def windows_loss(model: LM, ids: Tensor, *, window: int, batch: int) -> Loss:
    """The loss over `covering_windows` of ids [tokens]; the model is in evaluation mode."""
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    for inputs, targets in covering_windows(ids, window, batch):
        logits = model(inputs).float()  # [windows, time, vocab]
        total += functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ).double()
    return Loss(float(total), max(0, ids.numel() - 1))


class Reader(Protocol):
    """What reads prompts: an LM or a ModelBackend, which has these methods too."""

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class CarriedLoss:
    """Reads a text through the serving path, CHUNK tokens at a time wherever it was cut into
    pieces, with one sequence's state.

    The first token of the text is read but not scored. `loss` is what is known so far: `finish`
    reads what is left of a chunk. `state` is of one sequence that has read nothing yet.
    """

    def __init__(self, model: Reader, state: ModelState) -> None:
        self._model = model
        self._state = state
        self._device = state.cell.device
        self._slots = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._unread = torch.empty(0, dtype=torch.int32, device=self._device)
        self._nats = 0.0
        self._tokens = 0

    @property
    def loss(self) -> Loss:
        return Loss(self._nats, self._tokens)

    def feed(self, ids: Tensor) -> None:
        """Takes the next ids [tokens] of the text."""
        ids = torch.cat((self._unread, ids.to(self._device, torch.int32)))
        while ids.numel() > CHUNK:
            self._score(ids[: CHUNK + 1])
            ids = ids[CHUNK:]
        self._unread = ids

    def finish(self) -> Loss:
        """The loss of the whole text."""
        if self._unread.numel() > 1:
            self._score(self._unread)
            self._unread = self._unread[-1:]
        return self.loss

    @torch.inference_mode()
    def _score(self, ids: Tensor) -> None:
        """Reads all but the last of ids and scores all but the first."""
        bounds = torch.tensor([0, ids.numel() - 1], dtype=torch.int32, device=self._device)
        hidden = self._model.prefill(ids[:-1], bounds, self._state, self._slots)
        logits = self._model.logits(hidden).float()  # [tokens, vocab]
        logprobs = ops.read_reports(ops.target_logprobs(logits, ids[1:].long())).chosen
        self._nats -= float(logprobs.double().sum())
        self._tokens += logprobs.numel()


def carried_loss(model: LM, ids: Tensor) -> Loss:
    """The loss of ids [tokens] with the state carried through all of them."""
    carried = CarriedLoss(model, model.new_state(1))
    carried.feed(ids)
    return carried.finish()
