"""ModelBackend: the interface of a model to the engine, and the choice of its implementation.

A LanguageModel defines what is computed, and its own methods compute it. An implementation that
fuses operators or packs weights for one kind of device takes its weights from it and has the same
methods.

Some implementations compute bitwise equal results for a sequence whatever else is in the batch
(`--deterministic`): CpuBackend always, HopperBackend and on Hopper SelectiveBackend on request. The
libraries that a model's own methods call do not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.backend_info import BackendInfo
from engine.device import available_memory
from engine.errors import ConfigError
from engine.models.backends import (
    cpu,
    eager,
    fused_gemm,
    hopper,
    persistent_decode,
    selective,
    ssd_layers,
)
from engine.models.backends.blocks import compile_blocks, is_ssd
from engine.models.backends.cpu import CpuBackend
from engine.models.backends.dispatch import PathBackend
from engine.models.backends.eager import EagerBackend
from engine.models.backends.hopper import HopperBackend
from engine.models.backends.lm_head import LmHead
from engine.models.backends.persistent_decode import PersistentDecode
from engine.models.backends.selective import SelectiveBackend
from engine.models.backends.tuning_cache import TuningCache
from engine.models.backends.weight_transforms import bytes_of_copy, widened
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState, StepToBests

log = logging.getLogger(__name__)


class ModelBackend(Protocol):
    """Reads tokens into `state`, in place.

    Only `prepare` waits for the device. The other methods do not look at indices on the host, and
    do not change rows whose slot is negative. So `prefill`, `step`, the result of `step_to_bests`,
    and `logits` can be captured in a CUDA graph. Tensors are on the model's device. On a GPU,
    tokens out of range are read as rows of zeros and slots out of range as padding; on a CPU both
    raise RuntimeError. Tensors of wrong shape or dtype raise RuntimeError everywhere.

    `info` says which execution paths it has, and why others are missing.
    """

    info: BackendInfo

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Type of the result of `prefill`: fp32 or that of the activations."""

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        """Choose kernels before any is captured; calls of other sizes work as well.

        Waits for the device, up to a second for each power of two among the sizes. If memory is too
        short to try a size, its default stays.

        Args:
            steps: numbers of sequences in a step.
            prompts: numbers of tokens in a prefill, all its sequences together.
            logits: numbers of hidden states passed to `logits`.
        """

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Read packed prompts, or further parts of them.

        Args:
            tokens: int32 [tokens]; those beyond the last sequence are padding, which affects no
                state.
            cu_seqlens: int32 [sequences + 1], where each sequence begins in `tokens`, and where the
                last one ends. A sequence may be empty.
            state: its rows are updated in place.
            slots: int32 [sequences], each one's row; negative: a padding row. No row may occur
                twice.

        Returns:
            Hidden states [tokens, d_model] of type `hidden_dtype`, for `logits`.
        """

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token of every sequence.

        Args:
            tokens: int32 [batch].
            state: its rows are updated in place.
            slots: int32 [batch], each one's row; negative: a padding row, whose logits are
                undefined. No row may occur twice.

        Returns:
            Logits fp32 [batch, vocab]; the row stride may exceed vocab.
        """

    def step_to_bests(self, rows: int) -> StepToBests | None:
        """Return a step that finds the best token of each of `rows` rows instead of all logits.

        Returns:
            A callable with the arguments of `step` that returns the input of `sample_best_`, int64
            [rows, parts]; None if all logits are computed anyway, or are as fast.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits fp32 [n, vocab] of hidden [n, d_model], rows of the result of `prefill`.

        They may be rows of several results: where results are deterministic, a row's logits do not
        depend on the others.
        """

    def initial_state(self) -> dict[str, Tensor]:
        """Return the state tensors [layers, *shape] that do not begin as zeros, by name."""


