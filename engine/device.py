"""What the machine offers: device, data type, CPU threads and free memory.

Resolves the None and "auto" values of EngineConfig.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
from pathlib import Path

import torch

from engine import ops
from engine.config import SCAN_CHUNK, EngineConfig
from engine.errors import DeviceError
from engine.ops import library

log = logging.getLogger(__name__)

# Default prompt tokens per step: enough to fill the device, but few enough that decode rows in the
# same step get their token soon. A CPU is no faster with more than one chunk.
STEP_TOKENS = {"cpu": SCAN_CHUNK, "cuda": 8192}

MOST_HOST_STATE_BYTES = 2**32  # the most for the default

_CGROUP = Path("/sys/fs/cgroup")
_NATIVE_BFLOAT16 = "avx512_bf16", "amx"  # instruction sets of library.cpu_isa()
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # exists if NVIDIA's driver is loaded


def resolve(config: EngineConfig, checkpoint_dtype: str) -> EngineConfig:
    """Return `config` with all "auto" and None values chosen for this machine.

    - device "auto": the GPU if there is one that the extension has code for, else the CPU.
    - dtype "auto": see resolve_dtype().
    - With several engines each gets its own GPU, or its share of the CPUs and of host memory.

    Raises DeviceError if a GPU is requested that cannot be used.
    """
    device = resolve_device(config.device, config.rank if config.engines > 1 else None)
    return dataclasses.replace(
        config,
        device=str(device),
        dtype=resolve_dtype(config.dtype, device, checkpoint_dtype),
        max_step_tokens=config.max_step_tokens or STEP_TOKENS[device.type],
        threads=config.threads or max(1, usable_cpus() // config.engines),
        host_state_bytes=_host_state_bytes(config),
    )


def _host_state_bytes(config: EngineConfig) -> int:
    if config.host_state_bytes is not None:
        return config.host_state_bytes
    free = available_memory(torch.device("cpu")) // config.engines
    return min(free // 4, MOST_HOST_STATE_BYTES)


def resolve_device(name: str, rank: int | None = None) -> torch.device:
    """Choose the device for "auto", "cpu", "cuda" or "cuda:N".

    `rank` is the index of one of several engines; it uses the GPU with this number and touches no
    other. Raises DeviceError, which says what to do.
    """
    if name == "cpu":
        return torch.device("cpu")
    index = rank if name in ("auto", "cuda") else torch.device(name).index
    problem = _why_no_gpu(index or 0)
    if problem is None:
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    # Engines on different kinds of devices could not serve together.
    others_may = rank is not None and torch.cuda.is_available() and library.has_cuda_kernels()
    if name != "auto" or others_may:
        who = "" if rank is None else f" for engine {rank} of several"
        raise DeviceError(f"device {name!r} cannot be used{who}: {problem}", param="device")
    if torch.cuda.is_available() or _DRIVER_GPUS.is_dir():
        log.warning("running on the CPU although a GPU is there: %s", problem)
    return torch.device("cpu")


def resolve_dtype(name: str, device: torch.device, checkpoint_dtype: str) -> str:
    """Choose the data type for `name`; "auto" is `checkpoint_dtype` if the device computes in it.

    On a CPU without bfloat16 instructions "auto" is float32.
    """
    if name != "auto":
        return name
    native = checkpoint_dtype == "bfloat16" and library.cpu_isa() in _NATIVE_BFLOAT16
    return checkpoint_dtype if device.type != "cpu" or native else "float32"


def _why_no_gpu(index: int) -> str | None:
    """Return why the GPU with this number cannot be used, and what to do; None if it can."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA; install a CUDA build of PyTorch"
        return "PyTorch finds no NVIDIA GPU; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    if index >= count:
        return f"this machine has {count} GPUs, numbered from 0"
    if not library.has_cuda_kernels():
        return (
            "the installed extension contains no CUDA code; install the CUDA toolkit (nvcc) and "
            "build again with MINSERVE_CUDA=ON"
        )
    return _why_no_code(torch.device("cuda", index))


def _why_no_code(device: torch.device) -> str | None:
    """Run one kernel, to see whether the extension was built for this GPU; None if it runs."""
    try:
        with torch.cuda.device(device):
            ones = torch.ones(1, 1, 1, device=device)
            ops.linear_scan(ones, ones)
            torch.cuda.synchronize()
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"a kernel of the extension fails on it ({str(error).splitlines()[0]}); for "
            f"{torch.cuda.get_device_name(device)} build again with "
            f"MINSERVE_CUDA_ARCHS={major}{minor}"
        )
    return None


def describe(device: torch.device) -> str:
    """Return the device's product name: the GPU's, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or "cpu"


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, bounded by the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def available_memory(device: torch.device) -> int:
    """Return the free bytes of the GPU, or of host memory within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    bounds = [
        int(line.split()[1]) * 1024
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    for path in (_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes"):
        bounds += [int(line) for line in _lines(path) if line.isdigit()]
    return min(bounds, default=2**63 - 1)


def _cpu_quota() -> float | None:
    """Return the cgroup's CPU limit (version 2, else 1); None without a limit."""
    fields = " ".join(_lines(_CGROUP / "cpu.max")).split()  # "max 100000" or "150000 100000"
    if len(fields) != 2:
        fields = [
            " ".join(_lines(_CGROUP / "cpu" / name))
            for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
    quota, period = fields
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None
    return int(quota) / int(period)


def _lines(path: Path) -> list[str]:
    """Return the lines of a kernel file; none if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
