"""GRU and LSTM: scans and steps against float64 and against torch.nn's modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from engine import ops
from engine.ops import gated_rnn
from tests.ops.helpers import DEVICES, SERVING_DTYPES, exact, int32, same_bits

GATES = {"gru": 3, "lstm": 4}
LENGTHS, SLOTS = (5, 0, 17, 3, 1, 30, 2, 9, 4), (3, 1, 0, -1, 4, 9, 2, 7, 8)
ROWS, TAIL = 11, 3
# Of a state after some dozens of steps; what U multiplies is rounded to two bytes at each.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}

cells = pytest.mark.parametrize("kind", ["gru", "lstm"])
devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", SERVING_DTYPES)


@pytest.fixture(params=["library", "composed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with the library's operators and with the composed ones."""
    if request.param == "composed":
        monkeypatch.setattr(gated_rnn, "_is_composed", lambda pre: True)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Case:
    """What a scan of some sequences is given, float64 numbers that every dtype holds."""

    def __init__(
        self,
        kind: str,
        units: int,
        lengths: tuple[int, ...] = LENGTHS,
        slots: tuple[int, ...] = SLOTS,
        *,
        bias: bool = True,
        tail: int = TAIL,
        seed: int = 0,
    ) -> None:
        wide = GATES[kind] * units
        self.kind, self.units, self.lengths = kind, units, lengths
        self.pre = exact(sum(lengths) + tail, wide, seed=seed + 1)
        self.weight = exact(wide, units, seed=seed + 2, scale=units**-0.5)
        self.bias = exact(wide, seed=seed + 3, scale=0.5) if bias else None
        self.cu_seqlens = int32(*itertools.accumulate(lengths, initial=0))
        self.slots = int32(*slots)
        rows = max(ROWS, *(slot + 1 for slot in slots))
        self.hidden = exact(rows, units, seed=seed + 4, scale=0.5)
        self.cell = exact(rows, units, seed=seed + 5, scale=0.5) if kind == "lstm" else None

    def states(self, device: str) -> list[Tensor]:
        given = [self.hidden] if self.cell is None else [self.hidden, self.cell]
        return [state.float().to(device) for state in given]

    def scan(
        self, device: str, dtype: torch.dtype, states: list[Tensor], **other: Tensor
    ) -> Tensor:
        made: dict[str, Callable[[], Tensor | None]] = {
            "pre": lambda: self.pre.to(device, dtype),
            "weight": lambda: self.weight.to(device, dtype),
            "bias": lambda: None if self.bias is None else self.bias.to(device, dtype),
            "cu_seqlens": lambda: self.cu_seqlens.to(device),
            "slots": lambda: self.slots.to(device),
        }
        # What is given is not made: nothing may be copied to a GPU while a graph is captured.
        given = {name: other[name] if name in other else make() for name, make in made.items()}
        slots = given.pop("slots")
        function: Any = ops.gru_scan if self.kind == "gru" else ops.lstm_scan
        return function(*given.values(), *states, slots)  # type: ignore[no-any-return]

    def wanted(self) -> tuple[Tensor, list[Tensor]]:
        h, hidden, cell = gated_rnn.scan_reference(
            *(self.pre, self.weight, self.bias, self.cu_seqlens, self.hidden, self.cell, self.slots)
        )
        return h, [hidden] if cell is None else [hidden, cell]


def step(kind: str, pre: Tensor, recurrent: Tensor, states: list[Tensor], slots: Tensor) -> Tensor:
    function: Any = ops.gru_step if kind == "gru" else ops.lstm_step
    return function(pre, recurrent, *states, slots)  # type: ignore[no-any-return]


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@cells
@devices
@dtypes
@pytest.mark.parametrize("units", [1, 8, 17, 40, 100, 264])
def test_ragged_batches(form: str, kind: str, device: str, dtype: torch.dtype, units: int) -> None:
    case = Case(kind, units, bias=units != 17)
    h, states = case.wanted()
    held = case.states(device)
    before = [state.clone() for state in held]
    got = case.scan(device, dtype, held)
    assert got.dtype == dtype
    near(got, h, dtype)
    ends = case.cu_seqlens.tolist()
    assert not got[ends[3] : ends[4]].any() and not got[ends[-1] :].any(), "padding must be zero"
    for state, first, want in zip(held, before, states, strict=True):
        near(state, want, dtype)
        same_bits(state[[1, 5, 6, 10]], first[[1, 5, 6, 10]].cpu())  # empty and free: untouched


