"""Shared by every test: those marked `gpu` run where a GPU and CUDA kernels are, those marked
`browser` where a browser is; else they skip, and the end of the run says so."""

from __future__ import annotations

import functools
import importlib.util
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from tests import browser

NO_BROWSER = "needs a browser: "


def _gpu_usable() -> str | None:
    """None when GPU tests can run, else the reason why they cannot."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    from engine.ops import library

    return None if library.has_cuda_kernels() else "the extension holds no CUDA kernels"


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Clients share the default SSL context, whose certificates take 40 ms to read."""
    with pytest.MonkeyPatch.context() as patch:
        shared = functools.cache(ssl.create_default_context)
        patch.setattr(ssl, "create_default_context", shared)
        yield


@pytest.hookimpl(trylast=True)  # all markers are there
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _gpu_usable() if gpu_items else None
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
    browser_items = [item for item in items if item.get_closest_marker("browser")]
    reason = browser.missing() if browser_items else None
    if reason is not None:
        for item in browser_items:
            item.add_marker(pytest.mark.skip(reason=NO_BROWSER + reason))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Skips are easily overlooked."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[-1]) for report in skipped if isinstance(report.longrepr, tuple)]
    untested = [reason for reason in reasons if NO_BROWSER in reason]
    if untested:
        terminalreporter.write_sep("!", "THE PLAYGROUND WAS NOT TESTED IN A BROWSER", red=True)
        why = untested[0].split(NO_BROWSER)[1]
        terminalreporter.write_line(f"{len(untested)} tests were skipped: {why}")
