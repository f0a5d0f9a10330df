"""The textbook's scans equal the recurrence in float64, and do the work that they state."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loadtest import kernels
from loadtest.operators import references
from loadtest.operators.limits import Limits
from loadtest.operators.shapes import CUDA_REFERENCE, parse_scan, select
from loadtest.peers import linrec, scans
from loadtest.peers.textbook import brent_kung, chunked, heinsen, kogge_stone, sequential
from loadtest.peers.textbook.work import Work

CPU = torch.device("cpu")
LENGTHS = [1, 2, 3, 7, 8, 100, 1000, 1023]
LINEAR = {
    "sequential": sequential,
    "chunked": chunked,
    "Kogge-Stone": kogge_stone,
    "Brent-Kung": brent_kung,
}
TEXTBOOK = [peer for peer in scans.REFERENCES if peer.work is not None]


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    h = torch.zeros_like(b)
    state = torch.zeros_like(b[:, 0])
    for t in range(b.shape[1]):
        state = a[:, t] * state + b[:, t]
        h[:, t] = state
    return h


def draw(time: int, dtype: torch.dtype, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(time)
    a, b = (torch.rand(2, time, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = 0.01 + 0.98 * a, 0.01 + b
    if signed:
        a = a.copysign(torch.randn(a.shape, generator=generator))
        b = b.copysign(torch.randn(b.shape, generator=generator))
    return a.to(dtype), b.to(dtype)


def run(peer: scans.Peer, a: Tensor, b: Tensor) -> Tensor:
    return peer.finish(peer.make()(*peer.prepare(a, b)))


@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("peer", TEXTBOOK, ids=lambda peer: peer.name)
def test_every_scan_is_the_recurrence(peer: scans.Peer, time: int) -> None:
    for signed in (False,) if peer.positive else (False, True):
        a, b = draw(time, torch.float64, signed=signed)
        given = a.clone(), b.clone()
        found = run(peer, a, b)
        assert found.dtype == torch.float64 and found.shape == b.shape
        torch.testing.assert_close(found, recurrence(a, b), rtol=1e-9, atol=1e-9)
        assert torch.equal(a, given[0]) and torch.equal(b, given[1])
        assert found.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("peer", TEXTBOOK, ids=lambda peer: peer.name)
def test_every_scan_computes_in_the_type_of_its_inputs(
    peer: scans.Peer, dtype: torch.dtype
) -> None:
    a, b = draw(100, dtype)
    found = run(peer, a, b)
    assert found.dtype == dtype
    limit = 1e-4 if dtype == torch.float32 else 0.1
    if dtype == torch.bfloat16 and peer.positive:
        limit = 10  # eight bits do not hold a sum of a hundred logarithms
    assert (found.double() - recurrence(a.double(), b.double())).abs().max() < limit


@pytest.mark.parametrize("name", list(LINEAR))
def test_zeros_and_small_numbers_are_no_trouble_but_in_log_space(name: str) -> None:
    a, b = draw(1000, torch.float32)
    a[:, 99::100] = 0
    torch.testing.assert_close(LINEAR[name].scan(a, b), recurrence(a, b), rtol=1e-4, atol=1e-4)
    assert heinsen.positive(a, b).isnan().any() and heinsen.general(a, b).isnan().any()
    a = a * 1e-4 + 1e-6
    exact = recurrence(a.double(), b.double())
    linear, log_space = (
        float((scan(a, b) - exact).abs().max()) for scan in (LINEAR[name].scan, heinsen.positive)
    )
    assert linear < 1e-6 < 1e-4 < log_space


# Operator -> its multiply-adds and functions for a number of the result.
KNOWN = {
    "addcmul": (1, 0),
    "addcmul_": (1, 0),
    "mul": (1, 0),
    "mul_": (1, 0),
    "add": (1, 0),
    "sub": (1, 0),
    "cumsum": (1, 0),
    "logcumsumexp": (1, 2),
    "log": (0, 1),
    "exp": (0, 1),
    "clone": (0, 0),
    "copy_": (0, 0),
    "_to_copy": (0, 0),
}


class Counter(TorchDispatchMode):
    """Counts what operators do; they must be ones whose work is known here."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = self.functions = self.accesses = self.kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in ("empty_like", "detach", "view_as_real"):
            return result
        if result.numel() == 0:  # nothing is launched
            return result
        reads = [x for x in args if isinstance(x, Tensor)]
        if name == "copy_":
            reads = reads[1:]
        multiply_adds, functions = KNOWN[name]
        self.multiply_adds += multiply_adds * numbers(result)
        self.functions += functions * numbers(result)
        self.accesses += sum(map(numbers, reads)) + numbers(result)
        self.kernels += 1
        return result


