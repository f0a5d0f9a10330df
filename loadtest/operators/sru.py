"""SRU: its recurrence alone, and a whole layer beside the `sru` package's and an LSTM's.

The limit beside `sru_scan` and `sru_step` is a copy of as many bytes: u, the highway's input and h
once, states once in each direction, the vectors of the gates once. With v != 0 a scan of few
sequences is slower than that, since its tokens follow one another. A layer is the product W x and
the recurrence; torch.nn.LSTM is cuDNN's on a GPU. A peer that cannot run is told in a line.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.models.sru.config import SruConfig
from engine.models.sru.lm import Layer
from engine.ops import sru_scan, sru_step
from loadtest.operators.exact import channel_sample, relative_error, unpack
from loadtest.operators.limits import Limits
from loadtest.operators.rows import Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape
from loadtest.peers.sru_package import PEERS
from loadtest.timing import graph_seconds_per_call, rotation

LAUNCHES = 50  # of a step, in one graph

Call = partial[Tensor]


def inputs(
    tokens: int, channels: int, seen: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return u, x, weight_c (None: v = 0) and bias."""
    numbers = partial(torch.randn, device=device)
    return (
        numbers(tokens, 3 * channels, dtype=dtype),
        numbers(tokens, channels, dtype=dtype),
        numbers(2 * channels) / 2 if seen else None,
        numbers(2 * channels),
    )


def traffic(tokens: int, sequences: int, channels: int, size: int, seen: bool) -> int:
    """Return the ideal bytes of a recurrence; `size`: bytes of a number of u."""
    return channels * (5 * tokens * size + 8 * sequences + (16 if seen else 8))


def layer_traffic(tokens: int, sequences: int, width: int, size: int) -> int:
    """Return the ideal bytes of a layer: x and h, states, the weight and the gates' vectors."""
    return width * (2 * tokens * size + 8 * sequences + 3 * width * size + 16)


def measure_sru(
    scans: tuple[ScanShape, ...],
    steps: tuple[tuple[int, int], ...],
    dtypes: list[torch.dtype],
    limits: Limits,
) -> list[Row]:
    """Return rows of the recurrence, with v != 0 and v = 0, then of the layer, by type and shape.

    Args:
        scans: shapes of prompts.
        steps: batch and channels of steps.
        dtypes: types of the inputs.
        limits: the device, and what limits it.
    """
    rows: list[Row] = []
    for dtype in dtypes:
        name, size = dtype_name(dtype), dtype.itemsize
        for shape in scans:
            count, channels = len(shape.lengths), shape.channels
            for seen in (True, False):
                operator = "sru_scan" if seen else "sru_scan, v = 0"
                needed = traffic(shape.tokens, count, channels, size, seen)
                rows.append(Row("sru", operator, shape.label, name, needed))
                with reported(rows[-1], limits.device):
                    _fill_scan(rows[-1], shape, seen, dtype, limits)
            needed = layer_traffic(shape.tokens, count, channels, size)
            rows.append(Row("sru", "layer", shape.label, name, needed))
            with reported(rows[-1], limits.device):
                _fill_layer(rows[-1], shape, dtype, limits)
        for batch, channels in steps:
            label = f"{batch}x{channels}"
            needed = traffic(batch, batch, channels, size, True)
            rows.append(Row("sru", "sru_step", label, name, needed))
            with reported(rows[-1], limits.device):
                _fill_step(rows[-1], batch, channels, dtype, limits)
            needed = layer_traffic(batch, batch, channels, size)
            rows.append(Row("sru", "layer, one token", label, name, needed))
            with reported(rows[-1], limits.device):
                _fill_layer_step(rows[-1], batch, channels, dtype, limits)
    return rows


def _fill_scan(row: Row, shape: ScanShape, seen: bool, dtype: torch.dtype, limits: Limits) -> None:
    device, tokens = limits.device, shape.tokens + shape.behind
    row.ceiling = limits.ceiling
    bounds = shape.cu_seqlens(device)
    slots = torch.arange(len(shape.lengths), device=device, dtype=torch.int32)
    calls = []
    for _ in range(rotation(row.bytes, device)):
        state = torch.zeros(len(slots), shape.channels, device=device)
        given = inputs(tokens, shape.channels, seen, dtype, device)
        calls.append(partial(sru_scan, *given, bounds, state, slots))
    row.error = _error(calls[0], shape)
    row.timing = graph_seconds_per_call(calls, device)


