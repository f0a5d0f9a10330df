"""linear_scan against float64, its gradient, and the log-space form it replaces."""

from __future__ import annotations

import pytest
import torch

from engine.ops.scan import heinsen_reference, linear_scan, linear_scan_reference
from tests.ops.helpers import (
    ALL_DTYPES,
    DEVICES,
    LENGTHS,
    SERVING_DTYPES,
    channels_for,
    close,
    exact,
    linear_case,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("reverse", "with_h0"), [(False, True), (True, True), (False, False)])
def test_equals_the_recurrence(
    device: str, dtype: torch.dtype, length: int, reverse: bool, with_h0: bool
) -> None:
    a, b, h0, wanted = linear_case(length, channels_for(length), reverse, with_h0)
    start = None if h0 is None else h0.to(device, dtype)
    h = linear_scan(a.to(device, dtype), b.to(device, dtype), start, reverse)
    assert h.dtype == dtype and h.device.type == device
    close(h, wanted, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_coefficients_need_not_be_gates(device: str) -> None:
    """Negative, zero and above one: nothing assumes a in (0, 1)."""
    a, b = exact(3, 40, 5, seed=1, scale=0.9), exact(3, 40, 5, seed=2)
    a[0, 7] = 0.0
    h = linear_scan(a.to(device), b.to(device))
    close(h, linear_scan_reference(a, b), torch.float64)


@pytest.mark.parametrize("device", DEVICES)
def test_h0_may_be_float32_beside_two_byte_inputs(device: str) -> None:
    a, b = (exact(2, 9, 5, seed=s).sigmoid().bfloat16().to(device) for s in (1, 2))
    h0 = torch.full((2, 5), 1.0009765625, device=device)  # no bfloat16 number
    h = linear_scan(a, b, h0)
    close(h, linear_scan_reference(a.cpu(), b.cpu(), h0.cpu()), torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_gradcheck(device: str, reverse: bool, length: int) -> None:
    a, b, h0 = (
        exact(2, *shape, seed=length).to(device).requires_grad_()
        for shape in ((length, 3), (length, 3), (3,))
    )
    assert torch.autograd.gradcheck(lambda *x: linear_scan(*x, reverse), (a, b, h0))
    assert torch.autograd.gradcheck(lambda *x: linear_scan(*x, None, reverse), (a, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("length", [7, 257, 1000])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_equal_those_of_the_reference(
    device: str, dtype: torch.dtype, length: int, reverse: bool
) -> None:
    values = [
        exact(2, length, 37, seed=3).sigmoid().bfloat16().half().double(),
        exact(2, length, 37, seed=4),
        exact(2, 37, seed=5),
    ]
    seen = exact(2, length, 37, seed=6)
    wanted = [v.clone().requires_grad_() for v in values]
    linear_scan_reference(*wanted, reverse).backward(seen)
    given = [v.to(device, dtype).requires_grad_() for v in values]
    linear_scan(*given, reverse).backward(seen.to(device, dtype))
    for name, g, w in zip(["a", "b", "h0"], given, wanted, strict=True):
        assert g.grad is not None and w.grad is not None and g.grad.dtype == dtype, name
        # grad_a multiplies two numbers of which h was rounded to the dtype: one more rounding.
        close(g.grad, w.grad, dtype, factor=4.0)


def test_heinsen_agrees_where_it_can_be_trusted() -> None:
    a = exact(1, 50, 4, seed=7).sigmoid()
    b, h0 = exact(1, 50, 4, seed=8).abs() + 0.1, exact(1, 4, seed=9).abs() + 0.1
    close(heinsen_reference(a, b, h0), linear_scan_reference(a, b, h0), torch.float64, factor=100)
    close(heinsen_reference(a, b), linear_scan_reference(a, b), torch.float64, factor=100)
