"""Finding and loading the compiled library, and its instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import config, ops
from engine.ops import library

COMPARE = """
import sys, torch
from engine import config, ops
torch.manual_seed(0)
pre = torch.randn(300, 3 * 37) * 3
state = torch.randn(1, 37)
edges, slot = (torch.tensor(v, dtype=torch.int32) for v in ([0, 300], [0]))
a, b = torch.rand(1, 300, 37), torch.randn(1, 300, 37)
results = {"isa": ops.cpu_isa()}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    kept = state.clone()
    results[f"lstm {dtype}"] = ops.minlstm_scan(pre.to(dtype), edges, kept, slot)
    results[f"gru {dtype}"] = ops.mingru_scan(pre[:, :74].to(dtype), edges, kept, slot)
    results[f"linear {dtype}"] = ops.linear_scan(a.to(dtype), b.to(dtype))
    x, weight = pre[:, :37].to(dtype), a[0, :37, :4].to(dtype)
    results[f"conv {dtype}"] = ops.conv_scan(x, weight, None, edges, torch.zeros(1, 3, 37), slot)
torch.save(results, sys.argv[1])
"""


def test_the_kernels_scan_in_the_chunks_that_prompts_are_split_into() -> None:
    assert torch.ops.minserve.scan_chunk() == config.SCAN_CHUNK


@pytest.mark.parametrize("chunk", [64, 256])
def test_a_library_with_other_chunks_does_not_load(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "SCAN_CHUNK", chunk)
    found = f"chunks of {config.SCAN_CHUNK} tokens.*expect {chunk}.*pip install -e"
    with pytest.raises(library.LibraryMissingError, match=found):
        library._load()


def test_cuda_architectures_are_told() -> None:
    assert ops.has_cuda_kernels() == bool(ops.cuda_archs())


def test_a_missing_library_says_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", "libabsent.so")
    with pytest.raises(ImportError, match="pip install -e"):
        library.find_library()


def test_a_broken_library_says_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libminserve.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "find_library", lambda: broken)
    with pytest.raises(library.LibraryMissingError, match="pip install -e"):
        library._load()


@pytest.mark.slow
def test_instruction_sets_agree(tmp_path: Path) -> None:
    """The best of this machine and the generic path: the same numbers to rounding."""
    results = []
    for isa in ("", "generic"):
        out = tmp_path / f"{isa or 'best'}.pt"
        environment = {**os.environ, "MINSERVE_CPU_ISA": isa}
        subprocess.run([sys.executable, "-c", COMPARE, str(out)], check=True, env=environment)
        results.append(torch.load(out))
    best, generic = results
    assert best.pop("isa") == ops.cpu_isa() and generic.pop("isa") == "generic"
    for name, value in best.items():
        rtol, atol = (1e-5, 1e-5) if value.dtype == torch.float32 else (2.0**-7, 1e-4)
        torch.testing.assert_close(value, generic[name], rtol=rtol, atol=atol, msg=name)


@pytest.mark.gpu
def test_cpu_and_cuda_agree() -> None:
    pre = torch.randn(500, 2 * 37)
    edges, slot = (torch.tensor(v, dtype=torch.int32) for v in ([0, 500], [0]))
    state = torch.zeros(1, 37)
    h = ops.mingru_scan(pre, edges, state, slot)
    on_gpu = [x.cuda() for x in (pre, edges, torch.zeros(1, 37), slot)]
    torch.testing.assert_close(ops.mingru_scan(*on_gpu).cpu(), h, rtol=1e-5, atol=1e-5)
