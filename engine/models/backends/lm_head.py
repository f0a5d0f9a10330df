"""LmHead: a model's output matrix in the layout of the GPU kernels.

SeparateHead applies it to the hidden states of execution paths that end before the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.models.backends.dispatch import FEW_ROWS
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState, Step, StepToBests
from engine.ops.gemm import linear_best

# The largest vocabulary that is sampled from in negligible time; clusters compute its logits
# together with the layers. For a larger one, a separate head reads the weights once for all
# sequences, and one that finds the best token leaves little to read for sampling.
SMALL_VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class LmHead:
    """A model's head, with rows padded by zeros to a multiple of 8.

    It is a copy if padding was needed.
    """

    weight: Tensor  # [rows, d_model]
    scale: Tensor | None  # [rows], if quantised
    bias: Tensor | None  # [rows]

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """Return the head of a model, padded if necessary."""
        module = model.embedding if model.head is None else model.head
        weight: Tensor = module.weight.detach()
        scale: Tensor | None = getattr(module, "scale", None)
        bias: Tensor | None = model.head_bias
        extra = -len(weight) % 8
        if extra:
            raw = weight.view(torch.int8) if weight.element_size() == 1 else weight
            weight = torch.cat([raw, raw.new_zeros(extra, raw.shape[1])]).view(weight.dtype)
            scale = None if scale is None else torch.cat([scale, scale.new_ones(extra)])
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(extra)])
        return cls(weight, scale, None if bias is None else bias.detach().to(model.activations))


class SeparateHead:
    """The head of steps that end with hidden states.

    Args:
        head: the model's head.
        vocabulary: number of tokens; the head may have more rows.
        few: hidden states [n, d_model] -> logits fp32 [n, vocabulary], for up to FEW_ROWS.
        many: the same for more rows.
        tune_many: chooses kernels of `many` for these numbers of rows.
    """

    def __init__(
        self,
        head: LmHead,
        vocabulary: int,
        *,
        few: Callable[[Tensor], Tensor],
        many: Callable[[Tensor], Tensor],
        tune_many: Callable[[Collection[int]], None],
    ) -> None:
        self._head, self._vocabulary = head, vocabulary
        self._few, self._many, self._tune_many = few, many, tune_many
        # Whether a step of many rows that needs only the best tokens should skip the logits.
        self.finds_best = vocabulary > SMALL_VOCABULARY

    def tune(self, rows: Collection[int]) -> None:
        """Choose kernels for these numbers of rows of logits. Waits for the device."""
        self._tune_many([count for count in rows if count > FEW_ROWS])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits fp32 [n, vocabulary] of hidden [n, d_model]."""
        return self._few(hidden) if len(hidden) <= FEW_ROWS else self._many(hidden)

    def bests(self, hidden: Tensor) -> Tensor:
        """Return the input of `sample_best_`, int64 [n, parts], for hidden [n, d_model]."""
        head = self._head
        return linear_best(hidden, None, 0.0, head.weight, head.bias, self._vocabulary)

    def behind(self, step: Step) -> Step:
        """Extend `step`, which returns hidden states, by the logits."""

        def to_logits(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
            return self.logits(step(tokens, state, slots))

        return to_logits

    def bests_behind(self, step: Step) -> StepToBests | None:
        """Extend `step`, which returns hidden states, by the best tokens; None if it won't pay."""

        def to_bests(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
            return self.bests(step(tokens, state, slots))

        return to_bests if self.finds_best else None