@cells
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("sequences", [1, 9, 33, 70])
@pytest.mark.parametrize("units", [72, 512, 1000])
@pytest.mark.gpu
def test_sizes_on_a_gpu(kind: str, dtype: torch.dtype, sequences: int, units: int) -> None:
    """Every kernel: few and many sequences, the weight in shared memory and not."""
    lengths = tuple(40 if n == 2 % sequences else 7 * n % 13 for n in range(sequences))
    slots = tuple(-1 if n % 11 == 5 else n for n in range(sequences))
    case = Case(kind, units, lengths, slots)
    h, states = case.wanted()
    held = case.states("cuda")
    near(case.scan("cuda", dtype, held), h, dtype)
    for state, want in zip(held, states, strict=True):
        near(state, want, dtype)


@cells
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequences", [2, 40])
@pytest.mark.gpu
def test_weights_beyond_shared_memory(kind: str, dtype: torch.dtype, sequences: int) -> None:
    case = Case(kind, 2600, (3,) * sequences, tuple(range(sequences)))
    h, _ = case.wanted()
    near(case.scan("cuda", dtype, case.states("cuda")), h, dtype)


@cells
@devices
@dtypes
def test_long_sequences(kind: str, device: str, dtype: torch.dtype) -> None:
    case = Case(kind, 24, (1500, 300), (1, 0))
    h, _ = case.wanted()
    near(case.scan(device, dtype, case.states(device)), h, dtype)


@cells
@devices
def test_torchs_modules_give_the_same(form: str, kind: str, device: str) -> None:
    torch.manual_seed(0)
    module: Any = (nn.GRU if kind == "gru" else nn.LSTM)(12, 20, batch_first=True)
    x = torch.randn(3, 19, 12)
    with torch.no_grad():
        want, _ = module(x)
        pre = nn.functional.linear(x, module.weight_ih_l0, module.bias_ih_l0).flatten(0, 1)
    states = [torch.zeros(3, 20, device=device) for _ in range(GATES[kind] - 2)]
    function: Any = ops.gru_scan if kind == "gru" else ops.lstm_scan
    got = function(
        *(pre.to(device), module.weight_hh_l0.detach().to(device)),
        *(module.bias_hh_l0.detach().to(device), int32(0, 19, 38, 57, device=device)),
        *(*states, int32(2, 0, 1, device=device)),
    )
    torch.testing.assert_close(got.cpu().view(3, 19, 20), want, rtol=1e-5, atol=2e-6)


@cells
@devices
@dtypes
@pytest.mark.parametrize("units", [17, 72])
def test_no_split_changes_a_bit(kind: str, device: str, dtype: torch.dtype, units: int) -> None:
    case = Case(kind, units)
    held = case.states(device)
    whole = case.scan(device, dtype, held)
    edges = case.cu_seqlens.tolist()
    for split in (1, 2, 8):
        parts, now = torch.zeros_like(whole), case.states(device)
        for early in (True, False):
            rows: list[int] = []
            ends = [0]
            for begin, end in itertools.pairwise(edges):
                middle = min(begin + split, end)
                rows += range(begin, middle) if early else range(middle, end)
                ends.append(len(rows))
            parts[rows] = case.scan(
                *(device, dtype, now),
                pre=case.pre[rows].to(device, dtype),
                cu_seqlens=int32(*ends, device=device),
            )
        same_bits(parts, whole.cpu())
        for state, want in zip(now, held, strict=True):
            same_bits(state, want.cpu())


@cells
@devices
@dtypes
def test_other_sequences_change_no_bit(kind: str, device: str, dtype: torch.dtype) -> None:
    """One alone has the bits that it has among seventy, whatever these hold."""
    lengths, slots = tuple(n % 5 + 2 for n in range(70)), tuple(range(70))
    case = Case(kind, 72, lengths, slots)
    held = case.states(device)
    whole = case.scan(device, dtype, held)
    case.pre[: case.cu_seqlens[41]] = torch.nan
    for count in (1, 9, 29):
        first, last = 41, 41 + count
        edges = case.cu_seqlens[first : last + 1]
        alone = case.states(device)
        got = case.scan(
            *(device, dtype, alone),
            pre=case.pre[edges[0] : edges[-1]].to(device, dtype),
            cu_seqlens=(edges - edges[0]).to(device),
            slots=case.slots[first:last].to(device),
        )
        same_bits(got, whole[edges[0] : edges[-1]].cpu())
        same_bits(alone[0][first:last], held[0][first:last].cpu())
    beside = case.states(device)
    among_nan = case.scan(device, dtype, beside)
    same_bits(among_nan[case.cu_seqlens[41] :], whole[case.cu_seqlens[41] :].cpu())
    assert among_nan[: case.cu_seqlens[41]].isnan().all()