def _error(call: Call, shape: ScanShape) -> float:
    """Return the error of h over all tokens of some channels, from states of zeros."""
    u, x, weight_c, bias, bounds, state, slots = call.args
    sample = channel_sample(shape.channels, u.device)
    found = sru_scan(u, x, weight_c, bias, bounds, torch.zeros_like(state), slots)
    parts = [part[: shape.tokens, sample] for part in (*u.split(shape.channels, dim=1), x, found)]
    u0, u1, u2, highway, h = (unpack(part.double(), shape) for part in parts)
    vectors = torch.zeros_like(bias) if weight_c is None else weight_c
    v_f, v_r = (part[sample].double() for part in vectors.chunk(2))
    b_f, b_r = (part[sample].double() for part in bias.chunk(2))
    exact = torch.empty_like(h)
    c = torch.zeros_like(u0[:, 0])
    for t in range(u0.shape[1]):
        f = torch.sigmoid(u1[:, t] + v_f * c + b_f)
        r = torch.sigmoid(u2[:, t] + v_r * c + b_r)
        c = f * c + (1 - f) * u0[:, t]
        exact[:, t] = r * c + (1 - r) * highway[:, t]
    real = unpack(torch.ones_like(parts[0]).double(), shape)  # behind short sequences are zeros
    return relative_error(h, exact * real)


def _fill_step(row: Row, batch: int, channels: int, dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    row.copy_seconds = limits.copy_seconds(row.bytes, LAUNCHES)
    calls = []
    for _ in range(rotation(row.bytes, device, most=LAUNCHES)):
        state = torch.randn(batch, channels, device=device)
        slots = torch.randperm(batch, device=device).int()
        given = inputs(batch, channels, True, dtype, device)
        calls.append(partial(sru_step, *given, state, slots))
    u, x, weight_c, bias, state, slots = calls[0].args
    wide = [one.double() for one in (u, x, weight_c, bias, state)]
    exact = sru_step(*[*wide, slots])
    found = sru_step(u, x, weight_c, bias, state.clone(), slots)
    row.error = float((found.double() - exact).norm() / exact.norm())
    row.timing = graph_seconds_per_call(calls, device, launches=LAUNCHES)


def _layer(width: int, dtype: torch.dtype, device: torch.device) -> Layer:
    config = SruConfig(vocab_size=2, d_model=width, d_embedding=width, n_layers=1)
    layer = Layer(config, 0).eval()
    for name, parameter in layer.named_parameters():
        wide = name == "weight_c"
        parameter.data = parameter.data.to(device, torch.float32 if wide else dtype)
    return layer


def _fill_layer(row: Row, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device, count = limits.device, len(shape.lengths)
    time = shape.tokens // count
    layer = _layer(shape.channels, dtype, device)
    vectors, bounds = layer.vectors(), shape.cu_seqlens(device)
    slots = torch.arange(count, device=device, dtype=torch.int32)
    state = {"cell": torch.zeros(count, shape.channels, device=device)}
    given = [
        torch.randn(shape.tokens + shape.behind, shape.channels, dtype=dtype, device=device)
        for _ in range(rotation(row.bytes, device, most=8))
    ]
    exact = (
        Layer.scan(
            _layer_of(layer, torch.float64),
            *(given[0].double(), {"cell": torch.zeros_like(state["cell"]).double()}),
            *(bounds, slots, vectors.double()),
        )
        if shape.tokens <= 1024
        else None
    )  # the reference reads token by token
    found = layer.scan(given[0], state, bounds, slots, vectors)
    if exact is not None:
        row.error = float((found.double() - exact).norm() / exact.norm())
    row.timing = graph_seconds_per_call(
        [partial(layer.scan, x, state, bounds, slots, vectors) for x in given], device
    )
    if len(set(shape.lengths)) == 1 and not shape.behind:
        _fill_peers(row, [x.view(time, count, -1) for x in given], dtype, device)


def _fill_layer_step(row: Row, batch: int, width: int, dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    layer = _layer(width, dtype, device)
    vectors = layer.vectors()
    slots = torch.arange(batch, device=device, dtype=torch.int32)
    state = {"cell": torch.zeros(batch, width, device=device)}
    given = [
        torch.randn(batch, width, dtype=dtype, device=device)
        for _ in range(rotation(row.bytes, device, most=8))
    ]
    exact = _layer_of(layer, torch.float64).step(
        *(given[0].double(), {"cell": torch.zeros_like(state["cell"]).double()}),
        *(slots, vectors.double()),
    )
    found = layer.step(given[0], state, slots, vectors)
    row.error = float((found.double() - exact).norm() / exact.norm())
    row.timing = graph_seconds_per_call(
        [partial(layer.step, x, state, slots, vectors) for x in given], device, launches=LAUNCHES
    )
    _fill_peers(row, [x.unsqueeze(0) for x in given], dtype, device)


def _layer_of(layer: Layer, dtype: torch.dtype) -> Layer:
    """Return a copy of a layer in another type."""
    weight = layer.input.weight
    copy = _layer(weight.shape[1], dtype, weight.device)
    copy.load_state_dict(layer.state_dict())
    return copy.to(dtype)


def _fill_peers(row: Row, given: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Time the peers that can run, on inputs [time, batch, width]; tell why others cannot."""
    assert row.timing is not None
    for name, make in PEERS.items():
        try:
            peer = make(given[0].shape[2], dtype, device)
            seconds = graph_seconds_per_call([partial(peer, x) for x in given], device).seconds
        except (ImportError, RuntimeError, AttributeError) as error:
            print(f"{name}, {row.shape} {row.dtype}: not measured: {str(error).splitlines()[0]}")
            continue
        row.times[name] = seconds / row.timing.seconds
