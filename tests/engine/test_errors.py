"""A lost device is told from all else that a step may raise."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine.engine import Engine
from engine.errors import DeviceLost
from engine.runner.device_events import DeviceEvent
from engine.runner.model_runner import ModelRunner, Pending
from engine.step_plan import StepPlan
from tests.engine.fake import FakeRunner
from tests.engine.test_engine import ask

ILLEGAL_ACCESS = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Failing(ModelRunner):
    """A runner that takes its device for a GPU, and whose steps raise."""

    def __init__(self, error: Exception) -> None:
        self._device = torch.device("cuda")
        self.error = error

    def _begin(self, plan: StepPlan) -> Any:
        raise self.error


class Done:
    """The end of a step whose kernels have failed."""

    @property
    def is_passed(self) -> bool:
        raise ILLEGAL_ACCESS

    def wait(self) -> None:
        raise ILLEGAL_ACCESS


def synchronize_raises(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def synchronize(device: torch.device) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("minserve: mingru_step: misaligned address"),
        RuntimeError("minserve: cuBLASLt: product: status 13"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_whoever_reports_it_the_device_is_asked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronize_raises(monkeypatch, ILLEGAL_ACCESS)
    with pytest.raises(DeviceLost, match="illegal memory access") as raised:
        Failing(error).start(StepPlan())
    assert raised.value.__cause__ is error


def test_an_accelerator_error_is_one_whatever_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize_raises(monkeypatch, None)
    with pytest.raises(DeviceLost, match="unspecified"):
        Failing(torch.AcceleratorError("unspecified launch failure")).start(StepPlan())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("slots: [3] expected, got [4]"),
        RuntimeError("grammar: CUDA error: expected a rule"),  # a client may have written that
    ],
)
def test_nothing_else_is_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize_raises(monkeypatch, None)
    with pytest.raises(type(error)) as raised:
        Failing(error).start(StepPlan())
    assert raised.value is error


def test_kernels_that_fail_later_are_met_by_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize_raises(monkeypatch, ILLEGAL_ACCESS)
    runner = Failing(ILLEGAL_ACCESS)
    nothing: Any = None
    pending = Pending(*[nothing] * 9, cast(DeviceEvent, Done()))
    for wait in (runner.is_done, runner.finish):
        with pytest.raises(DeviceLost):
            wait(pending)


def test_the_engine_ends_by_the_type_alone() -> None:
    engine = Engine(FakeRunner(failures=[DeviceLost("unspecified launch failure")]))
    engine.add("c", ask(0))
    engine.step()
    assert engine.broken is not None
    sound = Engine(FakeRunner(failures=[RuntimeError("CUDA error: misaligned address")]))
    sound.add("c", ask(0))
    sound.step()
    assert sound.broken is None