def numbers(x: Tensor) -> int:
    return x.numel() * (2 if x.is_complex() else 1)


@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("peer", TEXTBOOK, ids=lambda peer: peer.name)
def test_a_scan_does_the_work_that_it_states(peer: scans.Peer, time: int) -> None:
    assert peer.work is not None
    a, b = (torch.rand(1, time, 1) for _ in range(2))
    scan, inputs = peer.make(), peer.prepare(a, b)
    with Counter() as counter:
        scan(*inputs)
    stated = peer.work(time)
    found = Work(
        counter.multiply_adds, counter.functions, counter.accesses, counter.kernels, stated.depth
    )
    assert found == stated


def test_work_and_depth_are_the_textbooks() -> None:
    time, levels = 1024, 10
    assert sequential.work(time).multiply_adds == sequential.work(time).depth == time - 1
    stated = kogge_stone.work(time)
    combined = time * levels - time + 1
    products = combined - (time - 1)  # those up to the first token, and the last step's, left out
    assert stated.depth == levels and stated.multiply_adds == combined + products
    stated = brent_kung.work(time)
    assert stated.depth == 2 * levels - 1
    # 2 n - 2 - log2(n) combinations, and the products on the way up alone.
    products = time - 1 - levels
    assert stated.multiply_adds == 2 * time - 2 - levels + products
    stated = chunked.work(time)
    assert stated.depth == 2 * 32 - 1 and stated.multiply_adds < 3 * time
    for work in (kogge_stone.work, brent_kung.work, chunked.work, sequential.work):
        assert work(1).depth == work(1).multiply_adds == 0
    assert kogge_stone.work(1025).depth == levels + 1


