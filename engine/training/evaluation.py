"""The losses of a text, in nats per scored token.

`windows_loss`: non-overlapping windows that cover the whole text, each read from the initial state,
as in the paper's table and most others; `served_windows` reads the same through the serving path,
each from a given state. `CarriedLoss`: the state is carried through the whole text, as in serving;
handles a text of any length in constant memory. `streams_loss`: many states carried through parts
of the text side by side, for evaluations while training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine import ops
from engine.models.language_model import LanguageModel
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState

# Tokens that the carried loss reads at once, which bounds its memory: multiples of SCAN_CHUNK, like
# the pieces in which a server reads. A GPU needs more at once to be busy.
CHUNK = 1024
CHUNK_ON_GPU = 8 * CHUNK
# Most tokens of all windows that `served_windows` reads at once, and most windows.
WINDOWS_TOKENS = 8 * CHUNK
MOST_WINDOWS = 256


@dataclass(frozen=True)
class Loss:
    """The sum of negative log-likelihoods in nats, and the number of scored tokens."""

    nats: float
    tokens: int

    @property
    def per_token(self) -> float:
        """Nats per scored token; NaN if there is none."""
        return self.nats / self.tokens if self.tokens else math.nan

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.nats + other.nats, self.tokens + other.tokens)


def covering_windows(ids: Tensor, window: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, [windows, time] each, that predict every token but the first once.

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


def sample(ids: Tensor, tokens: int, pieces: int, window: int = 1) -> Tensor:
    """Return about so many of ids [...], as runs spread evenly over them; 0 = all.

    There are at most `pieces` runs, of whole windows each, so that no window reads two of them.
    """
    if not 0 < tokens < ids.numel():
        return ids
    pieces = max(1, min(pieces, tokens // window))
    length = max(1, tokens // pieces // window * window)
    firsts = [index * ids.numel() // pieces for index in range(pieces)]
    return torch.cat([ids[first : first + length] for first in firsts])


@torch.inference_mode()
def streams_loss(model: LM, ids: Tensor, *, window: int, batch: int, tokens: int = 0) -> Loss:
    """Return the loss of ids [tokens] read as `batch` streams with carried states.

    Each stream begins at the initial state. The ids are cut evenly into the streams, of which only
    the first tokens are read if `tokens` limits how many there are in all. It approaches the loss
    with one carried state as streams get longer, and takes a fraction of its time.
    """
    targets = ids.numel() - 1
    batch = max(1, min(batch, targets // window))
    length = targets // batch
    firsts = torch.arange(batch, device=ids.device).unsqueeze(1) * length
    if tokens:
        length = max(1, min(length, tokens // batch))
    state: Mapping[str, Tensor] = model.new_state(batch).named
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    for at in range(0, length, window):
        time = min(window, length - at)
        rows = ids[firsts + torch.arange(at, at + time + 1, device=ids.device)].long()
        logits, state = model.read(rows[:, :-1], state)
        total += functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
        ).double()
    return Loss(float(total), batch * length)


@torch.inference_mode()
def windows_loss(model: LanguageModel, ids: Tensor, *, window: int, batch: int) -> Loss:
    """Return the loss over `covering_windows` of ids [tokens] of a model in evaluation mode."""
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    for inputs, targets in covering_windows(ids, window, batch):
        logits = model(inputs).float()  # [windows, time, vocab]
        total += functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ).double()
    return Loss(float(total), max(0, ids.numel() - 1))


class Reader(Protocol):
    """A model that reads prompts: a LanguageModel or a ModelBackend."""

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class CarriedLoss:
    """The loss of a text that is read through the serving path with one carried state.

    It reads CHUNK (on a GPU: CHUNK_ON_GPU) tokens at a time, however the text is passed. `loss` is
    the loss so far; `finish` reads the rest of the last chunk. The last token of the text is scored
    but not read.
    """

    def __init__(
        self,
        model: Reader,
        state: ModelState,
        *,
        unscored: int = 1,
        each: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Begin a text.

        Args:
            model: reads the text.
            state: of one sequence that has read nothing yet; updated in place.
            unscored: how many of the text's first tokens are read but not scored; at least 1.
            each: gets the nats of each scored token, in order, fp32 [tokens] on the device, at most
                a chunk at a time.
        """
        self._model = model
        self._state = state
        self._skipped = unscored - 1  # of the predictions to come
        self._each = each
        self._device = state.tensors()[0].device
        self._chunk = CHUNK_ON_GPU if self._device.type == "cuda" else CHUNK
        self._slots = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._unread = torch.empty(0, dtype=torch.int32, device=self._device)
        self._nats = 0.0
        self._tokens = 0

    @property
    def loss(self) -> Loss:
        """The loss of the tokens scored so far."""
        return Loss(self._nats, self._tokens)

    def feed(self, ids: Tensor) -> None:
        """Add the next ids [tokens] of the text."""
        ids = torch.cat((self._unread, ids.to(self._device, torch.int32)))
        while ids.numel() > self._chunk:
            self._score(ids[: self._chunk + 1])
            ids = ids[self._chunk :]
        self._unread = ids

    def finish(self) -> Loss:
        """Return the loss of the whole text."""
        if self._unread.numel() > 1:
            self._score(self._unread)
            self._unread = self._unread[-1:]
        return self.loss

    @torch.inference_mode()
    def _score(self, ids: Tensor) -> None:
        """Read all but the last of ids, and score all but the first."""
        bounds = torch.tensor([0, ids.numel() - 1], dtype=torch.int32, device=self._device)
        hidden = self._model.prefill(ids[:-1], bounds, self._state, self._slots)
        skipped = min(self._skipped, ids.numel() - 1)
        self._skipped -= skipped
        if skipped == ids.numel() - 1:
            return
        nats = _nats(self._model, hidden[skipped:], ids[1 + skipped :])
        self._nats += float(nats.double().sum())
        self._tokens += nats.numel()
        if self._each is not None:
            self._each(nats)


