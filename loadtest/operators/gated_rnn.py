"""A layer of GRU or LSTM, its input products included, beside torch.nn's (on a GPU cuDNN's).

A scan's row is `linear` of all tokens and then gru_scan or lstm_scan; a step's row is both products
of one token of every sequence, and gru_step or lstm_step, or for a few rows on a GPU gated_decode.
torch.nn's module computes the same, as a multiple of our time; in float32 without TF32, which cuDNN
would use. Bytes are ideal: x and h once, both matrices once, states in both directions.

The error is that of h against the module in float64, over the first 512 tokens; torch's own stands
in the remarks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.ops import gru_scan, gru_step, lstm_scan, lstm_step
from engine.ops.gated_rnn import decodes, gated_decode
from loadtest.operators.exact import relative_error
from loadtest.operators.limits import Limits
from loadtest.operators.recurrences import measure_recurrence
from loadtest.operators.rows import Row
from loadtest.operators.shapes import ScanShape
from loadtest.timing import graph_seconds_per_call, rotation

CELLS = {"gru": 3, "lstm": 4}  # gates
LAUNCHES = 50  # of a step, in one graph
_COMPARED = 512  # tokens


def traffic(gates: int, tokens: int, sequences: int, units: int, size: int) -> int:
    """Return the ideal bytes of a call; `size`: bytes of a number of x."""
    streams, weights = 2 * tokens * units, 2 * gates * units * (units + 1)
    return (streams + weights) * size + sequences * units * (gates - 2) * 4 * 2


class _Layer:
    """A random layer, and the states of some sequences."""

    def __init__(
        self, cell: str, units: int, sequences: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.cell, self.units = cell, units
        kind: Any = nn.GRU if cell == "gru" else nn.LSTM
        self.module = kind(units, units, batch_first=True).to(device, dtype)
        self.module.flatten_parameters()  # else cuDNN copies the weights at every call
        self.slots = torch.arange(sequences, device=device, dtype=torch.int32)
        self.states = [torch.zeros(sequences, units, device=device) for _ in range(CELLS[cell] - 2)]

    def inputs(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.module.weight_ih_l0, self.module.bias_ih_l0)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W, b, U and c."""
        module = self.module
        return module.weight_ih_l0, module.bias_ih_l0, module.weight_hh_l0, module.bias_hh_l0

    def scan(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Read packed x [tokens, units]."""
        weights = self.module.weight_hh_l0, self.module.bias_hh_l0
        function: Any = gru_scan if self.cell == "gru" else lstm_scan
        h: Tensor = function(self.inputs(x), *weights, cu_seqlens, *self.states, self.slots)
        return h

    def step(self, x: Tensor) -> Tensor:
        """Read one token of every sequence, x [batch, units]."""
        if decodes(x, self.units):
            cell = self.states[1] if len(self.states) > 1 else None
            W, b, U, c = self._weights()
            return gated_decode(x, W, b, U, c, self.states[0], cell, self.slots)
        last = self.states[0].to(x.dtype)
        recurrent = functional.linear(last, self.module.weight_hh_l0, self.module.bias_hh_l0)
        function: Any = gru_step if self.cell == "gru" else lstm_step
        h: Tensor = function(self.inputs(x), recurrent, *self.states, self.slots)
        return h

    def start(self) -> None:
        for state in self.states:
            state.zero_()

    def peer_states(self, x: Tensor) -> Any:
        """The states as torch.nn's modules take them."""
        given = [state.to(x.dtype, copy=True)[None] for state in self.states]
        return given[0] if len(given) == 1 else tuple(given)

    def exact(self, x: Tensor) -> Tensor:
        """h of x [batch, time, units] in float64, from states of zeros."""
        kind: Any = type(self.module)
        wide = kind(self.units, self.units, batch_first=True).to(x.device, torch.float64)
        wide.load_state_dict(self.module.state_dict())
        h: Tensor = wide(x.double())[0]
        return h


def measure_gated_rnn(
    scans: tuple[ScanShape, ...],
    steps: tuple[tuple[int, int], ...],
    dtypes: list[torch.dtype],
    limits: Limits,
) -> list[Row]:
    """Return one row per cell, type and shape, scans before steps; packed shapes are left out."""
    torch.backends.cudnn.allow_tf32 = False
    uniform = tuple(shape for shape in scans if not shape.packed and not shape.behind)
    rows = []
    for cell, gates in CELLS.items():
        rows += measure_recurrence(
            *(cell, uniform, steps, dtypes, limits),
            traffic=partial(traffic, gates),
            fill_scan=partial(_fill_scan, cell),
            fill_step=partial(_fill_step, cell),
        )
    for row in rows:
        row.case = "gated_rnn"
    return rows


def _fill_scan(cell: str, row: Row, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device, (batch, time, units) = limits.device, shape.uniform
    row.ceiling = limits.ceiling
    calls, peers = [], []
    layer = _Layer(cell, units, batch, dtype, device)
    bounds = shape.cu_seqlens(device)
    for _ in range(rotation(row.bytes, device, most=4)):
        x = torch.randn(batch, time, units, device=device).to(dtype)
        calls.append(partial(layer.scan, x.flatten(0, 1), bounds))
        peers.append(partial(_output, layer.module, x))
    layer.start()
    found = calls[0]().view(batch, time, units)[:, :_COMPARED]
    x = peers[0].args[1]
    exact = layer.exact(x[:, :_COMPARED])
    row.error = relative_error(found, exact)
    torchs = relative_error(peers[0]()[:, :_COMPARED], exact)
    row.note = f"torch's error {torchs:.1e}"
    few = device.type == "cpu"  # where a call may take seconds
    how: dict[str, int] = {"repeat": 3} if few else {}
    row.timing = graph_seconds_per_call(calls, device, **how)
    row.times["torch.nn"] = (
        graph_seconds_per_call(peers, device, **how).seconds / row.timing.seconds
    )


def _output(module: nn.Module, x: Tensor, states: Any = None) -> Tensor:
    h: Tensor = module(x, states)[0]
    return h


def _fill_step(
    cell: str, row: Row, shape: tuple[int, int], dtype: torch.dtype, limits: Limits
) -> None:
    device, (batch, units) = limits.device, shape
    row.copy_seconds = limits.copy_seconds(row.bytes, LAUNCHES)
    calls, peers = [], []
    for _ in range(rotation(row.bytes, device, most=LAUNCHES)):
        layer = _Layer(cell, units, batch, dtype, device)
        x = torch.randn(batch, units, device=device).to(dtype)
        calls.append(partial(layer.step, x))
        peers.append(partial(_output, layer.module, x[:, None], layer.peer_states(x)))
    exact = layer.exact(x[:, None])
    row.error = relative_error(calls[-1]()[:, None], exact)
    row.note = f"torch's error {relative_error(peers[-1](), exact):.1e}"
    row.timing = graph_seconds_per_call(calls, device, launches=LAUNCHES)
    peer = graph_seconds_per_call(peers, device, launches=LAUNCHES)
    row.times["torch.nn"] = peer.seconds / row.timing.seconds
