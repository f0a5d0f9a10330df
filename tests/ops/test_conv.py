"""conv_scan and conv_step against float64, torch's conv1d, and each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops.conv1d import (
    conv_scan,
    conv_scan_reference,
    conv_step,
    conv_step_reference,
)
from tests.ops.helpers import (
    CELLS,
    DEVICES,
    LENGTHS,
    SERVING_DTYPES,
    channels_for,
    close,
    exact,
    int32,
    same_bits,
)

# Channels one at a time, and several together.
CHANNELS = [37, 64]


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
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_ragged_batches(
    device: str, dtype: torch.dtype, taps: int, channels: int, with_bias: bool
) -> None:
    """Lengths 1 and 2 are shorter than the window: the old inputs move down."""
    cu_seqlens, slots = int32(0, 1, 3, 3, 40, 60, 90), int32(5, 2, 1, 0, -1, 6)
    x, state = exact(95, channels, seed=5), exact(8, taps - 1, channels, seed=6)
    weight, bias = exact(channels, taps, seed=7), exact(channels, seed=8) if with_bias else None
    wanted, wanted_state = conv_scan_reference(x, weight, bias, cu_seqlens, state, slots)
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
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", CHANNELS)
def test_stepping_equals_the_scan_bit_for_bit(
    device: str, dtype: torch.dtype, taps: int, channels: int
) -> None:
    length, batch = 12, 3
    x = exact(batch, length, channels, seed=9).to(device, dtype)
    weight = exact(channels, taps, seed=10).to(device, dtype)
    bias = exact(channels, seed=11).to(device, dtype)
    stepped = exact(5, taps - 1, channels, seed=12).float().to(device)
    scanned, slots = stepped.clone(), int32(4, 0, 2, device=device)
    rows = [conv_step(x[:, t], weight, bias, stepped, slots) for t in range(length)]
    edges = int32(0, length, 2 * length, 3 * length, device=device)
    y = conv_scan(x.reshape(-1, channels), weight, bias, edges, scanned, slots)
    same_bits(y.view(batch, length, channels), torch.stack(rows, dim=1))
    same_bits(scanned, stepped)


@pytest.mark.parametrize("device", DEVICES)
def test_step_equals_its_reference_and_skips_padding(device: str) -> None:
    x, state = exact(4, 5, seed=13), exact(3, 2, 5, seed=14)
    weight, slots = exact(5, 3, seed=15), int32(2, -1, 0, -7)
    wanted, wanted_state = conv_step_reference(x, weight, None, state, slots)
    given = state.float().to(device)
    y = conv_step(x.float().to(device), weight.float().to(device), None, given, slots.to(device))
    close(y, wanted, torch.float32)
    same_bits(given, wanted_state.float())
    assert not y[[1, 3]].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_more_sequences_than_a_block_has_threads(
    device: str, dtype: torch.dtype, taps: int
) -> None:
    """300 short ones, empty and padding ones among them, in no order of slots."""
    lengths = [(7 * s) % 11 if s % 5 else s % 3 for s in range(300)]
    cu_seqlens = int32(0, *torch.tensor(lengths).cumsum(0).tolist())
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(15)).int()
    slots[::17] = -1
    x = exact(sum(lengths) + 9, 40, seed=16)
    weight, bias, state = (
        exact(40, taps, seed=17),
        exact(40, seed=18),
        exact(300, taps - 1, 40, seed=19),
    )
    wanted, wanted_state = conv_scan_reference(x, weight, bias, cu_seqlens, state, slots)
    given = state.float().to(device)
    y = conv_scan(
        x.to(device, dtype),
        weight.to(device, dtype),
        bias.to(device, dtype),
        cu_seqlens.to(device),
        given,
        slots.to(device),
    )
    close(y, wanted, dtype)
    same_bits(given, wanted_state.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("channels", CHANNELS)
def test_silu_of_the_sums(device: str, dtype: torch.dtype, taps: int, channels: int) -> None:
    cu_seqlens, slots = int32(0, 1, 3, 3, 40, 60, 90), int32(5, 2, 1, 0, -1, 6)
    x, state = 4 * exact(95, channels, seed=31), exact(8, taps - 1, channels, seed=32)
    weight, bias = exact(channels, taps, seed=33), exact(channels, seed=34)
    wanted, wanted_state = conv_scan_reference(x, weight, bias, cu_seqlens, state, slots)
    given = [one.to(device, dtype) for one in (x, weight, bias)]
    scanned, stepped, plain = (state.float().to(device) for _ in range(3))
    where = cu_seqlens.to(device), scanned, slots.to(device)
    y = conv_scan(*given, *where, silu=True)
    assert y.dtype == dtype
    close(y, torch.nn.functional.silu(wanted), dtype)
    same_bits(scanned, wanted_state.float())
    assert not y[40:60].any() and not y[90:].any(), "padding rows must be zero"
    rows = torch.tensor([0, 1, 3, 40, 60, 94])
    each = int32(5, -1, 2, 0, 1, 6, device=device)
    stepped_y = conv_step(given[0][rows], *given[1:], stepped, each, silu=True)
    bounds = int32(*range(7), device=device)
    same_bits(conv_scan(given[0][rows], *given[1:], bounds, plain, each, silu=True), stepped_y)
    same_bits(plain, stepped)
    assert not stepped_y[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize(("first", "width"), [(0, 80), (4, 72), (1, 73)])
def test_rows_of_inputs_may_be_apart(
    device: str, dtype: torch.dtype, first: int, width: int
) -> None:
    """64 columns of wider rows, aligned as the rows are or not."""
    room = exact(30, width, seed=35).to(device, dtype)
    apart = room[:, first : first + 64]
    weight = exact(64, 4, seed=36).to(device, dtype)
    edges, slots = int32(0, 1, 3, 28, device=device), int32(2, 0, 4, device=device)
    states = [exact(5, 3, 64, seed=37).float().to(device) for _ in range(2)]
    for silu in (False, True):
        wanted = conv_scan(apart.contiguous(), weight, None, edges, states[0], slots, silu=silu)
        y = conv_scan(apart, weight, None, edges, states[1], slots, silu=silu)
        assert y.is_contiguous()
        same_bits(y, wanted)
        wanted = conv_step(apart[:3].contiguous(), weight, None, states[0], slots, silu=silu)
        same_bits(conv_step(apart[:3], weight, None, states[1], slots, silu=silu), wanted)
    same_bits(states[1], states[0])


def off_by_one(x: Tensor) -> Tensor:
    """The same values, not aligned to more than one of them."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_alignment_changes_no_bit(device: str, dtype: torch.dtype, taps: int) -> None:
    x = torch.randn(200, 264, generator=torch.Generator().manual_seed(20)).to(device, dtype)
    weight, bias = x[:taps].T.contiguous() * 0.3, x[taps].contiguous()
    states = [exact(90, taps - 1, 264, seed=21).float().to(device) for _ in range(4)]
    slots, edges = torch.arange(89, -1, -1).int().to(device), int32(0, 2, 150, 200, device=device)
    slots[7] = -1
    aligned = conv_scan(x, weight, bias, edges, states[0], slots[5:8])
    same_bits(conv_scan(off_by_one(x), weight, bias, edges, states[1], slots[5:8]), aligned)
    same_bits(states[1], states[0])
    aligned = conv_step(x[:90], weight, bias, states[2], slots)
    same_bits(conv_step(x[:90], off_by_one(weight), bias, states[3], slots), aligned)
    same_bits(states[3], states[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_batch_changes_no_bit(device: str, dtype: torch.dtype) -> None:
    """4,097 rows of 512 channels take another way on a GPU than a few, and their number is odd."""
    batch, channels, taps = 4097, 512, 4
    generator = torch.Generator().manual_seed(22)
    x = torch.randn(batch, channels, generator=generator).to(device, dtype)
    weight = torch.randn(channels, taps, generator=generator).to(device, dtype)
    whole = torch.randn(batch, taps - 1, channels, generator=generator).to(device)
    before, parts = whole.clone(), whole.clone()
    slots = torch.randperm(batch, generator=generator).int()
    slots[[5, 2000, 2001]] = -1
    slots = slots.to(device)
    y = conv_step(x, weight, None, whole, slots)
    cuts = [0, 1, 4, 300, 2001, batch]
    pieces = [
        conv_step(x[a:b], weight, None, parts, slots[a:b]) for a, b in itertools.pairwise(cuts)
    ]
    same_bits(torch.cat(pieces), y)
    same_bits(parts, whole)
    real = slots >= 0
    seen = torch.cat([before[slots[real].long()], x[real, None].float()], dim=1).double()
    close(y[real], (seen * weight.double().T).sum(1).cpu(), dtype, factor=8.0)
    same_bits(whole[slots[real].long()], seen[:, 1:].float())
    assert not y[~real].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_one_side_of_a_grid_holds(device: str, dtype: torch.dtype) -> None:
    """70,001 rows and sequences of one token; NaN in padding rows and free slots goes nowhere."""
    batch, channels, taps = 70_001, 8, 4
    generator = torch.Generator().manual_seed(27)
    x = torch.randn(batch, channels, generator=generator).to(dtype)
    weight = torch.randn(channels, taps, generator=generator).to(dtype)
    before = torch.randn(batch, taps - 1, channels, generator=generator)
    slots = torch.randperm(batch, generator=generator).int()
    padding = torch.zeros(batch, dtype=torch.bool)
    padding[[0, 65_535, 65_536, batch - 1]] = True
    x[padding], before[slots[padding].long()] = float("nan"), float("nan")
    slots[padding] = -1
    stepped, scanned = (before.to(device, copy=True) for _ in range(2))
    given = x.to(device), weight.to(device), None
    y = conv_step(*given, stepped, slots.to(device))
    edges = torch.arange(batch + 1, dtype=torch.int32, device=device)
    same_bits(conv_scan(*given, edges, scanned, slots.to(device)), y)
    same_bits(scanned, stepped)
    used = slots[~padding].long()
    window = torch.cat([before[used], x[~padding, None].float()], dim=1)
    close(y[~padding], (window.double() * weight.double().T).sum(1), dtype, factor=8.0)
    wanted = before.clone()
    wanted[used] = window[:, 1:]
    same_bits(stepped, wanted)
    assert not y[padding].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("width", [72, 73])
def test_rows_of_the_state_may_be_apart(device: str, taps: int, width: int) -> None:
    """64 channels of rows of 72 or 73, which keeps their alignment or does not, and a tap more."""
    x, weight = exact(20, 64, seed=28).float().to(device), exact(64, taps, seed=29).float()
    weight, slots = weight.to(device), int32(2, 0, 4, device=device)
    room = exact(5, taps, width, seed=30).float().to(device)
    packed, around = room[:, 1:, :64].contiguous(), room.clone()
    apart = room[:, 1:, :64]
    edges = int32(0, 1, 3, 20, device=device)
    for _ in range(2):
        wanted = conv_scan(x, weight, None, edges, packed, slots)
        same_bits(conv_scan(x, weight, None, edges, apart, slots), wanted)
        wanted = conv_step(x[:3], weight, None, packed, slots)
        same_bits(conv_step(x[:3], weight, None, apart, slots), wanted)
    same_bits(apart, packed)
    around[:, 1:, :64] = packed
    same_bits(room, around)


@pytest.mark.gpu
def test_slots_out_of_range_are_skipped_on_a_gpu() -> None:
    x, weight = exact(4, 64, seed=23).float().cuda(), exact(64, 4, seed=24).float().cuda()
    state = exact(3, 3, 64, seed=25).float().cuda()
    scanned, before = state.clone(), state.clone()
    slots = int32(3, 1, 2_000_000_000, -2_000_000_000, device="cuda")
    y = conv_step(x, weight, None, state, slots)
    edges = int32(0, 1, 2, 3, 4, device="cuda")
    same_bits(conv_scan(x, weight, None, edges, scanned, slots), y)
    same_bits(scanned, state)
    assert not y[[0, 2, 3]].any() and y[1].any()
    same_bits(state[[0, 2]], before[[0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["conv", *CELLS])
@pytest.mark.parametrize("shape", [(1, 768), (64, 768), (1024, 2048)])
def test_steps_read_what_was_written_just_before(name: str, shape: tuple[int, int]) -> None:
    """Steps may be started before what is ahead of them has ended: after kernels, copies and other
    steps, in a graph and out of it, each must see the others' results."""
    batch, channels = shape
    generator = torch.Generator().manual_seed(26)
    gates = CELLS.get(name, 1)
    source = torch.randn(batch, gates * channels, generator=generator).cuda().bfloat16()
    weight = torch.randn(channels, 4, generator=generator).cuda().bfloat16()
    order = torch.randperm(batch, generator=generator).int().cuda()
    rows = (batch, 3, channels) if name == "conv" else (batch, channels)
    first_state = torch.rand(rows, generator=generator).cuda()
    state, slots = torch.empty_like(first_state), torch.zeros_like(order)
    fed = torch.zeros_like(source)

    def step(x: Tensor) -> Tensor:
        if name == "conv":
            return conv_step(x, weight, None, state, slots)
        stepped: Tensor = getattr(ops, f"{name}_step")(x, state, slots)
        return stepped

    def settled() -> None:
        if not torch.cuda.is_current_stream_capturing() and slowly:
            torch.cuda.synchronize()

    def chain() -> Tensor:
        state.copy_(first_state)
        slots.copy_(order)
        fed.copy_(source)
        outputs = []
        for turn in range(6):
            settled()
            h = step(fed)  # after a copy
            settled()
            outputs += [h, step(fed)]  # after a step that wrote the state
            settled()
            if turn % 2:
                torch.mul(outputs[-1].repeat(1, gates), 0.5, out=fed)
            else:
                fed.copy_(outputs[-1].repeat(1, gates))
            slots.copy_(slots.flip(0))
        return torch.stack(outputs)

    slowly = True
    wanted, wanted_state = chain(), state.clone()
    slowly = False
    for _ in range(3):
        same_bits(chain(), wanted)
        same_bits(state, wanted_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for _ in range(3):
        result.fill_(float("nan"))
        graph.replay()
        same_bits(result, wanted)
        same_bits(state, wanted_state)
