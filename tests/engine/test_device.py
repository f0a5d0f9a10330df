"""Each open choice of EngineConfig, and the one line with the mend when a GPU cannot be used."""

from __future__ import annotations

import logging
import math
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from engine import device
from engine.config import EngineConfig
from engine.errors import DeviceError
from engine.ops import library


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("built_for", "mend"), [(None, "install a CUDA build"), ("13.0", "nvidia-smi")]
)
def test_a_gpu_that_is_not_there_is_refused_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, name: str, built_for: str | None, mend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(DeviceError, match=mend) as caught:
        device.resolve_device(name)
    assert caught.value.param == "device"


def test_a_machine_without_a_gpu_means_the_cpu_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "_DRIVER_GPUS", tmp_path / "absent")
    assert device.resolve_device("auto") == torch.device("cpu")
    assert caplog.records == []


@pytest.mark.parametrize(
    ("isa", "expected"),
    [("avx512", "float32"), ("avx512_bf16", "bfloat16"), ("amx", "bfloat16")],
)
def test_the_dtype_follows_the_device_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch, isa: str, expected: str
) -> None:
    monkeypatch.setattr(device.library, "cpu_isa", lambda: isa)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert device.resolve_dtype("auto", cpu, "bfloat16") == expected
    assert device.resolve_dtype("auto", cpu, "float16") == "float32"
    assert device.resolve_dtype("auto", cpu, "float32") == "float32"
    assert device.resolve_dtype("auto", cuda, "bfloat16") == "bfloat16"
    assert device.resolve_dtype("float16", cpu, "bfloat16") == "float16"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_gpu")
def test_an_extension_without_cuda_code_means_the_cpu_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "has_cuda_kernels", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert device.resolve_device("auto") == torch.device("cpu")
    (record,) = caplog.records
    assert "nvcc" in record.getMessage() and "\n" not in record.getMessage()
    with pytest.raises(DeviceError, match="nvcc"):
        device.resolve_device("cuda")


@pytest.mark.usefixtures("one_gpu")
def test_kernels_for_another_architecture_mean_the_cpu_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As they fail: when the first of them is launched."""

    def launch(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(library, "has_cuda_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "ones", launch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with caplog.at_level(logging.WARNING):
        assert device.resolve_device("auto") == torch.device("cpu")
    (record,) = caplog.records
    assert "no kernel image is available" in record.getMessage()
    assert "MINSERVE_CUDA_ARCHS=89" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_number_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeviceError, match="numbered from 0"):
        device.resolve_device("cuda:7")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_of_several_engines_each_takes_the_gpu_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    touched: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(library, "has_cuda_kernels", lambda: True)
    monkeypatch.setattr(device, "_why_no_code", touched.append)  # a GPU's context takes memory
    assert device.resolve_device(name, 1) == torch.device("cuda:1")
    assert touched == [torch.device("cuda:1")]
    with pytest.raises(DeviceError, match="engine 2 of several: this machine has 2 GPUs"):
        device.resolve_device(name, 2)


def test_an_engine_of_several_keeps_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "resolve_device", lambda name, rank: torch.device("cuda", rank))
    for rank in range(2):
        resolved = device.resolve(EngineConfig(device="cuda", engines=2, rank=rank), "bfloat16")
        assert (resolved.device, resolved.rank) == (f"cuda:{rank}", rank)


def test_several_engines_share_processors_and_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cpus", lambda: 6)
    monkeypatch.setattr(device, "available_memory", lambda _: 2**33)
    for engines, threads in ((1, 6), (2, 3), (8, 1)):
        config = EngineConfig(device="cpu", engines=engines)
        resolved = device.resolve(config, "float32")
        assert resolved.threads == threads
        assert resolved.host_state_bytes == 2**31 // engines
    config = EngineConfig(device="cpu", engines=2, threads=5, host_state_bytes=7)
    resolved = device.resolve(config, "float32")
    assert (resolved.threads, resolved.host_state_bytes) == (5, 7)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_containers_cpu_quota_bounds_the_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    expected: float | None,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert device.usable_cpus() == (8 if expected is None else math.ceil(expected))
