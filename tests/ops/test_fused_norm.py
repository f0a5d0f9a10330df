"""rms_norm, normed_gelu_ and normed_step_ against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops import fused_norm as normed
from tests.ops.helpers import CELL_OF, CELLS, exact

pytestmark = pytest.mark.gpu

EPS = 1e-6
# rows, width of the stream, channels: one turn of the threads and several, of either row; more rows
# than are under way at once with all the threads that a GELU might have
SHAPES = [
    (1, 8, 8),
    (5, 72, 200),
    (300, 384, 1536),
    (7, 64, 16392),
    (33, 9000, 72),
    (9, 2048, 3072),
    (1100, 768, 3072),
]


def on_gpu(x: Tensor) -> Tensor:
    return x.to("cuda", torch.bfloat16)


def stream(rows: int, width: int) -> Tensor:
    """Rows of very different magnitudes: each is divided by its own."""
    return on_gpu(exact(rows, width, seed=1) * 10.0 ** (torch.arange(rows) % 5 - 1).unsqueeze(1))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize(("rows", "width"), sorted({shape[:2] for shape in SHAPES}), ids=str)
def test_norm(rows: int, width: int) -> None:
    x, weight = stream(rows, width), on_gpu(exact(width, seed=2))
    before = x.clone()
    got = normed.rms_norm(x, EPS, weight)
    expected = normed.rms_norm_reference(x, EPS, weight)
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=0)  # is rounded once
    assert torch.equal(x, before)


@pytest.mark.parametrize(("rows", "width"), sorted({shape[:2] for shape in SHAPES}), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_norm_of_a_stream_to_which_a_product_is_added(
    rows: int, width: int, dtype: torch.dtype, added: bool
) -> None:
    x, weight = (1.001 * stream(rows, width).float()).to(dtype), on_gpu(exact(width, seed=2))
    y = on_gpu(exact(rows, width, seed=3)) if added else None
    expected, after = normed.added_norm_reference(x, y, EPS, weight)
    got = normed.added_rms_norm_(x, y, EPS, weight)
    assert got.dtype == torch.bfloat16 and torch.equal(x, after)
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-8, atol=0)  # is rounded once
    if added:
        alone = x[-1:].clone()
        assert torch.equal(normed.added_rms_norm_(alone, None, EPS, weight), got[-1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_gelu(shape: tuple[int, int, int], biases: bool) -> None:
    rows, width, channels = shape
    x = stream(rows, width)
    y = on_gpu(exact(rows, channels, seed=2) * x.float().norm(dim=1, keepdim=True).cpu())
    y = on_gpu(y.cpu() / width**0.5)
    bias = on_gpu(exact(channels, seed=3)) if biases else None
    ahead = on_gpu(exact(width, seed=4)) if biases else None
    expected, after = normed.gelu_reference(x, EPS, y, bias, ahead)
    before = x.clone()
    normed.normed_gelu_(x, EPS, y, bias, ahead)
    close(y, expected)
    if biases:
        torch.testing.assert_close(x.double(), after, rtol=2.0**-8, atol=0)
    else:
        assert torch.equal(x, before)


@pytest.mark.parametrize("options", [(False, True), (True, True), (False, False)], ids=str)
@pytest.mark.parametrize("cell", list(CELL_OF.values()))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_step(
    shape: tuple[int, int, int], cell: str, options: tuple[bool, bool], biases: bool
) -> None:
    if cell == "mingru" and not options[1]:
        pytest.skip("minGRU has no gates to normalise")
    rows, width, channels = shape
    gates = CELLS[cell]
    x = stream(rows, width)
    y = exact(rows, gates * channels, seed=2) * x.float().norm(dim=1, keepdim=True).cpu()
    y = on_gpu(y / width**0.5)
    bias = on_gpu(exact(gates * channels, seed=3)) if biases else None
    ahead = on_gpu(exact(width, seed=4)) if biases else None
    # Rows of state lie apart, and some slots name none.
    pool = exact(rows + 3, channels + 4, seed=5).to("cuda", torch.float32)
    slots = torch.randperm(rows + 3)[:rows].to("cuda", torch.int32)
    if rows > 2:
        slots[1], slots[2] = -1, rows + 3
    state = pool.clone()
    expected, after = normed.step_reference(
        x, EPS, y, bias, pool[:, :channels], slots.where(slots < rows + 3, -1), cell, *options
    )
    stepped = x.clone()
    h = normed.normed_step_(
        stepped, EPS, y, bias, ahead, state[:, :channels], slots, cell, *options
    )
    # Pre-activations, of up to 8 or so, are rounded by 0.016 before the gates.
    torch.testing.assert_close(h.double(), expected, rtol=0.03, atol=0.05)
    torch.testing.assert_close(state[:, :channels].double(), after, rtol=0.03, atol=0.05)
    named = slots[(slots >= 0) & (slots < rows + 3)].tolist()
    untouched = [row for row in range(rows + 3) if row not in named]
    assert torch.equal(state[untouched], pool[untouched])
    assert torch.equal(state[:, channels:], pool[:, channels:])
    assert not h[1:3].any() or rows <= 2
    if ahead is not None:
        torch.testing.assert_close(
            stepped.double(), x.double() + ahead.double(), rtol=2.0**-8, atol=0
        )
    else:
        assert torch.equal(stepped, x)


def test_no_rows() -> None:
    x, y = on_gpu(torch.ones(0, 8)), on_gpu(torch.ones(0, 16))
    normed.normed_gelu_(x, EPS, y)
    assert normed.rms_norm(x, EPS, on_gpu(torch.ones(8))).shape == (0, 8)
    assert normed.added_rms_norm_(x.float(), x, EPS, on_gpu(torch.ones(8))).shape == (0, 8)
    state, slots = torch.ones(2, 8, device="cuda"), torch.ones(0, dtype=torch.int32, device="cuda")
    assert normed.normed_step_(x, EPS, y, None, None, state, slots, "mingru").shape == (0, 8)


def test_what_does_not_fit_is_refused() -> None:
    x, y = on_gpu(torch.ones(4, 16)), on_gpu(torch.ones(4, 32))
    state = torch.ones(4, 16, device="cuda")
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    odd, apart = on_gpu(torch.ones(4, 33))[:, 1:], torch.ones(4, 18, device="cuda")[:, 2:]

    def norm(*args: Tensor | float | None) -> None:
        normed.rms_norm(*args)  # type: ignore[arg-type]

    def added(*args: Tensor | float | None) -> None:
        normed.added_rms_norm_(*args)  # type: ignore[arg-type]

    def gelu(*args: Tensor | float | None) -> None:
        normed.normed_gelu_(*args)  # type: ignore[arg-type]

    def step(*args: Tensor | float | str | None) -> None:
        normed.normed_step_(*args)  # type: ignore[arg-type]

    for call, args, message in (
        (norm, (x.float(), EPS, x[0]), "x must be bfloat16"),
        (norm, (odd, EPS, y[0]), "x must be contiguous"),
        (added, (x.half(), None, EPS, x[0]), "x must be float32 or bfloat16"),
        (added, (x, x, EPS, x[0]), "must not share memory with y"),
        (added, (x, y, EPS, x[0]), "y must be"),
        (added, (x, None, EPS, y[0]), "weight must be"),
        (norm, (x, EPS, y[0]), "weight must be"),
        (gelu, (x.float(), EPS, y), "x must be bfloat16"),
        (gelu, (x, EPS, y[:3]), "y must be"),
        (gelu, (x, EPS, odd), "y must be contiguous"),
        (gelu, (x, EPS, y, y[0, :16].contiguous()), "bias must be"),
        (gelu, (x, EPS, y, None, y[0]), "ahead must be"),
        (gelu, (x, EPS, x), "must not share memory"),
        (step, (x, EPS, y, None, None, state[:, :8], slots, "mingru"), "must have 2 columns"),
        (step, (x, EPS, y, None, None, state, slots, "minlstm"), "must have 3 columns"),
        (step, (x, EPS, y, None, None, state, slots, "gru"), "cell must be one of mingru, minlstm"),
        (step, (x, EPS, y, None, None, state.double(), slots, "mingru"), "state must be float32"),
        (step, (x, EPS, y, None, None, state, slots[:3], "mingru"), "slots must be"),
        (step, (x, EPS, y, None, None, apart, slots, "mingru"), "aligned"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(*args)
    for cpu in (x.cpu(), y.cpu()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            gelu(cpu, EPS, cpu)
        with pytest.raises(NotImplementedError):
            norm(cpu, EPS, cpu[0])