@cells
@dtypes
def test_any_number_of_threads(
    kind: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    case = Case(kind, 200)
    results = []
    for count in (1, 2, 3):
        threads(count)
        held = case.states("cpu")
        results.append([case.scan("cpu", dtype, held), *held])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            same_bits(got, want)


@cells
@devices
@dtypes
@pytest.mark.parametrize("units", [1, 17, 72])
def test_steps(form: str, kind: str, device: str, dtype: torch.dtype, units: int) -> None:
    slots = (4, 0, -1, 11, 7, 3, -5, 2, 9)
    case = Case(kind, units, (1,) * len(slots), slots, tail=0)
    other = exact(len(slots), GATES[kind] * units, seed=9)
    states = [case.hidden] if case.cell is None else [case.hidden, case.cell]
    wanted = [state.clone() for state in states]
    h = step(kind, case.pre, other, wanted, case.slots)  # float64: composed
    held = case.states(device)
    got = step(
        kind, case.pre.to(device, dtype), other.to(device, dtype), held, case.slots.to(device)
    )
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.cpu().double(), h, rtol={torch.float32: 2e-6}.get(dtype, 2.0**-8), atol=2e-6
    )
    assert not got[[2, 6]].any()
    for state, want, first in zip(held, wanted, states, strict=True):
        near(state, want, torch.float32)
        same_bits(state[[1, 5, 6, 8, 10]], first[[1, 5, 6, 8, 10]].float())


@cells
@devices
def test_a_step_continues_a_scan(kind: str, device: str) -> None:
    """In float32 to rounding, with the product by torch."""
    case = Case(kind, 40)
    held = case.states(device)
    case.scan(device, torch.float32, held)
    stepped = [state.clone() for state in held]
    slots = [slot for slot in SLOTS if slot >= 0]
    more = Case(kind, 40, (1,) * len(slots), tuple(slots), tail=0, seed=50)
    assert case.bias is not None
    weight, bias = case.weight.float().to(device), case.bias.float().to(device)
    recurrent = nn.functional.linear(stepped[0][slots], weight, bias)
    got = step(kind, more.pre.float().to(device), recurrent, stepped, more.slots.to(device))
    want = more.scan(device, torch.float32, held, weight=weight, bias=bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stepped[0], held[0], rtol=1e-5, atol=1e-6)


@cells
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "units"), [(8, 8), (40, 72), (72, 264), (1024, 1024), (2096, 2000)]
)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.gpu
def test_decode_steps_with_their_products(
    kind: str, dtype: torch.dtype, width: int, units: int, batch: int
) -> None:
    slots = int32(*(4, -1, 0, 11, 7, 3, 5, 2)[:batch])
    case = Case(kind, units, (1,) * batch, tuple(slots.tolist()), tail=0)
    x, input_bias = exact(batch, width, seed=7), exact(GATES[kind] * units, seed=8, scale=0.5)
    input_weight = exact(GATES[kind] * units, width, seed=9, scale=width**-0.5)
    case.pre = nn.functional.linear(x, input_weight, input_bias)
    h, states = case.wanted()
    held = case.states("cuda")
    before = [state.clone() for state in held]
    assert case.bias is not None
    given = [one.to("cuda", dtype) for one in (x, input_weight, input_bias, case.weight, case.bias)]
    assert gated_rnn.decodes(given[0], units)
    cell = held[1] if kind == "lstm" else None
    rows = slots.cuda()
    decode: Any = gated_rnn.gated_decode
    got = decode(*given, held[0], cell, rows)
    near(got, h, dtype)
    for state, want in zip(held, states, strict=True):
        near(state, want, dtype)
    # The same in a graph, and of a row alone.
    for state, first in zip(held, before, strict=True):
        state.copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(*given, held[0], cell, rows)
    graph.replay()
    same_bits(captured, got.cpu())
    last = [state.clone() for state in before]
    alone = decode(
        *(given[0][-1:], *given[1:], last[0], last[1] if kind == "lstm" else None, rows[-1:])
    )
    same_bits(alone, got[-1:].cpu())


