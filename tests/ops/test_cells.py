"""The cells: scan, step and training scan against float64."""

from __future__ import annotations

import pytest
import torch

from engine import ops
from tests.ops.helpers import (
    ALL_DTYPES,
    BOUND,
    CELLS,
    DEVICES,
    LENGTHS,
    OPTIONS,
    SERVING_DTYPES,
    Options,
    close,
    exact,
    gated_case,
    given_options,
    int32,
    ragged,
    reference,
    same_bits,
)

PLAIN = [("mingru", (False,)), ("minlstm", (False, True)), ("hgrn", (BOUND,))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("cell", "options"), PLAIN)
def test_scan_equals_the_recurrence(
    device: str, dtype: torch.dtype, length: int, cell: str, options: Options
) -> None:
    pre, state, wanted, wanted_state = gated_case(cell, options, length)
    given = state.float().to(device)
    scan = getattr(ops, f"{cell}_scan")
    cu_seqlens, slots = int32(0, length, device=device), int32(2, device=device)
    chosen = given_options(options, state.shape[1], device)
    h = scan(pre.to(device, dtype), cu_seqlens, given, slots, *chosen)
    assert h.dtype == dtype
    close(h, wanted, dtype)
    close(given, wanted_state, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize(("cell", "options"), OPTIONS)
def test_ragged_batches(device: str, dtype: torch.dtype, cell: str, options: Options) -> None:
    pre, cu_seqlens, state, slots = ragged(cell)
    plain, chosen = (given_options(options, 37, where) for where in ("cpu", device))
    wanted, wanted_state = reference(f"{cell}_scan")(pre, cu_seqlens, state, slots, *plain)
    given = state.float().to(device)
    scan = getattr(ops, f"{cell}_scan")
    h = scan(pre.to(device, dtype), cu_seqlens.to(device), given, slots.to(device), *chosen)
    close(h, wanted, dtype)
    close(given, wanted_state, torch.float32)
    assert not h[135:200].any() and not h[331:].any(), "padding rows must be zero"
    same_bits(given[[0, 2, 4]], state[[0, 2, 4]].float())  # empty, free and free: untouched


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize(("cell", "options"), OPTIONS)
def test_a_step_is_a_scan_of_length_one(
    device: str, dtype: torch.dtype, cell: str, options: Options
) -> None:
    batch, channels = 9, 37
    pre = exact(batch, CELLS[cell] * channels, seed=3, scale=2.0)
    state = exact(12, channels, seed=4)
    slots = int32(4, 0, -1, 11, 7, 3, -5, 2, 9)
    plain, chosen = (given_options(options, channels, where) for where in ("cpu", device))
    wanted, wanted_state = reference(f"{cell}_step")(pre, state, slots, *plain)
    x, rows = pre.to(device, dtype), slots.to(device)
    stepped, scanned = state.float().to(device), state.float().to(device)
    h = getattr(ops, f"{cell}_step")(x, stepped, rows, *chosen)
    close(h, wanted, dtype)
    close(stepped, wanted_state, torch.float32)
    edges = torch.arange(batch + 1, dtype=torch.int32, device=device)
    same_bits(getattr(ops, f"{cell}_scan")(x, edges, scanned, rows, *chosen), h)
    same_bits(scanned, stepped)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cell", "options"), OPTIONS)
def test_stepping_through_equals_the_scan(device: str, cell: str, options: Options) -> None:
    length, channels = 200, 37
    pre = exact(length, CELLS[cell] * channels, seed=5, scale=2.0).float().to(device)
    stepped, scanned = (torch.ones(1, channels, device=device) for _ in range(2))
    slot = int32(0, device=device)
    step, chosen = getattr(ops, f"{cell}_step"), given_options(options, channels, device)
    rows = torch.cat([step(pre[t : t + 1], stepped, slot, *chosen) for t in range(length)])
    cu_seqlens = int32(0, length, device=device)
    h = getattr(ops, f"{cell}_scan")(pre, cu_seqlens, scanned, slot, *chosen)
    close(h, rows.cpu().double(), torch.float32)
    close(scanned, stepped.cpu().double(), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cell", "options"), OPTIONS)
def test_extreme_gates_stay_finite_and_right(device: str, cell: str, options: Options) -> None:
    """Every combination of gates far beyond where exp overflows, and of both sides of g's joint."""
    edge = [-3e4, -1e3, -200.0, -88.5, -20.0, -1e-3, 0.0, 1e-3, 20.0, 88.5, 200.0, 1e3, 3e4]
    gates = torch.cartesian_prod(*[torch.tensor(edge, dtype=torch.float64)] * CELLS[cell])
    pre = gates.T.reshape(1, -1)  # one token, a channel for each combination
    channels = gates.shape[0]
    state = exact(1, channels, seed=6)
    plain, chosen = (given_options(options, channels, where) for where in ("cpu", device))
    wanted, _ = reference(f"{cell}_step")(pre, state, int32(0), *plain)
    given = state.float().to(device)
    h = getattr(ops, f"{cell}_step")(
        pre.float().to(device), given, int32(0, device=device), *chosen
    )
    assert h.isfinite().all()
    close(h, wanted, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize(("cell", "options"), OPTIONS)
@pytest.mark.parametrize("with_h0", [False, True])
def test_training_scan_and_its_gradients(
    device: str, dtype: torch.dtype, cell: str, options: Options, with_h0: bool
) -> None:
    values, cu_seqlens, _, _ = ragged(cell)
    state_type = torch.float64 if dtype == torch.float64 else torch.float32
    start = exact(5, 37, seed=8)
    seen, seen_last = exact(340, 37, seed=9), exact(5, 37, seed=10)

    pre = values.clone().requires_grad_()
    h0 = start.clone().requires_grad_() if with_h0 else None
    plain, chosen = (given_options(options, 37, where) for where in ("cpu", device))
    wanted, wanted_last = reference(f"{cell}_scan_train")(pre, cu_seqlens, h0, *plain)
    (wanted * seen).sum().add((wanted_last * seen_last).sum()).backward()

    x = values.to(device, dtype).requires_grad_()
    x0 = start.to(device, state_type).requires_grad_() if with_h0 else None
    scan = getattr(ops, f"{cell}_scan_train")
    h, last = scan(x, cu_seqlens.to(device), x0, *chosen)
    torch.autograd.backward((h, last), (seen.to(device, dtype), seen_last.to(device, state_type)))

    assert h.dtype == dtype and last.dtype == state_type
    close(h, wanted, dtype)
    close(last, wanted_last, state_type)
    assert x.grad is not None and pre.grad is not None
    # The saved h carries one rounding of the dtype; g - h cancels, so its error is absolute.
    rtol, atol = {
        torch.float32: (2e-5, 2e-5),
        torch.float64: (1e-11, 1e-11),
        torch.bfloat16: (2e-2, 2e-2),
        torch.float16: (3e-3, 3e-3),
    }[dtype]
    torch.testing.assert_close(x.grad.cpu().double(), pre.grad, rtol=rtol, atol=atol)
    assert not x.grad[331:].any(), "padding rows have no gradient"
    if x0 is not None and h0 is not None:
        assert x0.grad is not None and h0.grad is not None
        torch.testing.assert_close(x0.grad.cpu().double(), h0.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize(("cell", "options"), OPTIONS)
def test_gradcheck(device: str, length: int, cell: str, options: Options) -> None:
    cu_seqlens = int32(0, length // 3, length // 3, length, device=device)
    pre = exact(length + 1, CELLS[cell] * 2, seed=11).to(device).requires_grad_()
    h0 = exact(3, 2, seed=12).to(device).requires_grad_()
    scan, chosen = getattr(ops, f"{cell}_scan_train"), given_options(options, 2, device)
    assert torch.autograd.gradcheck(lambda p, s: scan(p, cu_seqlens, s, *chosen), (pre, h0))
    assert torch.autograd.gradcheck(lambda p: scan(p, cu_seqlens, None, *chosen), (pre,))
    # Only one of the two results is used.
    assert torch.autograd.gradcheck(lambda p: scan(p, cu_seqlens, h0, *chosen)[1], (pre,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cell", "options"), PLAIN[:2])  # of hgrn no operator trains
def test_training_and_serving_scans_agree_bit_for_bit(
    device: str, cell: str, options: Options
) -> None:
    values, cu_seqlens, state, slots = ragged(cell)
    slots = int32(3, 0, 5, 2, 1)  # the training scan knows no padding sequences
    pre, edges = values.float().to(device), cu_seqlens.to(device)
    served = state.float().to(device)
    h0 = served[slots.long()].clone()
    h = getattr(ops, f"{cell}_scan")(pre, edges, served, slots.to(device), *options)
    trained, last = getattr(ops, f"{cell}_scan_train")(pre, edges, h0, *options)
    same_bits(trained, h)
    same_bits(last, served[slots.long()])


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_of_a_lower_bound(device: str) -> None:
    cu_seqlens = int32(0, 3, 3, 9, device=device)
    pre = exact(11, 3 * 2, seed=11).to(device).requires_grad_()
    bound = torch.tensor([0.25, 0.75], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda p, b: ops.hgrn_scan_train(p, cu_seqlens, None, b), (pre, bound)
    )
    h, _ = ops.hgrn_scan_train(pre, cu_seqlens, None, bound)
    h.sum().backward()
    assert pre.grad is not None
    assert not pre.grad[:, 4:].any(), "the output gate has no part in it"


def test_no_lower_bound_is_one_of_zero() -> None:
    pre, cu_seqlens, state, slots = ragged("hgrn")
    given = [state.float() for _ in range(2)]
    with_none = ops.hgrn_scan(pre.float(), cu_seqlens, given[0], slots)
    same_bits(ops.hgrn_scan(pre.float(), cu_seqlens, given[1], slots, torch.zeros(37)), with_none)
    same_bits(given[1], given[0])


def test_lower_bounds_that_do_not_fit_are_told() -> None:
    pre, cu_seqlens, state, slots = ragged("hgrn")
    for bound in (torch.zeros(36), torch.zeros(37).double(), torch.zeros(1, 37)):
        with pytest.raises(RuntimeError, match=r"lower_bound must be (float32|\[channels\])"):
            ops.hgrn_scan(pre.float(), cu_seqlens, state.float(), slots, bound)
    with pytest.raises(RuntimeError, match=r"lower_bound must be \[37\], got \[36\]"):
        ops.hgrn_scan_train(pre, cu_seqlens, None, torch.zeros(36))
    with pytest.raises(RuntimeError, match=r"h0 must be \[5, 37\]"):
        ops.hgrn_scan_train(pre, cu_seqlens, state)
