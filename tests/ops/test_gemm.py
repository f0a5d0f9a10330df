"""The linear maps of a layer against float64, in every form.

The forms differ in the number of tokens and in whether blocks share the inputs
(csrc/gemm/heuristics.h), so both vary here, with widths that no tile divides.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import conv_step, hgrn_step, mingru_step, minlstm_step
from engine.ops.gemm import (
    SQUARE_ROWS,
    linear_convolve,
    linear_embed,
    linear_map,
    linear_map_reference,
    linear_residual_,
    linear_residual_reference,
    linear_step,
    linear_step_reference,
    linear_swiglu,
    linear_swiglu_reference,
    norm_inputs,
)
from tests.ops.helpers import CELL_OF, CELLS, exact

pytestmark = pytest.mark.gpu

TOKENS = [1, 7, 8, 9, 16, 31, 33, 64, 65, 130, 300, 1000]
# channels, inputs: one part and several, one stage and many, more rows than a GPU has blocks, so
# many weights that warpgroups take wide tiles of them
SHAPES = [
    (72, 64),
    (384, 384),
    (200, 1536),
    (2048, 2056),
    (17000, 192),
    (9000, 2048),
    (4096, 2048),
]
EPS = 1e-6


def on_gpu(x: Tensor) -> Tensor:
    return x.to("cuda", torch.bfloat16)


def normed(tokens: int, inputs: int) -> tuple[Tensor, Tensor | None]:
    """An input with its sums of squares; without where no norm could have written them."""
    x = on_gpu(exact(tokens, inputs, seed=tokens))
    if inputs % SQUARE_ROWS:
        return x, None
    weight = on_gpu(1 + 0.2 * exact(inputs, seed=2))
    return norm_inputs(x, weight)


def close(got: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    # For float32 what sums of two thousand lose.
    rounding = 2 * (2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-15)
    torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=2e-5 * max(scale, 1.0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_map(shape: tuple[int, int], tokens: int) -> None:
    channels, inputs = shape
    x, squares = normed(tokens, inputs)
    weight = on_gpu(exact(channels, inputs, seed=1, scale=inputs**-0.5))
    bias = on_gpu(exact(channels, seed=3))
    for with_bias, gelu, logits in ((None, False, False), (bias, True, False), (bias, False, True)):
        got = linear_map(x, squares, EPS, weight, with_bias, gelu, logits)
        expected = linear_map_reference(x, squares, EPS, weight, with_bias, gelu)
        assert got.dtype == (torch.float32 if logits else torch.bfloat16)
        close(got, expected)


@pytest.mark.parametrize("options", [(False, True), (True, True), (False, False)], ids=str)
@pytest.mark.parametrize("cell", list(CELL_OF.values()))
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_step(tokens: int, cell: str, options: tuple[bool, bool]) -> None:
    if cell == "mingru" and not options[1]:
        pytest.skip("minGRU has no gates to normalise")
    gates = CELLS[cell]
    for channels, inputs in (
        (64, 64),
        (200, 384),
        (1152, 768),
        (2048, 1032),
        (2048, 2048),
        (3072, 2048),
    ):
        x, squares = normed(tokens, inputs)
        weight = on_gpu(exact(gates * channels, inputs, seed=1, scale=inputs**-0.5))
        bias = on_gpu(exact(gates * channels, seed=3))
        rows = tokens + 5
        pool = exact(rows, channels, seed=4).to("cuda", torch.float32)
        slots = torch.randperm(rows)[:tokens].to("cuda", torch.int32)
        slots[tokens // 2] = -1 if tokens > 1 else slots[0]
        state = pool.clone()
        h, sums = linear_step(x, squares, EPS, weight, bias, state, slots, cell, *options)
        assert sums.shape == (0, tokens)
        expected, _, after = linear_step_reference(
            x, squares, EPS, weight, bias, pool, slots, cell, *options
        )
        # Pre-activations, of up to 8 or so, are rounded by 0.016 before the gates.
        torch.testing.assert_close(h.double(), expected, rtol=0.03, atol=0.05)
        torch.testing.assert_close(state.double(), after, rtol=0.03, atol=0.05)
        untouched = [row for row in range(rows) if row not in slots.tolist()]
        assert torch.equal(state[untouched], pool[untouched])
        assert not h[slots < 0].any()


def lower_bound_of(channels: int) -> Tensor:
    return exact(channels, seed=9).abs().clamp(max=0.96875).to("cuda", torch.float32)


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_step_with_an_output_gate(tokens: int, bounds: bool) -> None:
    for channels, inputs in (
        (64, 64),
        (192, 384),
        (1152, 768),
        (2048, 1032),
        (2048, 2048),
        (3072, 2048),
    ):
        x, squares = normed(tokens, inputs)
        weight = on_gpu(exact(3 * channels, inputs, seed=1, scale=inputs**-0.5))
        bias = on_gpu(exact(3 * channels, seed=3)) if bounds else None
        bound = lower_bound_of(channels) if bounds else None
        rows = tokens + 5
        pool = exact(rows, channels, seed=4).to("cuda", torch.float32)
        slots = torch.randperm(rows)[:tokens].to("cuda", torch.int32)
        slots[tokens // 2] = -1 if tokens > 1 else slots[0]
        state = pool.clone()
        out, sums = linear_step(
            x, squares, EPS, weight, bias, state, slots, "hgrn", lower_bound=bound
        )
        expected, _, after = linear_step_reference(
            x, squares, EPS, weight, bias, pool, slots, "hgrn", lower_bound=bound
        )
        # As in test_linear_step; h's error is multiplied by a gate.
        torch.testing.assert_close(out.double(), expected, rtol=0.04, atol=0.15)
        torch.testing.assert_close(state.double(), after, rtol=0.03, atol=0.05)
        h = state[slots.clamp(min=0).long()].masked_fill((slots < 0).unsqueeze(1), 0)
        _, of_h = norm_inputs(h, torch.ones_like(h[0]))
        torch.testing.assert_close(sums, of_h, rtol=1e-5, atol=1e-6)
        untouched = [row for row in range(rows) if row not in slots.tolist()]
        assert torch.equal(state[untouched], pool[untouched])
        assert not out[slots < 0].any()


@pytest.mark.parametrize("tokens", [1, 8, 40, 300])
def test_a_step_with_an_output_gate_is_map_step_and_gate(tokens: int) -> None:
    channels, inputs = 384, 384
    x, squares = normed(tokens, inputs)
    weight = on_gpu(exact(3 * channels, inputs, seed=1, scale=0.05))
    bias, bound = on_gpu(exact(3 * channels, seed=3)), lower_bound_of(channels)
    state = exact(tokens, channels, seed=4).to("cuda", torch.float32)
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
    apart = state.clone()
    out, _ = linear_step(x, squares, EPS, weight, bias, state, slots, "hgrn", lower_bound=bound)
    pre = linear_map(x, squares, EPS, weight, bias)
    hgrn_step(pre, apart, slots, bound)
    gated = apart * functional.silu(pre[:, 2 * channels :].float())
    # As in test_a_step_is_map_and_step; SiLUs differ in their last bits.
    assert (out != gated.bfloat16()).float().mean() < 0.03
    torch.testing.assert_close(out.float(), gated, rtol=0.02, atol=0.03)
    torch.testing.assert_close(state, apart, rtol=0.02, atol=0.03)


@pytest.mark.parametrize(
    "shape",
    [(72, 64), (384, 384), (200, 1536), (2048, 1032), (5632, 2048), (17000, 192)],
    ids=str,
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_swiglu(shape: tuple[int, int], tokens: int) -> None:
    channels, inputs = shape
    x, squares = normed(tokens, inputs)
    weight = on_gpu(exact(2 * channels, inputs, seed=1, scale=inputs**-0.5))
    bias = on_gpu(exact(2 * channels, seed=3))
    for with_bias in (None, bias):
        got = linear_swiglu(x, squares, EPS, weight, with_bias)
        # Of gates far below zero SiLU's relative error is some times that of the rounded gate.
        expected = linear_swiglu_reference(x, squares, EPS, weight, with_bias)
        torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=2e-3)
        gate, up = linear_map(x, squares, EPS, weight, with_bias).float().chunk(2, dim=1)
        apart = (functional.silu(gate) * up).bfloat16()
        assert (got != apart).float().mean() < 0.03


@pytest.mark.parametrize("options", [(False, True), (True, True), (False, False)], ids=str)
@pytest.mark.parametrize("cell", list(CELL_OF.values()))
@pytest.mark.parametrize("tokens", [1, 8, 40, 300])
def test_a_step_is_map_and_step(tokens: int, cell: str, options: tuple[bool, bool]) -> None:
    if cell == "mingru" and not options[1]:
        pytest.skip("minGRU has no gates to normalise")
    gates = CELLS[cell]
    channels, inputs = 384, 384
    x, squares = normed(tokens, inputs)
    weight = on_gpu(exact(gates * channels, inputs, seed=1, scale=0.05))
    bias = on_gpu(exact(gates * channels, seed=3))
    state = exact(tokens, channels, seed=4).to("cuda", torch.float32)
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
    apart = state.clone()
    h, _ = linear_step(x, squares, EPS, weight, bias, state, slots, cell, *options)
    pre = linear_map(x, squares, EPS, weight, bias)
    if cell == "mingru":
        expected = mingru_step(pre, apart, slots, options[0])
    else:
        expected = minlstm_step(pre, apart, slots, *options)
    # The forms may sum in another order, so a pre-activation may be rounded the other way.
    assert (h != expected).float().mean() < 0.02
    torch.testing.assert_close(h, expected, rtol=0.02, atol=0.03)
    torch.testing.assert_close(state, apart, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("cell", list(CELLS))
def test_rows_of_state_lie_apart_and_slots_may_miss_them(cell: str) -> None:
    gates, channels, inputs, rows = CELLS[cell], 64 if cell == "hgrn" else 72, 128, 6
    x, squares = normed(5, inputs)
    weight = on_gpu(exact(gates * channels, inputs, seed=1, scale=0.05))
    pool = exact(rows, channels + 8, seed=4).to("cuda", torch.float32)
    named = torch.tensor([3, -1, rows, 0, 2**30], dtype=torch.int32, device="cuda")
    spaced = torch.zeros(5, 2, dtype=torch.int32, device="cuda")
    spaced[:, 0] = named
    plain = pool[:, 4:-4].contiguous()
    expected, sums = linear_step(x, squares, EPS, weight, None, plain, named, cell)
    assert not sums[:, [1, 2, 4]].any()
    assert not expected[[1, 2, 4]].any() and expected[[0, 3]].any()
    whole = pool.clone()
    h, _ = linear_step(x, squares, EPS, weight, None, whole[:, 4:-4], spaced[:, 0], cell)
    assert torch.equal(h, expected) and torch.equal(whole[:, 4:-4], plain)
    assert torch.equal(whole[:, :4], pool[:, :4]) and torch.equal(whole[:, -4:], pool[:, -4:])
    assert torch.equal(whole[[1, 2, 4, 5]], pool[[1, 2, 4, 5]])


@pytest.mark.parametrize(
    "channels,inputs",
    [(64, 64), (384, 768), (2048, 3072), (768, 200), (3072, 768), (4096, 2048)],
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear_residual(tokens: int, channels: int, inputs: int) -> None:
    y = on_gpu(exact(tokens, inputs, seed=5))
    weight = on_gpu(exact(channels, inputs, seed=1, scale=inputs**-0.5))
    bias = on_gpu(exact(channels, seed=3))
    before = on_gpu(exact(tokens, channels, seed=6))
    norm = on_gpu(1 + 0.2 * exact(channels, seed=7))
    x = before.clone()
    scaled, squares = linear_residual_(y, weight, bias, x, norm)
    close(x, linear_residual_reference(y, weight, bias, before))
    expected_scaled, expected_squares = norm_inputs(x, norm)
    assert torch.equal(scaled, expected_scaled)
    torch.testing.assert_close(squares, expected_squares, rtol=1e-5, atol=1e-5)
    unit = before.clone()
    nothing, beside_x = linear_residual_(y, weight, bias, unit, None, squares=True)
    assert torch.equal(unit, x) and nothing.numel() == 0 and torch.equal(beside_x, squares)
    ahead = on_gpu(exact(channels, seed=8))
    more = before.clone()
    beside = linear_residual_(y, weight, bias, more, norm, ahead=ahead)
    assert torch.equal(more, x + ahead)
    assert torch.equal(beside[0], scaled) and torch.equal(beside[1], squares)
    more = before.clone()
    beside = linear_residual_(y, weight, bias, more, None, ahead=ahead, squares=True)
    assert torch.equal(more, x + ahead) and torch.equal(beside[1], squares)
    more = before.clone()
    linear_residual_(y, weight, bias, more, None, ahead=ahead)
    assert torch.equal(more, x + ahead)
    of_y = exact(-(-inputs // SQUARE_ROWS), tokens, seed=9).square().to("cuda", torch.float32)
    more = before.clone()
    linear_residual_(y, weight, bias, more, norm, y_squares=of_y, eps=0.5)
    close(more, linear_residual_reference(y, weight, bias, before, of_y, 0.5))
    x = before.clone()
    scaled, squares = linear_residual_(y, weight, None, x, None)
    assert scaled.shape == (0, channels) and squares.shape == (0, tokens)
    close(x, linear_residual_reference(y, weight, None, before))


@pytest.mark.parametrize("channels,inputs", [(64, 64), (768, 1536), (2560, 5120)])
@pytest.mark.parametrize("tokens", [1, 8, 9, 31, 64])
def test_linear_residual_of_a_wide_stream(tokens: int, channels: int, inputs: int) -> None:
    y = on_gpu(exact(tokens, inputs, seed=5))
    weight = on_gpu(exact(channels, inputs, seed=1, scale=inputs**-0.5))
    norm = on_gpu(1 + 0.2 * exact(channels, seed=7))
    before = exact(tokens, channels, seed=6).to("cuda", torch.float32)
    for bias in (None, on_gpu(exact(channels, seed=3))):
        x = before.clone()
        scaled, squares = linear_residual_(y, weight, bias, x, norm)
        expected = linear_residual_reference(y, weight, bias, before)
        torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(scaled, (x * norm).bfloat16())
        sums = x.double().square().view(tokens, -1, SQUARE_ROWS).sum(-1).T
        torch.testing.assert_close(squares.double(), sums, rtol=1e-5, atol=1e-5)


def test_a_wide_stream_takes_few_rows_and_a_norm() -> None:
    y, weight = on_gpu(exact(65, 64, seed=5)), on_gpu(exact(64, 64, seed=1))
    x, norm = torch.zeros(65, 64, device="cuda"), on_gpu(exact(64, seed=7))
    with pytest.raises(RuntimeError, match="up to 64 rows"):
        linear_residual_(y, weight, None, x, norm)
    for options in ({"norm_weight": None}, {"fixed_order": True}, {"ahead": norm}):
        with pytest.raises(RuntimeError, match="a norm_weight, no fixed_order and nothing ahead"):
            linear_residual_(y[:8], weight, None, x[:8], **{"norm_weight": norm, **options})


# channels, inputs, the first one that is convolved, how many are: of Mamba, of Mamba-2, and such
# that begin and end within tiles
@pytest.mark.parametrize(
    "channels,inputs,first,convolved",
    [(3072, 768, 0, 1536), (10240, 2560, 0, 5120), (3352, 768, 1536, 1792), (200, 72, 68, 100)],
)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 31, 64])
def test_linear_convolve(
    tokens: int, channels: int, inputs: int, first: int, convolved: int
) -> None:
    x, squares = normed(tokens, inputs)
    weight = on_gpu(exact(channels, inputs, seed=1, scale=inputs**-0.5))
    window = exact(tokens + 2, 3, convolved, seed=9).to("cuda", torch.float32)
    slots = torch.randperm(tokens + 2, device="cuda")[:tokens].to(torch.int32)
    if tokens > 1:
        slots[tokens // 2] = -1
    real = slots >= 0
    taps = on_gpu(exact(convolved, 4, seed=4))
    kept = torch.ones(channels, dtype=torch.bool)
    kept[first : first + convolved] = False
    for bias, filter_bias in (
        (None, None),
        (on_gpu(exact(channels, seed=3)), on_gpu(exact(convolved, seed=8))),
    ):
        state = window.clone()
        y, u = linear_convolve(
            x, squares, EPS, weight, bias, taps, filter_bias, state, slots, first
        )
        expected = linear_map_reference(x, squares, EPS, weight, bias)
        close(y[:, kept], expected[:, kept])
        rows = slots[real].long()
        newest = state[rows, -1]  # the products, rounded, which the convolution read
        assert torch.equal(newest, newest.bfloat16().float())
        close(newest.bfloat16(), expected[real][:, ~kept])
        after = window.clone()
        given = torch.zeros(tokens, convolved, dtype=torch.bfloat16, device="cuda")
        given[real] = newest.bfloat16()
        wanted = conv_step(given, taps, filter_bias, after, slots, silu=True)
        assert torch.equal(u, wanted) and torch.equal(state, after)


def test_linear_convolve_refuses_what_it_cannot_compute() -> None:
    x, weight, taps = (on_gpu(exact(*size, seed=1)) for size in ((65, 64), (16, 64), (8, 4)))
    state = torch.zeros(66, 3, 8, device="cuda")
    slots = torch.arange(65, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="at most 64 rows"):
        linear_convolve(x, None, EPS, weight, None, taps, None, state, slots)
    few = x[:2], None, EPS, weight, None
    with pytest.raises(RuntimeError, match="must be rows of weight"):
        linear_convolve(*few, taps, None, state, slots[:2], 12)
    with pytest.raises(RuntimeError, match=r"filter must be .*\[convolved, 4\]"):
        linear_convolve(*few, taps[:, :3].contiguous(), None, state, slots[:2])


def test_linear_embed() -> None:
    table = on_gpu(exact(50, 384, seed=1))
    norm = on_gpu(1 + 0.2 * exact(384, seed=7))
    tokens = torch.tensor([3, 49, 0, 50, -1, 3], dtype=torch.int32, device="cuda")
    x, scaled, squares = linear_embed(tokens, table, norm)
    expected = torch.stack(
        [table[3], table[49], table[0], *[torch.zeros_like(table[0])] * 2, table[3]]
    )
    assert torch.equal(x, expected)
    expected_scaled, expected_squares = norm_inputs(x, norm)
    assert torch.equal(scaled, expected_scaled)
    torch.testing.assert_close(squares, expected_squares, rtol=1e-5, atol=1e-5)
    x, scaled, beside_x = linear_embed(tokens, table, None, squares=True)
    assert torch.equal(x, expected) and scaled.numel() == 0 and torch.equal(beside_x, squares)
    x, scaled, squares = linear_embed(tokens, table, None)
    assert torch.equal(x, expected) and scaled.numel() == squares.numel() == 0


def test_neighbours_change_no_bit() -> None:
    for tokens in (8, 24, 64, 100, 300):
        x, squares = normed(tokens, 768)
        assert squares is not None
        weight = on_gpu(exact(1152, 768, seed=1, scale=0.05))
        y = linear_map(x, squares, EPS, weight)
        order = torch.randperm(tokens, device="cuda")
        other = linear_map(x[order].contiguous(), squares[:, order].contiguous(), EPS, weight)
        assert torch.equal(y[order], other)
        x[1:], squares[:, 1:] = torch.nan, torch.nan
        assert torch.equal(linear_map(x, squares, EPS, weight)[0], y[0])


def test_replayed_chain_is_the_eager_one() -> None:
    """Kernels that start before the one ahead of them has ended, in a graph."""
    channels, tokens = 768, 20
    up = on_gpu(exact(3072, channels, seed=1, scale=0.03))
    down = on_gpu(exact(channels, 3072, seed=2, scale=0.02))
    norm = torch.ones(channels, device="cuda", dtype=torch.bfloat16)
    start = on_gpu(exact(tokens, channels, seed=3))
    x = start.clone()

    def chain() -> Tensor:
        scaled, squares = norm_inputs(x, norm)
        for _ in range(6):
            y = linear_map(scaled, squares, EPS, up, gelu=True)
            scaled, squares = linear_residual_(y, down, None, x, norm)
        return scaled

    expected = chain().clone()
    after = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain()
    for _ in range(20):
        x.copy_(start)
        replayed.zero_()
        graph.replay()
        assert torch.equal(replayed, expected) and torch.equal(x, after)


def test_opcheck() -> None:
    channels, tokens = 128, 3
    x, squares = normed(tokens, channels)
    weight = on_gpu(exact(2 * channels, channels, seed=1, scale=0.1))
    bias = on_gpu(exact(2 * channels, seed=3))
    state = torch.zeros(tokens, channels, device="cuda")
    slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
    check, operators = torch.library.opcheck, torch.ops.minserve
    for gelu, logits in ((False, False), (True, False), (False, True)):
        given = (x, squares, EPS, weight, bias, gelu, logits)
        check(operators.linear_map.default, given)
        check(operators.linear_map.default, (*given, True))
    check(operators.linear_step.default, (x, squares, EPS, weight, bias, state, slots, "mingru"))
    of_three = on_gpu(exact(3 * channels, channels, seed=1, scale=0.1))
    gated = (x, squares, EPS, of_three, None, state, slots, "hgrn", False, True, True)
    check(operators.linear_step.default, (*gated, lower_bound_of(channels)))
    check(operators.linear_swiglu.default, (x, squares, EPS, weight, bias))
    for norm in (bias[:channels], None):
        residual = on_gpu(exact(tokens, channels, seed=6))
        given = (x, weight[:channels], bias[:channels], residual, norm)
        check(operators.linear_residual_.default, given)
        check(operators.linear_residual_.default, (*given, False, bias[channels:]))
        check(operators.linear_residual_.default, (*given[:4], None, False, None, True))
        check(operators.linear_residual_.default, (*given, False, None, False, squares, EPS))
        check(operators.linear_embed.default, (slots, weight, norm))
        check(operators.linear_embed.default, (slots, weight, None, True))


def test_bad_arguments_are_told() -> None:
    x, squares = normed(4, 128)
    weight = on_gpu(exact(64, 128, seed=1))
    state = torch.zeros(4, 32, device="cuda")
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    for other in (torch.float32, torch.float16):
        name, given = str(other).removeprefix("torch."), (x.to(other), weight.to(other))
        with pytest.raises(RuntimeError, match=f"x must be bfloat16, got {name}"):
            linear_map(given[0], squares, EPS, given[1])
        with pytest.raises(RuntimeError, match=f"x must be bfloat16, got {name}"):
            linear_step(given[0], squares, EPS, given[1], None, state, slots, "mingru")
        with pytest.raises(RuntimeError, match=f"y must be bfloat16, got {name}"):
            linear_residual_(*given, None, x[:, :64].contiguous(), None)
        with pytest.raises(RuntimeError, match="table must be bfloat16"):
            linear_embed(slots, given[1], None)
    with pytest.raises(RuntimeError, match="weight"):
        linear_map(x, squares, EPS, weight[:, :64].contiguous())
    with pytest.raises(RuntimeError, match="multiple of 8"):
        linear_map(x, squares, EPS, weight[:63])
    with pytest.raises(RuntimeError, match="squares"):
        linear_map(x, squares[:1], EPS, weight)
    with pytest.raises(RuntimeError, match="exclude"):
        linear_map(x, squares, EPS, weight, None, True, True)
    with pytest.raises(RuntimeError, match="2 rows for each"):
        linear_step(x, squares, EPS, weight, None, state[:, :16].contiguous(), slots, "mingru")
    with pytest.raises(RuntimeError, match="has no lower_bound"):
        bound = torch.zeros(32, device="cuda")
        linear_step(x, None, EPS, weight, None, state, slots, "mingru", lower_bound=bound)
    wide = on_gpu(exact(192, 128, seed=1)), None, torch.zeros(4, 64, device="cuda"), slots, "hgrn"
    with pytest.raises(RuntimeError, match=r"lower_bound must be \[channels\] = \[64\]"):
        linear_step(x, None, EPS, *wide, lower_bound=torch.zeros(63, device="cuda"))
    with pytest.raises(RuntimeError, match="lower_bound must begin at a multiple of 16"):
        linear_step(x, None, EPS, *wide, lower_bound=torch.zeros(65, device="cuda")[1:])
    with pytest.raises(RuntimeError, match="channels of the cell hgrn must be a multiple of 64"):
        linear_step(x, None, EPS, wide[0][:96], None, state, slots, "hgrn")
    with pytest.raises(RuntimeError, match="as many rows of gates as of ups"):
        linear_swiglu(x, squares, EPS, weight[:40])
    with pytest.raises(RuntimeError, match="y_squares must be"):
        linear_residual_(
            x, weight, None, x[:, :64].contiguous(), None, y_squares=squares[:1], eps=EPS
        )
    with pytest.raises(RuntimeError, match="multiple of 64"):
        linear_residual_(x, weight[:32], None, x[:, :32].contiguous(), None)
    square = on_gpu(exact(128, 128, seed=1))
    with pytest.raises(RuntimeError, match="share memory"):
        linear_residual_(x, square, None, x, None)
    with pytest.raises(RuntimeError, match="bias must begin at a multiple of 16"):
        bias = torch.zeros(68, device="cuda", dtype=torch.bfloat16)
        linear_map(x, squares, EPS, weight, bias[4:])
    with pytest.raises(RuntimeError, match="norm_weight must begin at a multiple of 16"):
        norm = torch.zeros(132, device="cuda", dtype=torch.bfloat16)[4:]
        linear_residual_(x, square, None, x.clone(), norm)
    with pytest.raises(RuntimeError, match="x must begin at a multiple of 16"):
        flat = torch.zeros(x.numel() + 4, device="cuda", dtype=torch.bfloat16)[4:]
        linear_residual_(x, square, None, flat.view(x.shape), None)
    with pytest.raises(RuntimeError, match="ahead must begin at a multiple of 16"):
        ahead = torch.zeros(132, device="cuda", dtype=torch.bfloat16)[4:]
        linear_residual_(x, square, None, x.clone(), None, ahead=ahead)
    with pytest.raises(RuntimeError, match="ahead must be"):
        linear_residual_(x, square, None, x.clone(), None, ahead=square[0, :64])
    with pytest.raises(RuntimeError, match="x must begin"):
        linear_map(x.flatten()[4:132].view(1, 128), None, EPS, weight)
    with pytest.raises(RuntimeError, match="rows of state must be aligned"):
        flat = torch.zeros(4 * 32 + 1, device="cuda")
        linear_step(x, squares, EPS, weight, None, flat[1:].view(4, 32), slots, "mingru")
    with pytest.raises(RuntimeError, match="rows of state must be aligned"):
        wide = torch.zeros(4, 34, device="cuda")
        linear_step(x, squares, EPS, weight, None, wide[:, :32], slots, "mingru")
    with pytest.raises(NotImplementedError):
        linear_map(x.cpu(), None, EPS, weight.cpu())