def limits() -> Limits:
    return Limits(CPU, 1 << 20)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.timing.last_level_cache", lambda: 1000)
    monkeypatch.setattr("loadtest.operators.limits.copy_bandwidth", lambda device, size: 1e10)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def test_the_case_tells_time_error_and_work(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = ["--device", "cpu", "--cases", "scans", "--json", str(path)]
    assert kernels.main([*options, "--shapes", "2x300x24", "varlen3x40x24", "1x50x24"]) == 0
    rows = json.loads(path.read_text())["rows"]
    names = ["minserve linear_scan", *(peer.name for peer in TEXTBOOK)]
    kinds = ["", *references.HARD]
    assert [(row["shape"], row["inputs"], row["operator"]) for row in rows] == [
        (shape, kind, name)
        for shape, kind in [*(("2x300x24", kind) for kind in kinds), ("1x50x24", "")]
        for name in names
    ] + [(shape, "", name) for shape in ("2x300x24", "1x50x24") for name in names]
    assert {row["dtype"] for row in rows if row["inputs"]} == {"float32"}
    for row in rows:
        log_space = row["operator"].startswith("Heinsen")
        if row["inputs"] == "signed" and row["operator"] == "Heinsen, positive":
            assert row["note"] == "skipped: positive numbers only" and row["timing"] is None
        elif row["inputs"] == "zeros in a" and log_space:
            assert row["note"] == "the result is not finite" and row["timing"] is None
            assert math.isnan(row["largest_error"])
        else:
            assert row["note"] == "" and row["rate"] > 0 and row["elementwise"] > 0
            limit = {"float32": 1e-4, "bfloat16": 0.5}[row["dtype"]]
            assert log_space or row["largest_error"] < limit, row
        assert (row["work"] is None) == (row["operator"] == "minserve linear_scan")
    printed = capsys.readouterr().out
    for text in ("largest error", "multiply-adds", "accesses", "depth", "zeros in a"):
        assert text in printed


def test_default_shapes_have_every_length_and_batch() -> None:
    shapes = select(None, torch.device("cuda"), quick=False).reference_scans
    assert [shape.label for shape in shapes] == CUDA_REFERENCE
    assert {shape.uniform[:2] for shape in shapes} >= {
        (batch, time) for batch in (1, 64) for time in (512, 4096, 65536)
    }
    assert any(shape.uniform[1] & (shape.uniform[1] - 1) for shape in shapes)
    on_cpu = select(None, CPU, quick=False).reference_scans
    assert on_cpu and max(shape.elements for shape in on_cpu) < 2**21


def test_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(references, "available_memory", lambda device: 0)
    shape = parse_scan("1x50x24")
    assert shape is not None
    rows = references.measure_references((shape,), [torch.float32], limits())
    assert all(row.note.startswith(("skipped: needs", "skipped: positive")) for row in rows)


def test_packages_that_are_absent_are_said(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setitem(sys.modules, "accelerated_scan", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    absent = [peer for peer in scans.REFERENCES if peer.cuda_only]
    assert [peer.name for peer in absent] == ["accelerated-scan triton", "linrec triton"]
    monkeypatch.setattr(references, "available", lambda device, peers: absent)
    shape = parse_scan("1x50x24")
    assert shape is not None
    rows = references.measure_references((shape,), [torch.float32], limits())
    notes = {row.operator: row.note for row in rows if row.operator != "minserve linear_scan"}
    assert list(notes) == [peer.name for peer in absent]
    assert all(note.startswith("not installed: ") for note in notes.values())


MODULES: dict[str, Callable[[Path], Path]] = {
    "linrec": lambda root: root / "linrec" / "impl" / "triton" / "ops.py",
    "accelerated_scan.scalar": lambda root: root / "accelerated_scan" / "scalar.py",
    "accelerated_scan.triton": lambda root: root / "accelerated_scan" / "triton.py",
}


def install(root: Path, name: str, text: str) -> None:
    path = MODULES[name](root)
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_linrec_needs_only_its_triton_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "linrec").mkdir()
    (tmp_path / "linrec" / "__init__.py").write_text("raise ImportError('not compiled')")
    with pytest.raises(ImportError, match=r"linrec has no impl.triton.ops\.py"):
        linrec.triton_scan()
    install(tmp_path, "linrec", "def linrec_pipe(inputs, coeffs): return inputs - coeffs")
    assert linrec.triton_scan()(torch.tensor(2.0), torch.tensor(5.0)) == 3  # a, b


@pytest.mark.parametrize("name", ["accelerated_scan.scalar", "accelerated_scan.triton"])
def test_accelerated_scan_is_found_under_both_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for module in ("accelerated_scan", "accelerated_scan.scalar", "accelerated_scan.triton"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, name, "def scan(gates, tokens): return tokens - gates")
    (tmp_path / "accelerated_scan" / "__init__.py").touch()
    assert scans.ACCELERATED_TRITON.make()(torch.tensor(2.0), torch.tensor(5.0)) == 3
    for module in ("accelerated_scan", name):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.gpu
def test_the_case_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    shapes = ["2x300x64", "1x1023x32"]
    assert kernels.main(["--cases", "scans", "--shapes", *shapes, "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["rows"]:
        log_space = row["operator"].startswith("Heinsen")
        if row["timing"] is None:
            assert row["note"].startswith(("not installed", "skipped")) or (
                log_space and row["note"] == "the result is not finite"
            ), row
            continue
        assert row["timing"]["method"] == "graph", row
        limit = {"float32": 1e-4, "bfloat16": 0.5}[row["dtype"]]
        assert log_space or row["largest_error"] < limit, row


@pytest.mark.gpu
@pytest.mark.parametrize("time", LENGTHS)
def test_every_scan_is_the_recurrence_on_a_gpu(time: int) -> None:
    for peer in TEXTBOOK:
        a, b = draw(time, torch.float64, signed=not peer.positive)
        found = run(peer, a.cuda(), b.cuda()).cpu()
        torch.testing.assert_close(found, recurrence(a, b), rtol=1e-9, atol=1e-9)
