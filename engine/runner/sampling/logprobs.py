"""Reported: log-probabilities of sampled tokens, for the rows whose requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.ops.upload import UploadRing
from engine.protocol.logprobs import PackedLogprobs, words_of_report
from engine.runner.sampling.random_streams import token_reports


class Reported(NamedTuple):
    """Reports of some rows."""

    asked: list[tuple[int, int]]  # (row, number of top tokens)
    words: Tensor  # int32 [asked, words], with room for the largest number of top tokens

    def to_host(self) -> Reported:
        """Return a copy in host memory; valid once the device is done."""
        return Reported(self.asked, self.words.to("cpu", non_blocking=True))

    def by_row(self) -> dict[int, PackedLogprobs]:
        """Return reports in host memory as messages, by row."""
        words = self.words.numpy()
        return {
            row: PackedLogprobs(top, words[index, : words_of_report(top)].tobytes())
            for index, (row, top) in enumerate(self.asked)
        }


def report(
    logits: Tensor, tokens: Tensor, asked: Sequence[tuple[int, int]], uploads: UploadRing
) -> Reported | None:
    """Make the reports of sampled tokens; None if no row asked.

    A row whose logits are not finite has a negative token, and its report is meaningless.

    Args:
        logits: fp32 [rows, vocab].
        tokens: int32 [rows].
        asked: (row, number of top tokens) of the rows that asked.
        uploads: for the indices.
    """
    if not asked:
        return None
    if len(asked) < len(logits):
        rows = uploads.put([row for row, _ in asked])
        logits, tokens = logits.index_select(0, rows), tokens.index_select(0, rows)
    top = max(top for _, top in asked)
    return Reported(list(asked), token_reports(logits, tokens.clamp(min=0).long(), top))
