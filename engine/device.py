"""What the machine offers: the device and type to run in, CPU threads, free memory.

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

# Prompt tokens per step: enough to fill the device, few enough that decode rows which share the
# step do not wait long for their token. A processor is as quick with a chunk as with many.
STEP_TOKENS = {"cpu": SCAN_CHUNK, "cuda": 8192}

MOST_HOST_STATE_BYTES = 2**32  # unless more is asked for

_CGROUP = Path("/sys/fs/cgroup")
_NATIVE_BFLOAT16 = "avx512_bf16", "amx"  # instruction sets
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # there when NVIDIA's driver runs


def resolve(config: EngineConfig, checkpoint_dtype: str) -> EngineConfig:
    """`config` with every open choice made.

    device "auto" is the GPU where there is one that the extension holds code for, else the CPU;
    dtype "auto" is as resolve_dtype() has it. Of several engines each has a GPU of its own, or its
    part of the processors and of main memory. Raises DeviceError when a GPU is asked for that
    cannot be used.
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
    """ "auto", "cpu", "cuda" or "cuda:N" -> the device. `rank`: of one of several engines; its GPU
    is the one of this number, and no other is touched. Raises DeviceError, which says the mend."""
    if name == "cpu":
        return torch.device("cpu")
    index = rank if name in ("auto", "cuda") else torch.device(name).index
    problem = _why_no_gpu(index or 0)
    if problem is None:
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    # Engines on different devices would not be one server.
    others_may = rank is not None and torch.cuda.is_available() and library.has_cuda_kernels()
    if name != "auto" or others_may:
        who = "" if rank is None else f" for engine {rank} of several"
        raise DeviceError(f"device {name!r} cannot be used{who}: {problem}", param="device")
    if torch.cuda.is_available() or _DRIVER_GPUS.is_dir():
        log.warning("running on the CPU although a GPU is there: %s", problem)
    return torch.device("cpu")


def resolve_dtype(name: str, device: torch.device, checkpoint_dtype: str) -> str:
    """ "auto" -> `checkpoint_dtype`, or float32 on a processor that has no instructions for it; any
    other name stays."""
    if name != "auto":
        return name
    native = checkpoint_dtype == "bfloat16" and library.cpu_isa() in _NATIVE_BFLOAT16
    return checkpoint_dtype if device.type != "cpu" or native else "float32"


def _why_no_gpu(index: int) -> str | None:
    """Why the GPU of this number cannot be used, with the mend; None when it can."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA; install one that is built with it"
        return "PyTorch finds no NVIDIA GPU; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    count = torch.cuda.device_count()
    if index >= count:
        return f"there are {count} GPUs, numbered from 0"
    if not library.has_cuda_kernels():
        return (
            "the installed extension holds no CUDA code; install the CUDA toolkit (nvcc) and "
            "build again with MINSERVE_CUDA=ON"
        )
    return _why_no_code(torch.device("cuda", index))


def _why_no_code(device: torch.device) -> str | None:
    """Runs one kernel: the extension may have been built for other architectures only."""
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
    """The device's name for people: the GPU's product name or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or "cpu"


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, bounded by the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def available_memory(device: torch.device) -> int:
    """Free bytes of the GPU, or of main memory within the container's limit."""
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
    """The control group's limit in CPUs (cgroup version 2, else 1); None without a limit."""
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
    """The lines of a file of the kernel's; none where it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
