"""ModelBackend: the six things that the engine asks of a model, and who does them quickest.

LM says what the model computes, and its own methods compute it. An implementation that fuses or
prepacks for one kind of device takes its weights from an LM and has these same methods.

Some of them read a sequence to the same bits in any company (`--deterministic`): CpuBackend always,
HopperBackend on request. The libraries that LM's own methods call do not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.device import available_memory
from engine.errors import ConfigError
from engine.models.backends import cpu, fused_gemm, hopper, persistent_decode
from engine.models.backends.cpu import CpuBackend
from engine.models.backends.eager import EagerBackend
from engine.models.backends.hopper import HopperBackend
from engine.models.backends.lm_head import LmHead
from engine.models.backends.persistent_decode import PersistentDecode
from engine.models.backends.tuning_cache import TuningCache
from engine.models.backends.weight_transforms import bytes_of_copy, widened
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState, StepToBests

log = logging.getLogger(__name__)


class ModelBackend(Protocol):
    """Reads tokens into `state`, in place.

    No method but `prepare` waits for the device, looks at indices on the host or changes a row
    whose slot is negative, so `prefill`, `step`, what `step_to_bests` gives and `logits` can be
    captured in a CUDA graph on a GPU. Tensors are on the model's device. On a GPU tokens and slots
    out of range are read as rows of zeros and as padding; on a CPU they raise RuntimeError, as do
    tensors whose shapes or dtypes do not fit, everywhere.
    """

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        """Chooses kernels before any is captured. Calls of other sizes are served as well.

        Waits for the device, up to a second for each power of two among the sizes; what lacks
        memory to be tried in is left as it was.

        Args:
            steps: numbers of sequences of a step.
            prompts: numbers of tokens of a prefill, all its sequences together.
            logits: numbers of hidden states that `logits` is asked for.
        """

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Reads packed prompts, or further parts of them.

        Args:
            tokens: int32 [tokens]; those beyond the last sequence are padding, which no state sees.
            cu_seqlens: int32 [sequences + 1], where each sequence begins in `tokens`, and where the
                last one ends. A sequence may be empty.
            state: its rows move on in place.
            slots: int32 [sequences], each one's row; negative: a padding row. No row twice.

        Returns:
            Hidden states [tokens, d_model] for `logits`, fp32 or in the type of the activations.
        """

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Reads one token of every sequence.

        Args:
            tokens: int32 [batch].
            state: its rows move on in place.
            slots: int32 [batch], each one's row; negative: a padding row, whose logits mean
                nothing. No row twice.

        Returns:
            logits fp32 [batch, vocab]; rows may be further apart than vocab.
        """

    def step_to_bests(self, rows: int) -> StepToBests | None:
        """A step that finds the best token of each of so many rows instead of all logits.

        Returns:
            What takes `step`'s arguments and gives what `sample_best_` draws from, int64
            [rows, parts]; None where all logits are computed anyway, or are as quick.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, d_model], rows of what `prefill` gave -> logits fp32 [n, vocab]."""

    def initial_state_rows(self) -> Tensor:
        """Every layer's h_0: [layers, inner] fp32."""


def select_backend(
    model: LM,
    device: torch.device,
    *,
    deterministic: bool = False,
    reserve: int = 0,
    tuning_folder: Path | None = None,
) -> ModelBackend:
    """The quickest implementation of `model`, whose weights are on `device`.

    It may take them out of `model`, which then is of no more use, or move those of norms elsewhere.

    Args:
        deterministic: what it gives for a row or a sequence depends on that alone, bit for bit, and
            not on the others of a call; pieces of a prompt end at multiples of SCAN_CHUNK.
        reserve: bytes of the device's memory that are needed for more than the model.
        tuning_folder: where what is measured is kept for the next start; None: nowhere.

    Raises:
        ConfigError: with `deterministic`, there is no such implementation.
    """
    reason = cpu.supports(model)
    if reason is None:
        return CpuBackend(model, take=True)
    if device.type != "cuda":
        log.info("CPU backend: not used: %s", reason)
        return _eager(model, deterministic, None)
    # Nothing is measured where a row's bits may not depend on what was quicker.
    tuning = TuningCache.of(None if deterministic else tuning_folder, model, device)
    reason = hopper.supports(model, device)
    if reason is None:
        return HopperBackend(model, deterministic=deterministic, tuning=tuning)
    log.info("Hopper backend: not used: %s", reason)
    if not deterministic and _would_gain_by_a_copy(model, device):
        needed, free = bytes_of_copy(model), available_memory(device) - reserve
        if 2 * needed <= free:
            log.info("%d MB for a copy of the 8-bit weights in 16 bits", needed // 10**6)
            few = PersistentDecode(model, LmHead.of(model))
            return HopperBackend(widened(model), few=few, tuning=tuning)
        log.warning(
            "no copy of the 8-bit weights in 16 bits, which takes %d MB and is made where twice as "
            "many are free (%d MB): prompts and batches of more than %d sequences will be slow",
            *(needed // 10**6, max(free, 0) // 10**6, PersistentDecode.most_rows(model)),
        )
    return _eager(model, deterministic, tuning)


def _eager(model: LM, deterministic: bool, tuning: TuningCache | None) -> EagerBackend:
    if deterministic:
        raise ConfigError(
            "deterministic is not possible for this model and device; allowed: float32 or bfloat16 "
            "weights on a CPU, also quantised to int8, or unquantised bfloat16 weights on a Hopper "
            f"GPU with kernels built for it (90a), {fused_gemm.WIDTHS}",
            param="deterministic",
        )
    return EagerBackend(model, tuning=tuning)


def _would_gain_by_a_copy(model: LM, device: torch.device) -> bool:
    """Whether steps of a few sequences are a kernel that reads 8-bit weights as they are, and all
    else would be several times as quick with a copy in 16 bits."""
    return (
        model.config.quantization is not None
        and persistent_decode.supports(model, device) is None
        and fused_gemm.supports_widths(model.config)
    )
