"""CpuBackend by each instruction set that this machine has: the model's equations, and the same
bits for a row by itself and in company."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ops import cpu_isa

ISAS = ["generic", "avx2", "avx512", "avx512_bf16", "amx"]  # each has all of those before it

# One model of each family, and all others.
FEW = """(
    ({"cell": "mingru"}, "bfloat16"),
    ({"family": "hgrn"}, "int8-bfloat16"),
    ({"family": "mamba", "state_size": 5}, "float32"),
    ({"family": "mamba2", "groups": 3}, "int8-bfloat16"),
)"""
MANY = """(
    ({"cell": "minlstm"}, "int8-bfloat16"),
    ({"cell": "mingru"}, "float32"),
    ({"family": "hgrn", "conv_kernel": 4}, "bfloat16"),
    ({"cell": "hgrn"}, "float32"),
    ({"family": "mamba"}, "bfloat16"),
    ({"family": "mamba", "selection_norm_eps": 1e-6}, "int8-bfloat16"),
    ({"family": "mamba2"}, "bfloat16"),
    ({"family": "mamba2", "state_size": 5}, "float32"),
)"""
CHECK = """
import torch
from engine.models.backends.cpu import CpuBackend
from engine.ops import cpu_isa
from tests.models import reference
from tests.models.test_packed import (
    BF16, FP32, int32, plain_logits, prefilled, quantized, random_tokens, relative_error, stepped,
    wide)

for options, kind in %s:
    model = plain = wide(options)
    if kind.endswith("bfloat16"):
        model = plain = model.bfloat16()
    weights = dict(model.state_dict())
    if kind.startswith("int8"):
        model, weights = quantized(model)
    packed = CpuBackend(model)
    tokens = random_tokens(211, 40, 3)
    together = stepped(packed, tokens, packed.new_state(40), int32(list(range(40))))
    for row in (0, 3, 39):
        alone = stepped(packed, tokens[row : row + 1], packed.new_state(1), int32([0]))
        assert torch.equal(alone[0], together[row]), (kind, row)
        if model.config.cell in ("hgrn", "mamba", "mamba2"):
            expected = plain_logits(plain, weights, tokens[row : row + 1])[0]
        else:
            expected = reference.logits(model.config, weights, tokens[row])
        error = relative_error(together[row], expected)
        assert error < (BF16 if kind.endswith("bfloat16") else FP32), (kind, row, error)
    prompt, state, parts = random_tokens(211, 300), packed.new_state(1), packed.new_state(1)
    whole = prefilled(packed, prompt, state, 0)
    cut = torch.cat([prefilled(packed, part, parts, 0) for part in prompt.tensor_split([128])])
    assert torch.equal(whole, cut), kind
    for name, tensor in state.named.items():
        assert torch.equal(tensor, parts[name]), (kind, name)
print(cpu_isa())
"""


@pytest.mark.parametrize(
    ("isa", "models"),
    # The best that a machine has, the other tests run.
    [
        (ISAS[0], FEW),
        pytest.param(ISAS[0], MANY, marks=pytest.mark.slow),
        *(
            pytest.param(isa, models, marks=pytest.mark.slow)
            for isa in ISAS[1:]
            for models in (FEW, MANY)
        ),
    ],
    ids=lambda value: value if value in ISAS else "few" if value == FEW else "many",
)
def test_an_instruction_set(isa: str, models: str) -> None:
    if ISAS.index(isa) > ISAS.index(cpu_isa()):
        pytest.skip(f"this machine has {cpu_isa()}")
    done = subprocess.run(
        [sys.executable, "-c", CHECK % models],
        env={**os.environ, "MINSERVE_CPU_ISA": isa}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{isa}\n"


def tiles_are_allowed() -> bool:
    """Whether the processor has AMX and the system has given this process room for its tiles."""
    flags = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
    if "amx_bf16" not in flags or "amx_tile" not in flags:
        return False
    granted = ctypes.c_ulong(0)
    arch_prctl, get_permissions, tile_data = 158, 0x1022, 18
    libc = ctypes.CDLL(None)
    failed = libc.syscall(arch_prctl, get_permissions, ctypes.byref(granted))
    return failed == 0 and bool(granted.value >> tile_data & 1)


@pytest.mark.skipif("MINSERVE_CPU_ISA" in os.environ, reason="an instruction set was chosen")
def test_tiles_are_used_where_they_are() -> None:
    assert cpu_isa()  # which asks the system for them
    assert (cpu_isa() == "amx") == tiles_are_allowed()