@cells
@devices
def test_saturated_gates_and_small_states(kind: str, device: str) -> None:
    """Gates far out are 0 or 1, and tanh of small numbers keeps its relative accuracy."""
    case = Case(kind, 8, (40,), (0,), tail=0)
    case.pre[:] = torch.linspace(-120, 120, 40, dtype=torch.float64)[:, None]
    case.pre[::3] = 1e-4
    case.pre = case.pre.float().double()
    h, states = case.wanted()
    held = case.states(device)
    torch.testing.assert_close(
        case.scan(device, torch.float32, held).cpu().double(), h, rtol=1e-5, atol=1e-6
    )
    for state, want in zip(held, states, strict=True):
        torch.testing.assert_close(state.cpu().double(), want, rtol=1e-5, atol=1e-6)
    tiny = torch.full((1, GATES[kind] * 8), 1e-6, device=device)
    rows = [torch.zeros(1, 8, device=device) for _ in held]
    got = step(kind, tiny, torch.zeros_like(tiny), rows, int32(0, device=device))
    share = 0.5 if kind == "gru" else 0.25
    torch.testing.assert_close(got, torch.full_like(got, share * 1e-6), rtol=1e-5, atol=0)


@cells
@devices
@dtypes
def test_rows_may_lie_apart(kind: str, device: str, dtype: torch.dtype) -> None:
    """Of pre, recurrent and the states; nothing beside them is written."""
    case = Case(kind, 12)
    wide = GATES[kind] * 12
    pre = case.pre.to(device, dtype)
    room = torch.full((len(pre), wide + 5), float("nan"), device=device, dtype=dtype)
    room[:, 5:] = pre
    plain = case.states(device)
    apart = [torch.full((len(plain[0]), 2, 12), 9.0, device=device) for _ in plain]
    for both, state in zip(apart, plain, strict=True):
        both[:, 0] = state
    views = [both[:, 0] for both in apart]
    same_bits(
        case.scan(device, dtype, views, pre=room[:, 5:]), case.scan(device, dtype, plain).cpu()
    )
    count = len(SLOTS)
    recurrent = exact(count, wide, seed=9).to(device, dtype)
    beside = torch.cat([recurrent, recurrent], dim=1)[:, wide:]
    slots = case.slots.to(device)
    same_bits(
        step(kind, room[:count, 5:], beside, views, slots),
        step(kind, pre[:count], recurrent, plain, slots).cpu(),
    )
    for both, state in zip(apart, plain, strict=True):
        same_bits(both[:, 0], state.cpu())
        assert (both[:, 1] == 9.0).all()


@cells
@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_biases_beside_two_bytes(kind: str, device: str, dtype: torch.dtype) -> None:
    case = Case(kind, 24)
    states = [case.states(device) for _ in range(2)]
    assert case.bias is not None
    same_bits(
        case.scan(device, dtype, states[0], bias=case.bias.float().to(device)),
        case.scan(device, dtype, states[1]).cpu(),
    )


@cells
@devices
def test_nothing_to_read(kind: str, device: str) -> None:
    for lengths, slots, tail in (((), (), 3), ((0, 0), (1, 0), 0), ((4,), (-1,), 0)):
        case = Case(kind, 8, lengths, (*slots, 0)[: len(slots)] or (), tail=tail) if slots else None
        if case is None:
            case = Case(kind, 8, (0,), (0,), tail=tail)
            case.cu_seqlens, case.slots = int32(0), int32()
        held = case.states(device)
        before = [state.clone() for state in held]
        got = case.scan(device, torch.float32, held)
        assert got.shape == (sum(lengths) + tail, 8) and not got.any()
        for state, first in zip(held, before, strict=True):
            same_bits(state, first.cpu())


