"""Training data: the split of a text's token ids, and random windows of the training part.

The ids are on the training device, so a batch is one gather. Window starts are drawn by a separate
generator on the CPU, whose state is part of a saved run. The same seed therefore gives the same
windows on every device, and a resumed run continues with the windows it would have had.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """Token ids [tokens], int32: the training part, then the test part of the text."""

    train: Tensor
    test: Tensor

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all ids, by which a resumed run checks that it reads the same data."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            digest.update(part.to("cpu", torch.int32).contiguous().numpy().tobytes())
        return digest.hexdigest()


def split(ids: Tensor, *, window: int, vocab_size: int) -> Split:
    """Cut ids [tokens] after nine tenths, as nanoGPT does for tinyshakespeare.

    Raises ConfigError if the parts are too short for training and testing, or if an id is outside
    of the vocabulary.
    """
    ids = ids.to(torch.int32)
    if ids.numel() == 0:
        raise ConfigError("the training text is empty", param="data")
    cut = int(ids.numel() * 0.9)
    train, test = ids[:cut], ids[cut:]
    if train.numel() <= window or test.numel() < 2:
        raise ConfigError(
            f"the text has {ids.numel()} tokens, nine tenths of which are for training; a window "
            f"of {window} tokens needs a text of at least {min_tokens(window)}",
            param="data",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"the text has token ids from {low} to {high}; the model's vocabulary allows 0 to "
            f"{vocab_size - 1}",
            param="data",
        )
    return Split(train, test)


def min_tokens(window: int) -> int:
    """Return the shortest length of a text, in tokens, that `split` accepts."""
    tokens = window + 2
    while int(tokens * 0.9) <= window or tokens - int(tokens * 0.9) < 2:
        tokens += 1
    return tokens


class Windows:
    """Draws batches of windows, uniformly over all positions of ids [tokens]."""

    def __init__(self, ids: Tensor, *, batch: int, window: int, seed: int) -> None:
        self._ids = ids
        self._batch = batch
        self._positions = ids.numel() - window
        self._offsets = torch.arange(window + 1, device=ids.device)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the next batch: inputs and their successors, both int64 [batch, window]."""
        starts = torch.randint(self._positions, (self._batch, 1), generator=self.generator)
        index = starts.to(self._ids.device, non_blocking=True) + self._offsets
        tokens = self._ids[index].long()  # [batch, window + 1]
        return tokens[:, :-1], tokens[:, 1:]
