"""Reported: log-probabilities of sampled tokens, for the rows whose requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.ops.upload import UploadRing
from engine.protocol.logprobs import PackedLogprobs, words_of_report
from engine.runner.sampling.random_streams import token_reports


class Reported(NamedTuple):
    """Of some rows."""

    asked: list[tuple[int, int]]  # (row, how many best tokens)
    words: Tensor  # int32 [asked, words], with room for the most of these

    def to_host(self) -> Reported:
        """The same in host memory, once the device is done."""
        return Reported(self.asked, self.words.to("cpu", non_blocking=True))

    def by_row(self) -> dict[int, PackedLogprobs]:
        """What is in host memory, as messages."""
        words = self.words.numpy()
        return {
            row: PackedLogprobs(top, words[index, : words_of_report(top)].tobytes())
            for index, (row, top) in enumerate(self.asked)
        }


def report(
    logits: Tensor, tokens: Tensor, asked: Sequence[tuple[int, int]], uploads: UploadRing
) -> Reported | None:
    """Of the sampled `tokens` [rows] int32, by logits [rows, vocab] fp32; None where nobody asked.
    A row of logits that are not finite has a negative token, and its report means nothing."""
    if not asked:
        return None
    if len(asked) < len(logits):
        rows = uploads.put([row for row, _ in asked])
        logits, tokens = logits.index_select(0, rows), tokens.index_select(0, rows)
    top = max(top for _, top in asked)
    return Reported(list(asked), token_reports(logits, tokens.clamp(min=0).long(), top))
