"""target_logprobs: the log-softmax of each row at one given token, without writing the others.

Beside it whether that token is the most likely one. On CUDA a row is read once.
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def target_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Natural log-probabilities of `targets`.

    Args:
        logits: float32 [rows, vocab].
        targets: int64 [rows], ids below vocab.

    Returns:
        (float32 [rows], bool [rows]): log-softmax at the target, and whether the target is the most
        likely token, of equal ones the one with the lowest id. NaN and False where a logit is NaN
        or +infinity, or all are -infinity.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also targets out of range
            (on CUDA their results are NaN and False).
    """
    logprobs, is_greedy = torch.ops.minserve.target_logprobs(logits, targets)
    return logprobs, is_greedy


def reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float64."""
    logprobs = logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    is_greedy = (logits.max(-1).indices == targets) & logits.max(-1).values.isfinite()
    return logprobs.masked_fill(~logits.max(-1).values.isfinite(), float("nan")), is_greedy


def _fake(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits)), logits.new_empty(len(logits), dtype=torch.bool)


torch.library.register_fake("minserve::target_logprobs", _fake)
