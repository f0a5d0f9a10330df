"""Shared by every test: those marked `gpu` run where a GPU and CUDA kernels are, else skip."""

from __future__ import annotations

import importlib.util

import pytest


def _gpu_usable() -> str | None:
    """None when GPU tests can run, else the reason why they cannot."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    from engine.ops import library

    return None if library.has_cuda_kernels() else "the extension holds no CUDA kernels"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_usable() if gpu_items else None
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