@cells
@dtypes
@pytest.mark.gpu
def test_graphs(kind: str, dtype: torch.dtype) -> None:
    """A captured scan and step read today's numbers, bounds and slots at every replay."""
    case = Case(kind, 136)
    device, wide = "cuda", GATES[kind] * 136
    held = case.states(device)
    pre, slots = case.pre.to(device, dtype), case.slots.to(device)
    bounds, weight = case.cu_seqlens.to(device), case.weight.to(device, dtype)
    assert case.bias is not None
    bias = case.bias.to(device, dtype)
    one, recurrent = pre[: len(slots)].clone(), exact(len(slots), wide, seed=9).to(device, dtype)

    def both() -> tuple[Tensor, Tensor]:
        given = {"pre": pre, "weight": weight, "bias": bias, "cu_seqlens": bounds, "slots": slots}
        return case.scan(device, dtype, held, **given), step(kind, one, recurrent, held, slots)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for shift in (0, 1):
        bounds.copy_(int32(*itertools.accumulate(LENGTHS[shift:] + LENGTHS[:shift], initial=0)))
        slots.copy_(slots.roll(shift))
        for state, first in zip(held, case.states(device), strict=True):
            state.copy_(first)
        graph.replay()
        results = [one.clone() for one in (*captured, *held)]
        for state, first in zip(held, case.states(device), strict=True):
            state.copy_(first)
        for got, want in zip(results, (*both(), *held), strict=True):
            same_bits(got, want.cpu())


@cells
@devices
def test_compiled_and_fake(kind: str, device: str) -> None:
    case = Case(kind, 8)
    plain, compiled = case.states(device), case.states(device)
    want = case.scan(device, torch.float32, plain)
    function = torch.compile(
        lambda *states: case.scan(device, torch.float32, list(states)) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    same_bits(function(*compiled) / 2, want.cpu())
    same_bits(compiled[0], plain[0].cpu())
    with FakeTensorMode():
        states = [torch.empty(3, 8, device=device) for _ in plain]
        wide = torch.empty(5, GATES[kind] * 8, device=device)
        slots = torch.empty(5, dtype=torch.int32, device=device)
        assert step(kind, wide, wide, states, slots).shape == (5, 8)


@cells
def test_schemas_hold(kind: str) -> None:
    case = Case(kind, 8)
    given = (case.pre.float(), case.weight.float(), None, case.cu_seqlens)
    scan = getattr(torch.ops.minserve, f"{kind}_scan").default
    one = getattr(torch.ops.minserve, f"{kind}_step").default
    torch.library.opcheck(scan, (*given, *case.states("cpu"), case.slots))
    rows = case.pre[: len(SLOTS)].float()
    torch.library.opcheck(one, (rows, rows.clone(), *case.states("cpu"), case.slots))


@cells
@devices
def test_errors_say_what_is_allowed(kind: str, device: str) -> None:
    gates = GATES[kind]
    case = Case(kind, 8)

    def scan(message: str, **other: Any) -> None:
        states = other.pop("states", case.states(device))
        with pytest.raises(RuntimeError, match=message):
            case.scan(device, torch.float32, states, **other)

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, device=device, dtype=dtype)

    rows = len(case.pre)
    scan(rf"pre must be \[tokens, {gates} \* units\]", pre=of(rows, gates * 8 + 1))
    scan(r"pre must be \[tokens", pre=of(rows))
    scan("pre must be float32, bfloat16 or float16", pre=of(rows, gates * 8, dtype=torch.int64))
    scan(rf"weight must be \[{gates} \* units, units\]", weight=of(gates * 8, 9))
    scan("weight must be float32", weight=of(gates * 8, 8, dtype=torch.bfloat16))
    scan("bias must be float32 or have the dtype of pre", bias=of(gates * 8, dtype=torch.float16))
    scan("bias must be", bias=of(gates * 8 - 1))
    scan("cu_seqlens must be int32", cu_seqlens=case.cu_seqlens.long().to(device))
    scan("slots must be", slots=int32(0, 1, device=device))
    states = case.states(device)
    scan("hidden must be float32", states=[states[0].bfloat16(), *states[1:]])
    scan("hidden is changed in place", states=[states[0].T.contiguous().T, *states[1:]])
    if kind == "lstm":
        scan("cell must be", states=[states[0], states[1][:-1]])
    one = case.pre[: len(SLOTS)].float().to(device)
    with pytest.raises(RuntimeError, match=r"recurrent must be \[batch"):
        step(kind, one, one[:-1], states, case.slots.to(device))
    if device == "cpu":
        scan("slots must be below the 11 rows", slots=case.slots + 3)
        scan("cu_seqlens must not fall", cu_seqlens=case.cu_seqlens.flip(0) - case.cu_seqlens[-1])
