"""The float64 results that errors are taken against."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from engine.ops.scan import linear_scan, linear_scan_reference
from loadtest.operators.exact import (
    channel_sample,
    exact_scan,
    exact_scan_backward,
    relative_error,
    unpack,
)
from loadtest.operators.fused import CELLS, Cell, fused_calls, fused_error
from loadtest.operators.linear import scan_error
from loadtest.operators.shapes import parse_scan


def pair(batch: int, time: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(time)
    a, b = torch.rand(2, batch, time, channels, dtype=torch.float64, generator=generator).unbind()
    return a**0.02, b


@pytest.mark.parametrize("time", [1, 2, 3, 64, 65, 1000])
def test_blocks_side_by_side_are_the_sequential_recurrence(time: int) -> None:
    a, b = pair(3, time, 5)
    torch.testing.assert_close(exact_scan(a, b), linear_scan_reference(a, b), rtol=1e-12, atol=0)


@pytest.mark.parametrize("time", [1, 2, 50])
def test_backward_is_the_gradient(time: int) -> None:
    a, b = (x.requires_grad_() for x in pair(2, time, 3))
    h = linear_scan_reference(a, b)
    grad_h = torch.randn_like(h)
    wanted = torch.autograd.grad(h, (a, b), grad_h)
    found = exact_scan_backward(a.detach(), h.detach(), grad_h)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_a_wrong_tail_shows_in_the_error() -> None:
    a, b = (x.float() for x in pair(1, 20_000, 20))
    assert scan_error(linear_scan, a, b) < 1e-6

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = linear_scan(a, b)
        h[:, -500:] *= 1.01
        return h

    assert 5e-3 < scan_error(wrong, a, b) < 2e-2  # whole: 1.6e-3


def test_relative_error_of_nothing_and_of_nan() -> None:
    zero = torch.zeros(1, 3, 2, dtype=torch.float64)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1, zero) == math.inf
    assert math.isnan(relative_error(zero * math.nan, zero + 1))


def test_the_sample_spans_all_channels() -> None:
    sample = channel_sample(2048, torch.device("cpu")).tolist()
    assert len(set(sample)) == 16 and (sample[0], sample[-1]) == (0, 2047)
    assert channel_sample(3, torch.device("cpu")).tolist() == [0, 1, 2]


def test_packed_sequences_are_unpacked_in_order() -> None:
    shape = parse_scan("varlen3x5x2")
    assert shape is not None
    x = torch.arange(float(shape.elements)).view(shape.tokens, 2)
    found = unpack(x, shape)
    begin = 0
    for row, length in zip(found, shape.lengths, strict=True):
        assert torch.equal(row[:length], x[begin : begin + length])
        assert not row[length:].any()
        begin += length


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("label", ["2x300x7", "varlen5x200x33"])
def test_an_operator_that_loses_what_it_carries_has_a_large_error(cell: Cell, label: str) -> None:
    shape = parse_scan(label)
    assert shape is not None
    (call,) = fused_calls(cell, shape, torch.float32, torch.device("cpu"), sets=1)
    assert fused_error(cell, call, shape) < 1e-6

    def restarting(
        pre: torch.Tensor, cu_seqlens: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        h = cell.scan(pre, cu_seqlens, state, slots)
        cut = int(cu_seqlens[1]) // 2  # within the first sequence
        rest = torch.tensor([0, int(cu_seqlens[1]) - cut], dtype=torch.int32)
        one = torch.zeros(1, dtype=torch.int32)
        h[cut : cu_seqlens[1]] = cell.scan(
            pre[cut : cu_seqlens[1]], rest, torch.zeros_like(state[:1]), one
        )
        return h

    def forgetful(
        pre: torch.Tensor, cu_seqlens: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        return cell.scan(pre, cu_seqlens, state.clone(), slots)

    for wrong in (restarting, forgetful):
        broken = dataclasses.replace(cell, scan=wrong)
        assert fused_error(broken, call, shape) > 1e-2
