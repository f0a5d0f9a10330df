"""Which models kernels take: the reason where they do not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.models.backends import cluster_decode, cpu, cublas, fused_gemm, persistent_decode
from engine.models.backends.cpu import CpuBackend
from engine.models.backends.eager import EagerBackend
from engine.models.backends.fused_gemm import supports_widths
from engine.models.backends.selector import select_backend
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from tests.models.variants import blocks_of

CONFIG = MinRnnConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=1)
CPU = torch.device("cpu")
REFUSAL = "cell 'other', but its kernels have only mingru and minlstm"


def of_another_cell() -> LM:
    """A model of a recurrence that kernels do not have, with as many gates as one of theirs."""
    model = LM(CONFIG).eval()
    for layer in model.layers:
        layer.cell.recurrence = dataclasses.replace(layer.cell.recurrence, cell="other")
    return model


def test_no_kernel_takes_a_cell_for_another() -> None:
    model = of_another_cell()
    assert cpu.supports(LM(CONFIG)) is None
    assert cpu.supports(model) == REFUSAL
    with pytest.raises(ValueError, match="other"):
        CpuBackend(model)
    assert isinstance(select_backend(model, CPU), EagerBackend)


@pytest.mark.gpu
def test_no_kernel_on_a_gpu_takes_a_cell_for_another() -> None:
    cuda, model = torch.device("cuda"), of_another_cell().to("cuda", torch.bfloat16)
    for path in (fused_gemm, cublas, persistent_decode, cluster_decode):
        assert path.supports(model, cuda) == REFUSAL
    served = select_backend(model, cuda)
    assert isinstance(served, EagerBackend)
    assert [path.name for path in served.paths] == ["torch"]


def test_kernels_for_gpus_say_that_there_is_none() -> None:
    model = LM(CONFIG).bfloat16()
    for path in (fused_gemm, cublas, persistent_decode, cluster_decode):
        assert path.supports(model, CPU) == "not on a GPU"


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"vocab_size": 65_535 * 128}, True),
        ({"vocab_size": 65_535 * 128 + 1}, False),
        ({"d_model": 200}, False),
    ],
)
def test_widths_that_kernels_can_cut(changes: dict[str, int], taken: bool) -> None:
    assert supports_widths(blocks_of(dataclasses.replace(CONFIG, **changes))) is taken
