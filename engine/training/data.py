"""Training data: parts of token ids, and the windows of the training part that a step reads.

Ids are arrays in memory or mapped from a token cache (token_cache.py), so that a text may be larger
than the memory of the GPU. A generator on the CPU, whose state is part of a saved run, draws where
windows begin. The same seed therefore gives the same windows on every device and on any number of
GPUs, and a resumed run continues with the windows it would have had.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ConfigError

Ids = npt.NDArray[Any]  # of an integer type, [tokens]
Positions = npt.NDArray[np.int64]

_HASHED_AT_ONCE = 1 << 24  # ids


@dataclass(frozen=True)
class Part:
    """One part of the data: ids [tokens], of an integer type, perhaps mapped from a file.

    Args:
        ids: the tokens of all its documents, one after another.
        starts: positions of ids at which a document or a repeated header begins; empty: unknown.
        bytes: UTF-8 bytes of the text.
        what: which part of the data it is, in words for a model card.
    """

    ids: Ids
    starts: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    bytes: int = 0
    what: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device | str) -> Tensor:
        """Return all ids, int32 [tokens], on a device."""
        return torch.from_numpy(self.ids.astype(np.int32)).to(device)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ids as int32."""
        digest = hashlib.sha256()
        for at in range(0, len(self.ids), _HASHED_AT_ONCE):
            digest.update(self.ids[at : at + _HASHED_AT_ONCE].astype("<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Data:
    """What a run trains on (train), chooses its best weights by (valid) and reports (test).

    Without a test part the validation part is reported.
    """

    train: Part
    valid: Part
    test: Part | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name."""
        found = {"train": self.train, "valid": self.valid}
        return found if self.test is None else {**found, "test": self.test}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all ids, by which a resumed run checks that it reads the same data."""
        prints = (part.fingerprint for part in self.parts.values())
        return hashlib.sha256(" ".join(prints).encode()).hexdigest()

    def check(self, *, window: int, vocab_size: int) -> None:
        """Raise ConfigError if a part is too short, or if an id is outside of the vocabulary."""
        for name, part in self.parts.items():
            least = window + 1 if name == "train" else 2
            if len(part) < least:
                raise ConfigError(
                    f"the {name} part of the data has {len(part)} tokens; allowed: at least "
                    f"{least}" + (f", for windows of {window}" if name == "train" else ""),
                    param="data",
                )
            low, high = int(part.ids.min()), int(part.ids.max())
            if low < 0 or high >= vocab_size:
                raise ConfigError(
                    f"the text has token ids from {low} to {high}; the model's vocabulary allows 0 "
                    f"to {vocab_size - 1}",
                    param="data",
                )


def split(part: Part, *, window: int) -> Data:
    """Cut a text after nine tenths, as nanoGPT does for tinyshakespeare.

    The rest is the validation part. Raises ConfigError if the text is too short.
    """
    tokens = len(part)
    if tokens == 0:
        raise ConfigError("the training text is empty", param="data")
    cut = int(tokens * 0.9)
    if cut <= window or tokens - cut < 2:
        raise ConfigError(
            f"the text has {tokens} tokens, nine tenths of which are for training; a window "
            f"of {window} tokens needs a text of at least {min_tokens(window)}",
            param="data",
        )
    bytes_before = round(part.bytes * cut / tokens)
    return Data(
        Part(part.ids[:cut], part.starts[part.starts < cut], bytes_before, "the first nine tenths"),
        Part(
            part.ids[cut:],
            part.starts[part.starts >= cut] - cut,
            part.bytes - bytes_before,
            "the last tenth",
        ),
    )


def min_tokens(window: int) -> int:
    """Return the shortest length of a text, in tokens, that `split` accepts."""
    tokens = window + 2
    while int(tokens * 0.9) <= window or tokens - int(tokens * 0.9) < 2:
        tokens += 1
    return tokens


@dataclass(frozen=True)
class Batch:
    """One step's windows, on the training device."""

    inputs: Tensor  # int64 [windows, time]
    targets: Tensor  # their successors, int64 [windows, time]
    fresh: Tensor  # bool [windows]: the window begins at the initial state


class Windows:
    """Draws batches of windows.

    Every row of a batch is a stream. With probability `carry` its next window continues where its
    last one ended; otherwise it begins anew, at one of the part's `starts`, or anywhere if there
    are fewer of these than rows. With `carry` 0 all windows are drawn uniformly over all positions.

    Args:
        part: the ids to read.
        batch: windows of a step, of all processes together.
        window: tokens of a window.
        seed: of the draws.
        carry: probability of continuing.
        rows: which rows of the batch this process reads; None: all.
        device: where batches go.
    """

    def __init__(
        self,
        part: Part,
        *,
        batch: int,
        window: int,
        seed: int,
        carry: float = 0.0,
        rows: slice | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._ids = part.ids
        self._batch = batch
        self._window = window
        self._carry = carry
        self._rows = rows or slice(None)
        self._device = torch.device(device)
        self._ends = len(part) - window  # positions from here on leave no whole window
        starts = part.starts[part.starts < self._ends]
        if not carry or len(starts) < batch:
            starts = starts[:0]
        self._starts = torch.from_numpy(starts.astype(np.int64))
        self._offsets = np.arange(window + 1)
        self.generator = torch.Generator().manual_seed(seed)
        self.positions = torch.full((batch,), self._ends)  # of the streams; int64 [batch]

    def draw(self) -> Batch:
        """Return the next batch."""
        fresh = torch.ones(self._batch, dtype=torch.bool)
        if self._carry:
            stops = torch.rand(self._batch, generator=self.generator) >= self._carry
            fresh = stops | (self.positions >= self._ends)
        if len(self._starts):
            chosen = torch.randint(len(self._starts), (self._batch,), generator=self.generator)
            begins = self._starts[chosen]
        else:
            drawn = torch.randint(self._ends, (self._batch, 1), generator=self.generator)
            begins = drawn.squeeze(1)
        at = torch.where(fresh, begins, self.positions)
        self.positions = at + self._window
        rows = self._ids[at[self._rows].numpy()[:, None] + self._offsets]
        tokens = torch.from_numpy(rows.astype(np.int64))  # [windows, window + 1]
        mine = fresh[self._rows]
        if self._device.type == "cuda":
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
            mine = mine.pin_memory().to(self._device, non_blocking=True)
        return Batch(tokens[:, :-1], tokens[:, 1:], mine)
