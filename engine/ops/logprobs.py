"""Reports: the log-softmax of rows of logits at one token each, and at the top tokens.

Other log-probabilities are not written. On CUDA a row is read once, and once more if several top
tokens are requested. A report is int32 words: the float32 bits of the token's log-probability; 1 if
it is the most likely token, else 0; then for each of the top tokens, best first, its id and the
bits of its log-probability. Of equal logits the lowest id is better.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.protocol.logprobs import words_of_report


class Logprobs(NamedTuple):
    """Unpacked reports."""

    chosen: Tensor  # [...] float32
    is_greedy: Tensor  # [...] bool: whether the token is the most likely one
    top_ids: Tensor  # [..., top] int32, best first
    top_logprobs: Tensor  # [..., top] float32


def read_reports(reports: Tensor) -> Logprobs:
    """Unpack reports [..., words] int32."""
    floats = reports.view(torch.float32)
    return Logprobs(
        floats[..., 0], reports[..., 1] != 0, reports[..., 2::2], floats[..., 1::2][..., 1:]
    )


def target_logprobs(logits: Tensor, targets: Tensor, top: int = 0) -> Tensor:
    """Return reports of `targets` and of the `top` best tokens of each row.

    A row's report does not depend on the others.

    Args:
        logits: float32 [rows, vocab].
        targets: int64 [rows], ids below vocab.
        top: at most engine.protocol.logprobs.MOST_TOP and vocab.

    Returns:
        int32 [rows, 2 + 2 * top]. If a logit is NaN or +infinity, or all are -infinity, the row's
        log-probabilities are NaN, its token is not the most likely one, and its ids are undefined.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, top is out of range; on the CPU also
            targets out of range (on CUDA their log-probabilities are NaN).
    """
    reports: Tensor = torch.ops.minserve.target_logprobs(logits, targets, top)
    return reports


def report_logprobs_(
    logits: Tensor, tops: Tensor, cursor: Tensor, out: Tensor, told: Tensor, reports: Tensor
) -> None:
    """Report the tokens that `sample_` has just sampled; does not wait for the device.

    A row that has sampled since the last call has a cursor beyond `told`. Its token out[told[r], r]
    is reported at reports[told[r], r], with its tops[r] best tokens, and told[r] is incremented.
    Call it once for each step of rows that ask for reports.

    Args:
        logits: float32 [rows, vocab], of which the log-softmax is reported.
        tops: int32 [rows], at most what there is room for; negative: no report.
        cursor: int32 [rows], as left by sample_.
        out: int32 [steps, rows], likewise.
        told: int32 [rows]; **changed in place**.
        reports: int32 [steps, rows, 2 + 2 * room], room at most MOST_TOP and vocab; **changed in
            place**. Words after a report of fewer top tokens are left unchanged.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    torch.ops.minserve.report_logprobs_(logits, tops, cursor, out, told, reports)


def reference(logits: Tensor, targets: Tensor, top: int = 0) -> Logprobs:
    """Reference of target_logprobs in float64, unpacked."""
    best, order = logits.double().sort(dim=-1, descending=True, stable=True)
    finite = best[:, :1].isfinite()
    logprobs = logits.double().log_softmax(-1).masked_fill(~finite, float("nan"))
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    is_greedy = (order[:, 0] == targets) & finite.squeeze(-1)
    ids = order[:, :top]
    return Logprobs(chosen, is_greedy, ids.int(), logprobs.gather(-1, ids))


def _fake(logits: Tensor, targets: Tensor, top: int = 0) -> Tensor:
    return targets.new_empty(len(logits), words_of_report(top), dtype=torch.int32)


def _fake_report(*_: Tensor) -> None:
    """Return nothing; the changed tensors keep their shapes."""


torch.library.register_fake("minserve::target_logprobs", _fake)
torch.library.register_fake("minserve::report_logprobs_", _fake_report)
