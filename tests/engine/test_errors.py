"""A lost device is told from all else that a step may raise."""

from __future__ import annotations

import sys

import pytest
import torch

from engine.engine import Engine
from engine.errors import InvalidRequest, StepFailed, is_device_lost
from tests.engine.fake import FakeRunner
from tests.engine.test_engine import ask


class OfTorch(torch.AcceleratorError):
    """A later torch may have several kinds."""


ACCELERATOR_ERRORS = [
    torch.AcceleratorError("unspecified launch failure"),
    OfTorch("an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", ACCELERATOR_ERRORS)
def test_torch_has_a_type_for_it_whatever_the_words(error: Exception) -> None:
    assert is_device_lost(error)


@pytest.mark.parametrize("error", ACCELERATOR_ERRORS)
def test_the_engine_ends_by_the_type_alone(error: Exception) -> None:
    engine = Engine(FakeRunner(failures=[error]))
    engine.add("c", ask(0))
    engine.step()
    assert engine.broken is not None


@pytest.mark.parametrize("without", ["the type", "torch"])
def test_where_there_is_no_type_the_words_tell(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without == "torch":
        monkeypatch.delitem(sys.modules, "torch")
    else:
        monkeypatch.delattr(torch, "AcceleratorError")
    assert is_device_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert is_device_lost(RuntimeError("minserve: mingru_step: CUDA error: misaligned address"))
    assert not is_device_lost(RuntimeError("minserve: mingru_step: invalid argument"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("slots: [3] expected, got [4]"),
        # What a client wrote may be in these.
        InvalidRequest("grammar: CUDA error: expected a rule"),
        StepFailed("a step of the engine failed: CUDA error"),
        ValueError("CUDA error"),
    ],
)
def test_nothing_else_is_one(error: Exception) -> None:
    assert not is_device_lost(error)
