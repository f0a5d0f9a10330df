"""ModelBackend: the six things that the engine asks of a model, and who does them quickest.

LM says what the model computes, and its own methods compute it. An implementation that fuses or
prepacks for one kind of device takes its weights from an LM and has these same methods.

Some of them read a sequence to the same bits in any company (`--deterministic`): CpuBackend always,
HopperBackend on request. The libraries that LM's own methods call do not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from engine.device import available_memory
from engine.errors import ConfigError
from engine.models.backends import cublas as products
from engine.models.backends import hopper
from engine.models.backends.cpu import CpuBackend, can_pack
from engine.models.backends.cublas import CublasPath
from engine.models.backends.lm_head import LmHead
from engine.models.backends.persistent_decode import PersistentDecode, runs_kernels
from engine.models.backends.weight_transforms import bytes_of_copy, widened
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState, StepToBests

log = logging.getLogger(__name__)


class ModelBackend(Protocol):
    """Reads tokens into `state`, in place. No method but `prepare` waits for the device, looks at
    indices on the host or changes a row whose slot is negative, so `prefill`, `step`, what
    `step_to_bests` gives and `logits` can be captured in a CUDA graph on a GPU."""

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        """Chooses kernels for steps of so many rows, prompts of so many tokens and so many rows of
        `logits`, before any is captured. Calls of other sizes are served as well."""

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Packed prompts: tokens int32 [tokens], cu_seqlens int32 [sequences + 1], slots int32
        [sequences] -> hidden states [tokens, d_model] for `logits`. Sequences may be empty; tokens
        beyond the last one are padding, which no state sees."""

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """One token of every sequence: tokens int32 [batch], slots int32 [batch]
        -> logits fp32 [batch, vocab]."""

    def step_to_bests(self, rows: int) -> StepToBests | None:
        """What takes `step`'s arguments and gives, instead of the logits of so many rows, what
        `sample_best_` reads, int64 [rows, parts]; None where all logits are computed anyway."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, d_model] -> fp32 [n, vocab]."""

    def initial_state_rows(self) -> Tensor:
        """Every layer's h_0: [layers, inner] fp32."""


class EagerBackend:
    """LM itself, operator by operator; where there are kernels for it, what stands between its
    products in one, and steps of a few sequences in one altogether."""

    def __init__(self, model: LM) -> None:
        self._model = model
        head = cache(partial(LmHead.of, model))  # which may be a copy: one for both
        self._products = CublasPath(model, head()) if products.supports(model) else None
        self._reader: LM | CublasPath = self._products or model
        whole = runs_kernels(model) and PersistentDecode.most_rows(model) > 0
        self._whole = PersistentDecode(model, head()) if whole else None

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        if self._products is not None:
            fewest = 0 if self._whole is None else self._whole.rows
            many = {rows for rows in steps if rows > fewest}
            self._products.tune(sorted(many.union(prompts)), sorted(many.union(logits)))

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        return self._reader.prefill(tokens, cu_seqlens, state, slots)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        if self._whole is not None and 0 < len(tokens) <= self._whole.rows:
            return self._whole.step(tokens, state, slots)[:, : self._model.config.vocab_size]
        return self._reader.logits(self._reader.step(tokens, state, slots))

    def step_to_bests(self, rows: int) -> StepToBests | None:
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        return self._reader.logits(hidden)

    def initial_state_rows(self) -> Tensor:
        return self._model.initial_state_rows()


def select_backend(
    model: LM, device: torch.device, *, deterministic: bool = False, reserve: int = 0
) -> ModelBackend:
    """The quickest implementation of `model`, whose weights are on `device`.

    It may take them out of `model`, which then is of no more use, or move those of norms elsewhere.
    With `deterministic`, what it gives for a row or a sequence depends on that alone, bit for bit,
    and not on the others of a call; pieces of a prompt end at multiples of SCAN_CHUNK. `reserve`:
    bytes of the device's memory that are needed for more than the model. Raises ConfigError where
    there is no such implementation.
    """
    if can_pack(model):
        return CpuBackend(model, take=True)
    if device.type == "cuda" and hopper.supports(model):
        return hopper.HopperBackend(model, deterministic=deterministic)
    if not deterministic and device.type == "cuda" and _would_gain_by_a_copy(model):
        needed, free = bytes_of_copy(model), available_memory(device) - reserve
        if 2 * needed <= free:
            log.info("%d MB for a copy of the 8-bit weights in 16 bits", needed // 10**6)
            few = PersistentDecode(model, LmHead.of(model))
            return hopper.HopperBackend(widened(model), few=few)
        log.warning(
            "no copy of the 8-bit weights in 16 bits, which takes %d MB and is made where twice as "
            "many are free (%d MB): prompts and batches of more than %d sequences will be slow",
            *(needed // 10**6, max(free, 0) // 10**6, PersistentDecode.most_rows(model)),
        )
    if deterministic:
        raise ConfigError(
            "deterministic is not possible for this model and device; allowed: float32 or bfloat16 "
            "weights on a CPU, also quantised to int8, or unquantised bfloat16 weights on a Hopper "
            f"GPU with kernels built for it (90a), {hopper.WIDTHS}",
            param="deterministic",
        )
    return EagerBackend(model)


def _would_gain_by_a_copy(model: LM) -> bool:
    """Whether steps of a few sequences are a kernel that reads 8-bit weights as they are, and all
    else would be several times as quick with a copy in 16 bits."""
    return (
        model.config.quantization is not None
        and runs_kernels(model)
        and hopper.supports_widths(model.config)
        and PersistentDecode.most_rows(model) > 0
    )