def _nats(model: Reader, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return -log p, fp32 [tokens], of targets [tokens] after hidden states [tokens, d_model]."""
    logits = model.logits(hidden).float()  # [tokens, vocab]
    return -ops.read_reports(ops.target_logprobs(logits, targets.long())).chosen


def served_windows(model: Reader, start: ModelState, ids: Tensor, window: int) -> Iterator[Loss]:
    """Yield the loss of a text in windows, batch by batch; their sum is that of the text.

    The windows are those of `covering_windows`. Each is read from `start`.

    Args:
        model: reads the text.
        start: the state of one sequence, on the model's device; it does not change.
        ids: int32 [tokens], of which the first is read but not scored.
        window: tokens of a window, however many.
    """
    targets = ids.numel() - 1
    batch = max(1, min(MOST_WINDOWS, WINDOWS_TOKENS // min(window, CHUNK), -(-targets // window)))
    rows = ModelState(
        {name: tensor.repeat_interleave(batch, dim=1) for name, tensor in start.named.items()}
    )
    for first in range(0, targets, batch * window):
        part = ids[first : first + batch * window + 1].to(rows.tensors()[0].device, torch.int32)
        yield _read_windows(model, start, rows, part, window)


@torch.inference_mode()
def _read_windows(
    model: Reader, start: ModelState, rows: ModelState, ids: Tensor, window: int
) -> Loss:
    """Return the loss of as many windows as there are `rows`, or fewer."""
    for row, initial in zip(rows.tensors(), start.tensors(), strict=True):
        row.copy_(initial)
    targets = ids.numel() - 1
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    for at in range(0, min(window, targets), CHUNK):  # a part of each window that goes so far
        bounds = [
            (begin + at, min(begin + at + CHUNK, begin + window, targets))
            for begin in range(0, targets - at, window)
        ]
        sizes = torch.tensor([0, *(end - begin for begin, end in bounds)], dtype=torch.int32)
        slots = torch.arange(len(bounds), dtype=torch.int32, device=ids.device)
        tokens = torch.cat([ids[begin:end] for begin, end in bounds])
        successors = torch.cat([ids[begin + 1 : end + 1] for begin, end in bounds])
        lengths = sizes.cumsum(0, dtype=torch.int32).to(ids.device)
        hidden = model.prefill(tokens, lengths, rows, slots)
        total += _nats(model, hidden, successors).double().sum()
    return Loss(float(total), targets)


def carried_loss(model: LanguageModel, ids: Tensor) -> Loss:
    """Return the loss of ids [tokens] with the state carried through all of them."""
    carried = CarriedLoss(model, model.new_state(1))
    carried.feed(ids)
    return carried.finish()
