"""The two test losses, in nats per scored token.

`windows_loss`: non-overlapping windows that cover the whole text, each read from the initial
state; how the paper's table and most others count. `CarriedLoss`: the state is carried through
the whole text, as when the text is served; a text of any length at constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.lm import LM

CHUNK = 1024  # tokens that the carried loss reads at once: bounds its memory


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


class CarriedLoss:
    """Reads a text piece by piece through the serving path, with one sequence's state.

    The first token of the text is read but not scored. `loss` is what is known so far.
    """

    def __init__(self, model: LM, device: torch.device) -> None:
        self._model = model
        self._state = model.new_state(1)
        self._slots = torch.zeros(1, dtype=torch.int32, device=device)
        self._device = device
        self._last = torch.empty(0, dtype=torch.int32, device=device)
        self._nats = 0.0
        self._tokens = 0

    @property
    def loss(self) -> Loss:
        return Loss(self._nats, self._tokens)

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> None:
        """Scores the next ids [tokens] of the text."""
        ids = torch.cat((self._last, ids.to(self._device, torch.int32)))
        for start in range(0, ids.numel() - 1, CHUNK):
            piece = ids[start : start + CHUNK + 1]
            bounds = torch.tensor([0, piece.numel() - 1], dtype=torch.int32, device=self._device)
            hidden = self._model.prefill(piece[:-1], bounds, self._state, self._slots)
            logits = self._model.logits(hidden).float()  # [tokens, vocab]
            nats = functional.cross_entropy(logits, piece[1:].long(), reduction="none")
            self._nats += float(nats.double().sum())
            self._tokens += nats.numel()
        self._last = ids[-1:]


def carried_loss(model: LM, ids: Tensor) -> Loss:
    """The loss of ids [tokens] with the state carried through all of them."""
    carried = CarriedLoss(model, ids.device)
    carried.feed(ids)
    return carried.loss
