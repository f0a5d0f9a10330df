"""sample_ with torch: opcheck, compile, graphs, layouts, refusals; the same bits on every CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.protocol.sampling_params import SamplingParams
from tests.ops.helpers import DEVICES, int32, same_bits
from tests.ops.sampling_rows import PARAMETERS, Rows, rows_of

ROWS = len(PARAMETERS)


def logits_of(device: str, vocab: int = 300, seed: int = 0, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 2).to(device)


def same_rows(given: Rows, wanted: Rows) -> None:
    for x, y in zip(given.all(), wanted.all(), strict=True):
        same_bits(x, y)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    arguments = (logits_of(device), *rows_of(PARAMETERS, device).all())
    torch.library.opcheck(torch.ops.minserve.draw_.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_equals_eager(device: str) -> None:
    torch.compiler.reset()

    def function(logits: Tensor, *tensors: Tensor) -> Tensor:
        ops.sample_(logits, *tensors)
        return tensors[0] * 2

    given, wanted = rows_of(PARAMETERS, device), rows_of(PARAMETERS, device)
    compiled = torch.compile(function, fullgraph=True)
    for seed in range(2):
        logits = logits_of(device, seed=seed)
        same_bits(compiled(logits, *given.all()), function(logits, *wanted.all()))
    same_rows(given, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [66, 5000, 70_000])
def test_graph_replay_equals_eager(vocab: int) -> None:
    logits, rows = logits_of("cuda", vocab), rows_of(PARAMETERS, "cuda")
    start = rows.copy()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rows.copy().sample(logits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.sample(logits)
    same_rows(rows, start)
    wanted = start.copy()
    for seed in range(3):
        logits.copy_(logits_of("cuda", vocab, seed))
        graph.replay()
        wanted.sample(logits)
        same_rows(rows, wanted)
        assert rows.cursor.tolist() == [seed + 1] * ROWS


@pytest.mark.parametrize("device", DEVICES)
def test_logits_and_parameters_of_any_layout(device: str) -> None:
    logits, wanted = logits_of(device, 61), rows_of(PARAMETERS, device)
    wide = torch.zeros(ROWS, 200, device=device)
    wide[:, 3:64] = logits
    for view in (wide[:, 3:64], logits.T.contiguous().T):
        given = rows_of(PARAMETERS, device)
        for name in ("temperature", "top_k", "top_p", "min_p", "streams", "stop_ids"):
            values = getattr(given, name)
            spread = torch.stack([values, values], dim=-1)[..., 0]
            setattr(given, name, spread)
        fresh = wanted.copy()
        fresh.sample(logits)
        given.sample(view)
        same_rows(given, fresh)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    rows_of([], device).sample(torch.zeros(0, 66, device=device))


def _replaced(rows: Rows, name: str, value: Tensor) -> Rows:
    # A copy to another device would not keep the gaps of a view.
    given = torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=rows.tokens.device
    )
    setattr(rows, name, given.copy_(value))
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.zeros(2, dtype=torch.int64), "tokens must be int32"),
        ("slots", int32(1, 2, 3), "slots must be [rows] = [2]"),
        ("positions", int32(0, 0), "positions must be int64"),
        ("remaining", int32(5, 0, 5, 0)[::2], "remaining is changed in place"),
        ("cursor", int32(), "cursor must be [rows] = [2]"),
        ("out", int32(0, 0), "out must be [steps, rows] = [any, 2]"),
        ("out", torch.zeros(2, 3, dtype=torch.int32).T, "out is changed in place"),
        ("temperature", torch.ones(2, dtype=torch.float64), "temperature must be float32"),
        ("top_k", torch.ones(2, dtype=torch.int64), "top_k must be int32"),
        ("top_p", torch.ones(2), "top_p must be float64"),
        ("min_p", torch.ones(1), "min_p must be [rows] = [2]"),
        ("streams", int32(0, 0), "streams must be int64"),
        ("stop_ids", int32(0, 0), "stop_ids must be [rows, stop ids] = [2, any]"),
    ],
)
def test_bad_arguments_are_refused(device: str, name: str, value: Tensor, message: str) -> None:
    rows = _replaced(rows_of(PARAMETERS[:2], device), name, value)
    before = rows.copy()
    with pytest.raises(RuntimeError) as raised:
        rows.sample(logits_of(device, rows=2))
    assert f"minserve::draw_: {message}" in str(raised.value)
    same_rows(rows, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.ones(2, 5, dtype=torch.bfloat16), "logits must be float32"),
        (torch.ones(5), "logits must be [rows, vocab]"),
        (torch.ones(2, 0), "logits must have a vocabulary of 1 to"),
        (torch.ones(3, 5), "tokens must be [rows] = [3]"),
    ],
)
def test_bad_logits_are_refused(device: str, logits: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        rows_of(PARAMETERS[:2], device).sample(logits.to(device))
    assert f"minserve::draw_: {message}" in str(raised.value)


@pytest.mark.parametrize("cursor", [-1, 3])
def test_cursor_outside_of_out_is_refused_on_the_cpu(cursor: int) -> None:
    rows = rows_of(PARAMETERS[:2])
    rows.cursor[1] = cursor
    before = rows.copy()
    with pytest.raises(RuntimeError) as raised:
        rows.sample(logits_of("cpu", rows=2))
    assert f"cursor must be a row of out, which has 3, got {cursor} at" in str(raised.value)
    same_rows(rows, before)


@pytest.mark.gpu
@pytest.mark.parametrize("cursor", [-1, 3])
def test_cursor_outside_of_out_is_skipped_on_cuda(cursor: int) -> None:
    rows = rows_of(PARAMETERS[:2], "cuda")
    rows.cursor[1] = cursor
    before = rows.copy()
    rows.sample(logits_of("cuda", rows=2))
    assert int(rows.out[0, 0]) >= 0
    for given, old in zip(rows.all(), before.all(), strict=True):
        if given is not rows.out:
            same_bits(given[1], old[1])


def test_threads_change_nothing(threads: None) -> None:
    """On the CPU, with more rows than fit one thread's grain."""
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        rows = rows_of(PARAMETERS)
        rows.sample(logits_of("cpu", 3001))
        results.append(rows)
    same_rows(results[1], results[0])
    same_rows(results[2], results[0])


_WEIGHTS = """
import torch
from engine.protocol.sampling_params import SamplingParams
from tests.ops.sampling_rows import rows_of
rows = rows_of([SamplingParams(temperature=0.8, top_p=0.99, seed=9)] * 64, positions=range(64))
generator = torch.Generator().manual_seed(4)
print(rows.sample(torch.randn(64, 4099, generator=generator) * 3).tolist())
"""


def test_instruction_sets_agree() -> None:
    printed = set()
    for isa in ("generic", "avx2", "avx512"):
        environment = {**os.environ, "MINSERVE_CPU_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", _WEIGHTS],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        printed.add(done.stdout)
    assert len(printed) == 1 and len(printed.pop()) > 200


def test_greedy_rows_draw_nothing_at_random() -> None:
    logits = logits_of("cpu", rows=4)
    rows = [
        rows_of([SamplingParams(temperature=0, seed=seed)] * 4, positions=[seed] * 4)
        for seed in range(3)
    ]
    drawn = {tuple(one.sample(logits).tolist()) for one in rows}
    assert drawn == {tuple(logits.argmax(-1).tolist())}
