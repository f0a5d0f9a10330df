"""linear_scan where time is contiguous: results, gradients, strides and contracts with torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.ops.scan import linear_scan, linear_scan_reference
from tests.ops.helpers import (
    ALL_DTYPES,
    DEVICES,
    SERVING_DTYPES,
    channels_for,
    close,
    exact,
    linear_case,
    same_bits,
)

BACKWARD = torch.ops.minserve.linear_scan_backward
LENGTHS = [1, 2, 7, 64, 257, 4096, 5000, 65537]


def by_time(x: Tensor) -> Tensor:
    """The same values, time contiguous."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def by_time_misaligned(x: Tensor) -> Tensor:
    """The same, one element past an aligned address."""
    batch, time, channels = x.shape
    room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    rows = room[1:].view(batch, channels, time)
    rows.copy_(x.transpose(1, 2))
    return rows.transpose(1, 2)


def time_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a result that belongs to a time-contiguous x: plain where nothing differs."""
    _, time, channels = x.shape
    return (time * channels, 1, time) if min(time, channels) > 1 else x.contiguous().stride()


def small(device: str, length: int = 70, channels: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    a, b = exact(3, length, channels, seed=1).sigmoid().float(), exact(3, length, channels, seed=2)
    h0 = exact(3, channels, seed=3).float()
    return by_time(a.to(device)), by_time(b.float().to(device)), h0.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("reverse", "with_h0"), [(False, True), (True, True), (False, False)])
def test_equals_the_recurrence(
    device: str, dtype: torch.dtype, length: int, reverse: bool, with_h0: bool
) -> None:
    channels = 5 if length == 5000 else channels_for(length)
    a, b, h0, wanted = linear_case(length, channels, reverse, with_h0)
    start = None if h0 is None else h0.to(device, dtype)
    given = by_time(a.to(device, dtype))
    h = linear_scan(given, by_time(b.to(device, dtype)), start, reverse)
    assert h.dtype == dtype and h.device.type == device
    assert h.stride() == time_strides(given)
    close(h, wanted, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("length", [2, 7, 257, 1000, 4096, 5000])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_equal_those_of_the_reference(
    device: str, dtype: torch.dtype, length: int, reverse: bool
) -> None:
    values = [
        exact(2, length, 5, seed=3).sigmoid().bfloat16().half().double(),
        exact(2, length, 5, seed=4),
        exact(2, 5, seed=5),
    ]
    seen = exact(2, length, 5, seed=6)
    wanted = [v.clone().requires_grad_() for v in values]
    linear_scan_reference(*wanted, reverse).backward(seen)
    given = [v.to(device, dtype) for v in values]
    given = [v.detach().requires_grad_() for v in (by_time(given[0]), by_time(given[1]), given[2])]
    linear_scan(*given, reverse).backward(by_time(seen.to(device, dtype)))
    for name, g, w in zip(["a", "b", "h0"], given, wanted, strict=True):
        assert g.grad is not None and w.grad is not None and g.grad.dtype == dtype, name
        # grad_a multiplies two numbers of which h was rounded to the dtype: one more rounding.
        close(g.grad, w.grad, dtype, factor=4.0)
    assert given[0].grad is not None and given[0].grad.stride() == time_strides(given[0])
    assert given[1].grad is not None and given[1].grad.stride() == time_strides(given[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [2, 7, 64])
def test_gradcheck(device: str, reverse: bool, length: int) -> None:
    a, b = (
        by_time(exact(2, length, 3, seed=s).to(device)).detach().requires_grad_() for s in (1, 2)
    )
    h0 = exact(2, 3, seed=length).to(device).requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: linear_scan(*x, reverse), (a, b, h0))
    assert torch.autograd.gradcheck(lambda *x: linear_scan(*x, None, reverse), (a, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
def test_many_rows_of_several_tiles(device: str, reverse: bool) -> None:
    """More rows than are in work at once, more tiles than one per row."""
    a = exact(2, 5000, 1100, seed=1).sigmoid().float()
    b, h0 = exact(2, 5000, 1100, seed=2).float(), exact(2, 1100, seed=3).float()
    h = linear_scan(by_time(a.to(device)), by_time(b.to(device)), h0.to(device), reverse)
    close(h, linear_scan_reference(a, b, h0, reverse), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True])
def test_few_long_rows(reverse: bool) -> None:
    """So many tiles of one row that carries are looked for far back."""
    a, b = (exact(1, 2_000_000, 2, seed=s) for s in (1, 2))
    a = a.sigmoid().bfloat16().double()
    h0 = exact(1, 2, seed=3)
    wanted = linear_scan(a.contiguous(), b.contiguous(), h0, reverse)  # channels, on the CPU
    for dtype in (torch.float32, torch.float64):
        inputs = (by_time(x.to("cuda", dtype)) for x in (a, b))
        close(linear_scan(*inputs, h0.to("cuda", dtype), reverse), wanted, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_coefficients_need_not_be_gates(device: str) -> None:
    """Negative, zero and above one: nothing assumes a in (0, 1)."""
    a, b = exact(3, 400, 5, seed=1, scale=0.9), exact(3, 400, 5, seed=2)
    a[0, 7] = 0.0
    h = linear_scan(by_time(a.to(device)), by_time(b.to(device)))
    close(h, linear_scan_reference(a, b), torch.float64, factor=10)


@pytest.mark.parametrize("device", DEVICES)
def test_h0_may_be_float32_beside_two_byte_inputs(device: str) -> None:
    a, b, _ = small(device)
    a, b = by_time(a.bfloat16()), by_time(b.bfloat16())
    h0 = torch.full((3, 5), 1.0009765625, device=device)  # no bfloat16 number
    close(linear_scan(a, b, h0), linear_scan_reference(a.cpu(), b.cpu(), h0.cpu()), torch.bfloat16)
    # The gradient of a[:, 0] is g * h0: with one step seen, h0 itself.
    seen = torch.zeros_like(a)
    seen[:, 0] = 1.0
    grad_a, _, grad_h0 = BACKWARD(seen, a, linear_scan(a, b, h0), h0, False)
    same_bits(grad_a[:, 0], h0.bfloat16())
    assert grad_h0.dtype == torch.float32
    same_bits(grad_h0, a[:, 0].float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("length", [64, 5000, 8192])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_row_does_not_know_of_the_others(
    device: str, dtype: torch.dtype, length: int, reverse: bool
) -> None:
    """Bit for bit the same whatever else is in the batch, backward too."""
    a, b, h0 = (x.to(dtype) for x in small(device, length, 7))
    a, b = by_time(a), by_time(b)
    h = linear_scan(a, b, h0, reverse)
    whole = [h, *BACKWARD(b, a, h, h0, reverse)]
    for row, columns in ((0, slice(0, 7)), (2, slice(3, 5))):
        given = [by_time(x[row : row + 1, :, columns]) for x in (a, b)]
        start = h0[row : row + 1, columns].contiguous()
        alone = linear_scan(*given, start, reverse)
        parts = [alone, *BACKWARD(given[1], given[0], alone, start, reverse)]
        for part, all_ in zip(parts, whole, strict=True):
            same_bits(part, all_[row : row + 1, ..., columns])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("length", [64, 70, 5000])
@pytest.mark.parametrize("reverse", [False, True])
def test_misaligned_equals_aligned(
    device: str, dtype: torch.dtype, length: int, reverse: bool
) -> None:
    a, b, h0 = (x.to(dtype) for x in small(device, length))
    a, b = by_time(a), by_time(b)
    h = linear_scan(a, b, h0, reverse)
    shifted = [by_time_misaligned(x) for x in (a, b, h)]
    same_bits(linear_scan(shifted[0], shifted[1], h0, reverse), h)
    same_bits(linear_scan(a, shifted[1], h0, reverse), h)
    wanted = BACKWARD(b, a, h, h0, reverse)
    for x, y in zip(BACKWARD(shifted[1], shifted[0], shifted[2], h0, reverse), wanted, strict=True):
        same_bits(x, y)


def _channels(x: Tensor) -> Tensor:
    return x.contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("others", [_channels, by_time, by_time_misaligned])
def test_the_layout_of_a_decides(device: str, others: Callable[[Tensor], Tensor]) -> None:
    """Another layout of b, h or grad_h changes no bit and no stride."""
    a, b, h0 = small(device)
    for mine in (by_time, _channels):
        a = mine(a)
        h = linear_scan(a, mine(b), h0)
        given = linear_scan(a, others(b), h0)
        same_bits(given, h)
        assert given.stride() == a.stride()
        grads = BACKWARD(mine(b), a, h, h0, False)
        for x, y in zip(BACKWARD(others(b), a, others(h), h0, False), grads, strict=True):
            same_bits(x, y)
            assert x.stride() == y.stride()
        assert grads[0].stride() == grads[1].stride() == a.stride()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("length", [1, 2, 15, 33, 127, 128, 129, 300, 5000])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_cpu_forms_every_number_alike(dtype: torch.dtype, length: int, reverse: bool) -> None:
    """Bit for bit what it computes where channels are contiguous, whatever the width."""
    for channels in (2, 7, 16, 17, 33, 48, 100):
        a = exact(2, length, channels, seed=channels).sigmoid().to(dtype)
        b, seen = (exact(2, length, channels, seed=s).to(dtype) for s in (1, 2))
        for h0 in (None, exact(2, channels, seed=3).to(dtype)):
            h = linear_scan(a, b, h0, reverse)
            same_bits(linear_scan(by_time(a), by_time(b), h0, reverse), h)
            given = (by_time_misaligned(seen), by_time(a), by_time_misaligned(h))
            wanted = BACKWARD(seen, a, h, h0, reverse)
            for x, y in zip(BACKWARD(*given, h0, reverse), wanted, strict=True):
                same_bits(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_without_strides_of_its_own(device: str) -> None:
    """The gradient of a sum is one number, expanded."""
    a, b, h0 = (x.requires_grad_() for x in small(device))
    linear_scan(a, b, h0).sum().backward()
    plain = [x.detach().cpu().double().requires_grad_() for x in (a, b, h0)]
    linear_scan_reference(*plain).sum().backward()
    for x, y in zip((a, b, h0), plain, strict=True):
        assert x.grad is not None and y.grad is not None
        close(x.grad, y.grad, torch.float32, factor=4.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 70, 5), (1, 70, 5), (3, 1, 5), (3, 70, 1), (0, 4, 3)])
def test_opcheck(device: str, shape: tuple[int, int, int]) -> None:
    a, b, h = (by_time(exact(*shape, seed=s).float().to(device)) for s in (1, 2, 3))
    h0 = exact(shape[0], shape[2], seed=4).float().to(device)
    forward = torch.ops.minserve.linear_scan.default
    torch.library.opcheck(forward, (a, b, h0, False))
    given = tuple(x.detach().clone(memory_format=torch.preserve_format) for x in (a, b, h0))
    torch.library.opcheck(forward, (*(x.requires_grad_() for x in given), True))
    torch.library.opcheck(BACKWARD.default, (b, a, h, h0, False))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_equals_eager(device: str) -> None:
    torch.compiler.reset()

    def loss(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
        h = linear_scan(a, b, h0)
        return (h * h).sum()

    given, wanted = ([x.requires_grad_() for x in small(device)] for _ in range(2))
    torch.compile(loss, fullgraph=True)(*given).backward()
    loss(*wanted).backward()
    for x, y in zip(given, wanted, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda *x: linear_scan(*x) * 2.0, fullgraph=True)
    same_bits(compiled(*given).detach(), (linear_scan(*given) * 2.0).detach())


@pytest.mark.gpu
@pytest.mark.parametrize("length", [70, 5000])
def test_graph_replay_equals_eager(length: int) -> None:
    """Captured on one set of inputs, replayed on others."""

    def both(a: Tensor, b: Tensor, h0: Tensor) -> list[Tensor]:
        h = linear_scan(a, b, h0)
        return [h, *BACKWARD(b, a, h, h0, False)]

    captured = small("cuda", length)
    fresh = [x * 0.5 for x in captured]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both(*captured)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both(*captured)
    for _ in range(2):
        for x, y in zip(captured, fresh, strict=True):
            x.copy_(y)
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        for x, y in zip(results, both(*fresh), strict=True):
            same_bits(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_batch(device: str) -> None:
    a = torch.ones(0, 3, 4, device=device).transpose(1, 2).requires_grad_()
    h = linear_scan(a, a)
    assert h.shape == a.shape == (0, 4, 3)
    h.sum().backward()
    assert a.grad is not None and a.grad.shape == a.shape
