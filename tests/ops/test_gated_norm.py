"""gated_rms_norm, swiglu, and the step of a cell with an output gate, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops import fused_norm as normed
from tests.ops.helpers import BOUND, DEVICES, SERVING_DTYPES, TOLERANCE, exact, given_options
from tests.ops.test_fused_norm import EPS, SHAPES, on_gpu, stream

# rows, channels: one turn of a block's threads and several
ROWS = [(1, 8), (5, 200), (300, 384), (3, 16392), (0, 16)]


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2 * rtol, atol=10 * atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_gated_norm(
    device: str, dtype: torch.dtype, shape: tuple[int, int], weighted: bool
) -> None:
    rows, channels = shape
    pre, h = exact(rows, 3 * channels, seed=1, scale=3.0), exact(rows, channels, seed=2)
    weight = exact(channels, seed=3) if weighted else None
    gate = pre[:, 2 * channels :]
    got = normed.gated_rms_norm(
        h.to(device, dtype),
        pre.to(device, dtype)[:, 2 * channels :],
        None if weight is None else weight.to(device, dtype),
        EPS,
    )
    close(got, normed.gated_norm_reference(h, gate, weight, EPS), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("rows", "channels", "groups"), [(1, 16, 2), (5, 1536, 1), (7, 4096, 8)])
def test_gated_norm_of_groups(
    device: str, dtype: torch.dtype, gate_first: bool, rows: int, channels: int, groups: int
) -> None:
    """Gates are columns of a projection."""
    pre, h = exact(rows, 3 * channels, seed=1, scale=3.0), exact(rows, channels, seed=2)
    weight = exact(channels, seed=3)
    got = normed.gated_rms_norm(
        h.to(device, dtype), pre.to(device, dtype)[:, :channels], weight.to(device, dtype), EPS,
        groups=groups, gate_first=gate_first,
    )  # fmt: skip
    wanted = normed.gated_norm_reference(h, pre[:, :channels], weight, EPS, groups, gate_first)
    close(got, wanted, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_swiglu(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    y = exact(shape[0], 2 * shape[1], seed=4, scale=3.0)
    close(normed.swiglu(y.to(device, dtype)), normed.swiglu_reference(y), dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_gates_of_any_size(device: str) -> None:
    gate = torch.tensor([-3e4, -1e3, -88.5, -20.0, 0.0, 20.0, 88.5, 3e4], dtype=torch.float64)
    y = torch.cat([gate, torch.ones(8, dtype=torch.float64)]).unsqueeze(0)
    got = normed.swiglu(y.float().to(device))
    close(got, normed.swiglu_reference(y), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_normed_swiglu(shape: tuple[int, int, int], biases: bool) -> None:
    rows, width, channels = shape
    x = stream(rows, width)
    y = exact(rows, 2 * channels, seed=2) * x.float().norm(dim=1, keepdim=True).cpu()
    y = on_gpu(y / width**0.5)
    bias = on_gpu(exact(2 * channels, seed=3)) if biases else None
    ahead = on_gpu(exact(width, seed=4)) if biases else None
    stepped = x.clone()
    got = normed.normed_swiglu_(stepped, EPS, y, bias, ahead)
    expected = normed.swiglu_reference(normed._divided(x, EPS, y, bias))
    # Gate and up are rounded before they are multiplied.
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-6, atol=2.0**-6)
    after = x.double() + (0 if ahead is None else ahead.double())
    torch.testing.assert_close(stepped.double(), after, rtol=2.0**-8, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_step_with_an_output_gate(shape: tuple[int, int, int], given: bool) -> None:
    """`given`: biases, a lower bound and a weight of the norm."""
    rows, width, channels = shape
    x = stream(rows, width)
    y = exact(rows, 3 * channels, seed=2) * x.float().norm(dim=1, keepdim=True).cpu()
    y = on_gpu(y / width**0.5)
    bias = on_gpu(exact(3 * channels, seed=3)) if given else None
    ahead = on_gpu(exact(width, seed=4)) if given else None
    weight = on_gpu(exact(channels, seed=6)) if given else None
    (bound,) = given_options((BOUND,), channels, "cuda") if given else (None,)
    # Rows of state lie apart, and some slots name none.
    pool = exact(rows + 3, channels + 4, seed=5).to("cuda", torch.float32)
    slots = torch.randperm(rows + 3)[:rows].to("cuda", torch.int32)
    if rows > 2:
        slots[1], slots[2] = -1, rows + 3
    state, stepped = pool.clone(), x.clone()
    h = normed.normed_step_(
        *(stepped, EPS, y, bias, ahead, state[:, :channels], slots, "hgrn"),
        lower_bound=bound,
        norm_weight=weight,
    )
    expected, after = normed.step_reference(
        *(x, EPS, y, bias, pool[:, :channels], slots.where(slots < rows + 3, -1), "hgrn"),
        lower_bound=bound,
        norm_weight=weight,
    )
    torch.testing.assert_close(state[:, :channels].double(), after, rtol=0.03, atol=0.05)
    torch.testing.assert_close(h.double(), expected, rtol=0.05, atol=0.1)
    assert torch.equal(state[:, channels:], pool[:, channels:])
    assert not h[1:3].any() or rows <= 2
    if ahead is None:
        assert torch.equal(stepped, x)


@pytest.mark.gpu
def test_what_does_not_fit_is_refused() -> None:
    h, pre = on_gpu(torch.ones(4, 16)), on_gpu(torch.ones(4, 48))
    state = torch.ones(4, 16, device="cuda")
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    gate = pre[:, 32:]
    with pytest.raises(RuntimeError, match="gate must be"):
        normed.gated_rms_norm(h, gate[:, :8], None, EPS)
    with pytest.raises(RuntimeError, match="channels of gate must lie together"):
        normed.gated_rms_norm(h, pre[:, 31:47], None, EPS)
    with pytest.raises(RuntimeError, match="weight must be"):
        normed.gated_rms_norm(h, gate, h[0, :8], EPS)
    with pytest.raises(RuntimeError, match="must be 4 groups, each of a multiple of 8"):
        normed.gated_rms_norm(h, gate, None, EPS, groups=4)
    with pytest.raises(RuntimeError, match="each of a multiple of 8"):
        normed.swiglu(pre[:, :24].contiguous())
    step = (h, EPS, pre, None, None, state, slots)
    with pytest.raises(RuntimeError, match="hgrn has no linear_candidate"):
        normed.normed_step_(*step, "hgrn", linear_candidate=True)
    with pytest.raises(RuntimeError, match="minlstm has no lower_bound"):
        normed.normed_step_(*step, "minlstm", lower_bound=state[0])
    with pytest.raises(RuntimeError, match=r"lower_bound must be (float32|\[channels\])"):
        normed.normed_step_(*step, "hgrn", lower_bound=state[0].double())