def select_backend(
    model: LanguageModel,
    device: torch.device,
    *,
    deterministic: bool = False,
    reserve: int = 0,
    tuning_folder: Path | None = None,
) -> ModelBackend:
    """Return the fastest implementation of `model`, whose weights are on `device`.

    It may move the weights out of `model`, which is useless then, or fold those of norms into
    others.

    Args:
        model: the model.
        device: the device.
        deterministic: the result for a row or a sequence must depend only on that, bit for bit, and
            not on the rest of the call; parts of a prompt end at multiples of SCAN_CHUNK.
        reserve: bytes of the device's memory needed for other purposes.
        tuning_folder: where measurements are kept for the next start; None: nowhere.

    Raises:
        ConfigError: with `deterministic`, if there is no such implementation.
    """
    reason = cpu.supports(model)
    if reason is None:
        return CpuBackend(model, take=True)
    if device.type != "cuda":
        log.info("CPU backend: not used: %s", reason)
        return _instead_of(cpu.BACKEND, reason, _eager(model, deterministic, None, reason))
    # Nothing is measured if a row's bits must not depend on what was faster.
    tuning = TuningCache.of(None if deterministic else tuning_folder, model, device)
    name, reason = _backend_on_gpu(model, device, deterministic)
    if reason is None:
        if name == selective.BACKEND:
            return SelectiveBackend(model, deterministic=deterministic, tuning=tuning)
        return HopperBackend(model, deterministic=deterministic, tuning=tuning)
    log.info("%s backend: not used: %s", name.capitalize(), reason)
    if not deterministic and _would_gain_by_a_copy(model, device):
        needed, free = bytes_of_copy(model), available_memory(device) - reserve
        if 2 * needed <= free:
            log.info("%d MB for a copy of the 8-bit weights in 16 bits", needed // 10**6)
            few = PersistentDecode(model, LmHead.of(model))
            backend = HopperBackend(widened(model), few=few, tuning=tuning)
            return _instead_of(f"{hopper.BACKEND} without a 16-bit copy", reason, backend)
        log.warning(
            "no copy of the 8-bit weights in 16 bits, which takes %d MB and needs twice as much "
            "free (%d MB are): prompts and batches of more than %d sequences will be slow",
            *(needed // 10**6, max(free, 0) // 10**6, PersistentDecode.most_rows(model)),
        )
    return _instead_of(name, reason, _eager(model, deterministic, tuning, reason))


def explain_backend(model: LanguageModel, device: torch.device) -> BackendInfo:
    """Return which backend `select_backend` would choose, and its paths, with the reasons.

    The model may be on the meta device. An 8-bit model on Hopper is explained without the 16-bit
    copy, which depends on free memory (`bytes_of_copy`).
    """
    if device.type != "cuda":
        reason = cpu.supports(model)
        if reason is None:
            return cpu.INFO
        return eager.explain(model, device).instead_of(cpu.BACKEND, reason)
    name, reason = _backend_on_gpu(model, device)
    if reason is None:
        if name == selective.BACKEND:
            return selective.explain(model, device)
        return hopper.explain(model, device)
    return eager.explain(model, device).instead_of(name, reason)


def _backend_on_gpu(
    model: LanguageModel, device: torch.device, deterministic: bool = False
) -> tuple[str, str | None]:
    """Return the backend with kernels for such a cell, and why it is not used; None: it is."""
    if model.config.cell in selective.SUPPORT.cells:
        return selective.BACKEND, selective.supports(model, device, deterministic=deterministic)
    return hopper.BACKEND, hopper.supports(model, device)


def copy_wanted(model: LanguageModel, device: torch.device) -> int:
    """Return the bytes of the 16-bit copy that would make an 8-bit model faster; 0: none would.

    The engine makes it if twice as much is free.
    """
    if device.type != "cuda" or not _would_gain_by_a_copy(model, device):
        return 0
    return bytes_of_copy(model)


def _instead_of(name: str, reason: str, backend: PathBackend) -> PathBackend:
    """Return the backend, whose info then says why another one is not used."""
    backend.info = backend.info.instead_of(name, reason)
    return backend


def _eager(
    model: LanguageModel, deterministic: bool, tuning: TuningCache | None, reason: str
) -> EagerBackend:
    """Return the backend of any model; `reason`: why there is no other one.

    Raises ConfigError if it must be deterministic.
    """
    if deterministic:
        cell, allowed = model.config.cell, []
        if cell in cpu.SUPPORT.cells:
            allowed.append("float32, bfloat16 or int8 weights on a CPU")
        if cell in (*fused_gemm.SUPPORT.cells, *selective.SUPPORT.cells):
            allowed.append(
                "unquantised bfloat16 weights on a Hopper GPU with kernels built for it (90a), "
                + _widths(model)
            )
        raise ConfigError(
            f"deterministic is not possible for this model and device: {reason}; allowed: "
            f"{', or '.join(allowed) or f'false with the cell {cell!r}'}",
            param="deterministic",
        )
    return EagerBackend(model, tuning=tuning)


def _widths(model: LanguageModel) -> str:
    """Return what the kernels ask of the widths of such a model."""
    if model.config.cell not in selective.SUPPORT.cells:
        return fused_gemm.WIDTHS
    return ssd_layers.WIDTHS if is_ssd(model.program()) else selective.WIDTHS


def _would_gain_by_a_copy(model: LanguageModel, device: torch.device) -> bool:
    """Return whether a 16-bit copy of the weights would make everything but small steps faster.

    Steps of a few sequences are then computed by a kernel that reads the 8-bit weights directly;
    everything else would be several times as fast with the copy.
    """
    return (
        model.config.quantization is not None
        and persistent_decode.supports(model, device) is None
        and fused_gemm.supports_widths(compile_blocks(model))
    )
