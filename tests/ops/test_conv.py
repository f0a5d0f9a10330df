"""conv_scan and conv_step against float64, torch's conv1d, and each other."""

from __future__ import annotations

import pytest
import torch

from engine.ops import conv_scan, conv_step
from tests.ops.helpers import (
    DEVICES,
    LENGTHS,
    SERVING_DTYPES,
    channels_for,
    close,
    exact,
    int32,
    op,
    same_bits,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_conv1d_with_carried_padding(device: str, dtype: torch.dtype, length: int) -> None:
    channels, taps = channels_for(length), 4
    x, state = exact(length, channels, seed=1), exact(2, taps - 1, channels, seed=2)
    weight, bias = exact(channels, taps, seed=3), exact(channels, seed=4)
    rows = torch.cat([state[1], x])
    wanted = torch.nn.functional.conv1d(rows.T[None], weight[:, None], bias, groups=channels)[0].T
    given = state.float().to(device)
    y = conv_scan(
        x.to(device, dtype),
        weight.to(device, dtype),
        bias.to(device, dtype),
        int32(0, length, device=device),
        given,
        int32(1, device=device),
    )
    assert y.dtype == dtype
    close(y, wanted, dtype)
    same_bits(given[0], state[0].float())
    same_bits(given[1], rows[-(taps - 1) :].float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_ragged_batches(device: str, dtype: torch.dtype, taps: int, with_bias: bool) -> None:
    """Lengths 1 and 2 are shorter than the window: the old inputs move down."""
    cu_seqlens, slots = int32(0, 1, 3, 3, 40, 60, 90), int32(5, 2, 1, 0, -1, 6)
    x, state = exact(95, 37, seed=5), exact(8, taps - 1, 37, seed=6)
    weight, bias = exact(37, taps, seed=7), exact(37, seed=8) if with_bias else None
    wanted, wanted_state = op("conv_scan").reference(x, weight, bias, cu_seqlens, state, slots)
    given = state.float().to(device)
    y = conv_scan(
        x.to(device, dtype),
        weight.to(device, dtype),
        None if bias is None else bias.to(device, dtype),
        cu_seqlens.to(device),
        given,
        slots.to(device),
    )
    close(y, wanted, dtype)
    same_bits(given, wanted_state.float())
    assert not y[40:60].any() and not y[90:].any(), "padding rows must be zero"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_stepping_equals_the_scan_bit_for_bit(device: str, dtype: torch.dtype, taps: int) -> None:
    length, batch = 12, 3
    x = exact(batch, length, 37, seed=9).to(device, dtype)
    weight, bias = exact(37, taps, seed=10).to(device, dtype), exact(37, seed=11).to(device, dtype)
    stepped = exact(5, taps - 1, 37, seed=12).float().to(device)
    scanned, slots = stepped.clone(), int32(4, 0, 2, device=device)
    rows = [conv_step(x[:, t], weight, bias, stepped, slots) for t in range(length)]
    edges = int32(0, length, 2 * length, 3 * length, device=device)
    y = conv_scan(x.reshape(-1, 37), weight, bias, edges, scanned, slots)
    same_bits(y.view(batch, length, 37), torch.stack(rows, dim=1))
    same_bits(scanned, stepped)


@pytest.mark.parametrize("device", DEVICES)
def test_step_equals_its_reference_and_skips_padding(device: str) -> None:
    x, state = exact(4, 5, seed=13), exact(3, 2, 5, seed=14)
    weight, slots = exact(5, 3, seed=15), int32(2, -1, 0, -7)
    wanted, wanted_state = op("conv_step").reference(x, weight, None, state, slots)
    given = state.float().to(device)
    y = conv_step(x.float().to(device), weight.float().to(device), None, given, slots.to(device))
    close(y, wanted, torch.float32)
    same_bits(given, wanted_state.float())
    assert not y[[1, 3]].any()
