"""The operators against the memory limit: GB/s of the ideal traffic, error against float64, peers.

The ideal traffic counts each input once and each output once. The limits, a large copy and
`torch.add`, are measured in the same run.

    python -m loadtest.kernels --device cuda --dtype float32 bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.ops import linear_scan, mingru_scan, minlstm_scan
from loadtest.peers import scans
from loadtest.report import print_environment, print_table, save_json
from loadtest.timing import copy_bandwidth, seconds_per_call

CUDA_SHAPES = [(8, 4096, 2048), (1, 65536, 768), (64, 1024, 1024), (1, 8192, 2048)]
CPU_SHAPES = [(8, 512, 512), (1, 8192, 768)]


def _error(found: Tensor, a: Tensor, b: Tensor) -> float:
    """Relative error in the 2-norm against the float64 recurrence, on the first 64 channels."""
    a64, b64 = a[..., :64].double(), b[..., :64].double()
    h = torch.zeros_like(b64[:, 0])
    rows = []
    for step in range(a64.shape[1]):
        h = a64[:, step] * h + b64[:, step]
        rows.append(h)
    exact = torch.stack(rows, dim=1)
    return float((found[..., :64].double() - exact).norm() / exact.norm())


def measure_linear(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Seconds, bytes and error of `linear_scan` and of every peer at one shape."""
    traffic = 3 * shape[0] * shape[1] * shape[2] * dtype.itemsize
    sets = 1 + (200 * 2**20 // traffic if device.type == "cuda" else 0)
    inputs = [
        (
            torch.rand(shape, device=device, dtype=dtype) * 0.98 + 0.01,
            torch.rand(shape, device=device, dtype=dtype) + 0.01,
        )
        for _ in range(min(sets, 6))
    ]
    found: dict[str, Any] = {"bytes": traffic, "scans": {}}
    candidates: dict[str, scans.Scan] = {"minserve": linear_scan, **scans.available(device)}
    for name, scan in candidates.items():
        calls: list[Callable[[], object]] = [partial(scan, *pair) for pair in inputs]
        try:
            seconds = seconds_per_call(calls, device)
            check = shape[0] * shape[1] <= 65536 and name != "torch.add"
            error = _error(scan(*inputs[0]), *inputs[0]) if check else None
        except RuntimeError as failure:  # a peer that cannot run here is reported, not fatal
            found["scans"][name] = {"failed": str(failure).splitlines()[0][:80]}
            continue
        found["scans"][name] = {"seconds": seconds, "error": error}
    return found


def measure_fused(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Seconds and bytes of the serving scans, which fuse the gates with the recurrence."""
    sequences, time, channels = shape
    tokens = sequences * time
    cu_seqlens = torch.arange(0, tokens + 1, time, dtype=torch.int32, device=device)
    slots = torch.arange(sequences, dtype=torch.int32, device=device)
    state = torch.zeros(sequences, channels, device=device)
    found: dict[str, Any] = {}
    for name, scan, gates in (("mingru_scan", mingru_scan, 2), ("minlstm_scan", minlstm_scan, 3)):
        traffic = (gates + 1) * tokens * channels * dtype.itemsize
        sets = 1 + (200 * 2**20 // traffic if device.type == "cuda" else 0)
        inputs = [
            torch.randn(tokens, gates * channels, device=device, dtype=dtype)
            for _ in range(min(sets, 6))
        ]
        calls = [partial(scan, pre, cu_seqlens, state, slots) for pre in inputs]
        found[name] = {"bytes": traffic, "seconds": seconds_per_call(calls, device)}
    return found


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    device = torch.device(args.device)
    ceiling = copy_bandwidth(device, 2**30 if device.type == "cuda" else 2**28)
    print_environment()
    print(f"copy ceiling {ceiling / 1e9:.0f} GB/s")
    data: dict[str, Any] = {"copy_bytes_per_second": ceiling, "shapes": []}
    rows = []
    for dtype_name in args.dtype:
        dtype = getattr(torch, dtype_name)
        for shape in CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES:
            linear = measure_linear(shape, dtype, device)
            fused = measure_fused(shape, dtype, device)
            data["shapes"].append({"shape": shape, "dtype": dtype_name, **linear, **fused})
            label = f"{'x'.join(map(str, shape))} {dtype_name}"
            for name, figures in linear["scans"].items():
                if "failed" in figures:
                    rows.append([label, name, figures["failed"], "", ""])
                    continue
                rate = linear["bytes"] / figures["seconds"]
                error = "" if figures["error"] is None else f"{figures['error']:.1e}"
                rows.append([label, name, f"{rate / 1e9:.0f}", f"{rate / ceiling:.0%}", error])
            for name, figures in fused.items():
                rate = figures["bytes"] / figures["seconds"]
                rows.append([label, name, f"{rate / 1e9:.0f}", f"{rate / ceiling:.0%}", ""])
    print_table("scans", ["shape", "scan", "GB/s", "of copy", "error"], rows)
    save_json(args.json, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
