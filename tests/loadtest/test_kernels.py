"""loadtest.kernels at tiny shapes on the CPU: every row has its figures, a failure only its row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest import kernels, report
from loadtest.operators import fused, fused_cpu, heads, linear, steps, versus
from loadtest.operators.limits import Limits
from loadtest.operators.rows import Bar, Row, reported
from loadtest.operators.shapes import CUDA_SHAPES, parse_scan, parse_step, select
from loadtest.peers import scans
from loadtest.timing import Timing

CPU = torch.device("cpu")
SCAN, PACKED, STEP = "2x64x24", "varlen3x40x24", "5x24"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.timing.last_level_cache", lambda: 1000)
    monkeypatch.setattr("loadtest.operators.fused_cpu.last_level_cache", lambda: 1000)
    monkeypatch.setattr("loadtest.operators.limits.copy_bandwidth", lambda device, size: 1e10)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # all that a long run of tests keeps


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert kernels.main(["--device", "cpu", "--json", str(path), *options]) == 0
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@pytest.mark.slow
def test_every_case_gives_finite_figures_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "roofline.png"
    data = run(tmp_path, "--shapes", SCAN, PACKED, STEP, "--png", str(picture))
    rows = data["rows"]
    counts = {case: sum(row["case"] == case for row in rows) for case in kernels.TITLES}
    # Two types each, but for steps: 2 cells x 2 shapes; 2 layouts; those and 2 cells x 2 shapes;
    # 3 steps; 2 scans and a step of Mamba, and of Mamba-2; in two types a scan and a step of GRU
    # and LSTM, and of SRU 3 figures of 2 scans and 2 of a step; 5 filters; no heads, for want of
    # kernels; ours and the peers that a CPU can run.
    assert counts == {
        "fused": 8, "linear": 4, "backward": 12, "steps": 3, "selective": 3, "ssd": 3,
        "gated_rnn": 8, "sru": 16, "draws": 5, "heads": 0, "peers": 6
    }  # fmt: skip
    for row in rows:
        if row["case"] == "gated_rnn":
            assert row["note"].startswith("torch's error") and set(row["times"]) == {"torch.nn"}
        else:
            assert row["note"] in ("", "in-cache rate lost in noise"), row
        assert 0 < row["rate"] < math.inf and row["timing"]["method"] == "clock"
        if row["operator"] != "torch.add":
            logarithmic = row["operator"].startswith("Heinsen")
            limit = {"float32": 1e-6, "bfloat16": 4e-3}[row["dtype"]]
            assert row["error"] < (1.0 if logarithmic else limit), row
    for row in rows[:8]:
        assert row["ceiling"] == 1e10 and row["elementwise"] > 0
        assert row["verdict"] in ("pass", "short")
        assert set(row["times"]) == ({"log-space", "loop"} if row["shape"] == SCAN else set())
    assert all(
        set(row["times"]) == {"composed"} for row in rows if row["case"] in ("selective", "ssd")
    )
    assert all(
        {"LSTM"} <= set(row["times"])
        for row in rows
        if row["operator"].startswith("layer") and row["shape"] != PACKED
    )
    printed = capsys.readouterr().out
    assert all((title in printed) == bool(counts[case]) for case, title in kernels.TITLES.items())
    assert "0 without a figure" in printed
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    again = tmp_path / "again.png"
    assert report.main([str(tmp_path / "figures.json"), "--png", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    assert torch.is_grad_enabled()


def test_bytes_are_counted_once_each(tmp_path: Path) -> None:
    data = run(tmp_path, "--shapes", SCAN, STEP, "--dtype", "float16")
    found = {(row["case"], row["operator"]): row["bytes"] for row in data["rows"]}
    elements, numbers = 2 * 64 * 24, 5 * 24
    assert found["fused", "mingru_scan"] == 3 * elements * 2
    assert found["fused", "minlstm_scan"] == 4 * elements * 2
    assert found["linear", "linear_scan"] == found["peers", "torch.add"] == 3 * elements * 2
    assert found["backward", "linear_scan backward"] == 5 * elements * 2
    assert found["backward", "mingru_scan_train backward"] == 6 * elements * 2
    assert found["backward", "minlstm_scan_train backward"] == 8 * elements * 2
    assert found["steps", "mingru_step"] == numbers * (2 * 2 + 2 + 4 + 4) + 5 * 4
    assert found["steps", "minlstm_step"] == numbers * (3 * 2 + 2 + 4 + 4) + 5 * 4
    assert found["steps", "conv_step"] == numbers * (2 + 2 + 24) + 24 * 5 * 2 + 5 * 4
    weights, states = 24 * (16 * 4 + 2 * 2), 24 * 16 * 8
    streams = 2 * (4 * 24 + 2 * 16)
    scan = 2 * 64 * streams + 2 * states + weights
    assert found["selective", "selective_scan"] == scan
    assert found["selective", "selective_step"] == 5 * streams + 5 * states + weights
    for cell, gates in (("gru", 3), ("lstm", 4)):
        weights, states = 2 * gates * 24 * 25 * 2, 24 * (gates - 2) * 8
        assert found["gated_rnn", f"{cell}_scan"] == 2 * elements * 2 + weights + 2 * states
        assert found["gated_rnn", f"{cell}_step"] == 2 * numbers * 2 + weights + 5 * states
    streams, states = 2 * (2 * 24 + 1 + 2 * 128), 24 * 128 * 8
    assert found["ssd", "ssd_scan"] == 2 * 64 * streams + 2 * states + 3 * 4
    assert found["ssd", "ssd_step"] == 5 * streams + 5 * states + 3 * 4
    assert found["sru", "sru_scan"] == 5 * elements * 2 + 24 * (2 * 8 + 16)
    assert found["sru", "sru_step"] == 5 * numbers * 2 + 24 * (5 * 8 + 16)
    assert found["sru", "layer"] == 2 * elements * 2 + 24 * (2 * 8 + 3 * 24 * 2 + 16)


def test_rows_behind_the_sequences_are_scanned_too(tmp_path: Path) -> None:
    shape = "--shapes", "5x7+1x30in80x24"
    fused_rows = run(tmp_path, "--cases", "fused", "backward", *shape)["rows"]  # serving's alone
    assert [row["operator"] for row in fused_rows] == ["mingru_scan", "minlstm_scan"] * 2
    for row in fused_rows:
        assert 0 < row["rate"] < math.inf and row["error"] < 4e-3
    # In float32, gates of 65 tokens are read, and 80 rows written.
    assert fused_rows[0]["bytes"] == (2 * 65 + 80) * 24 * 4


def test_shapes_of_the_command_line() -> None:
    shape = parse_scan("8x4096x2048")
    assert shape is not None and shape.uniform == (8, 4096, 2048) and shape.tokens == 8 * 4096
    packed = parse_scan("varlen128x8192x2048")
    assert packed is not None and packed == parse_scan("varlen128x8192x2048")
    assert len(packed.lengths) == 128 and 1 <= min(packed.lengths) < max(packed.lengths) <= 8192
    edges = packed.cu_seqlens(CPU)
    assert edges[0] == 0 and edges[-1] == packed.tokens and edges.dtype == torch.int32
    short = parse_scan("2x16+1x30in64x24")
    assert short is not None and short.lengths == (16, 16, 30) and short.behind == 2
    with pytest.raises(ValueError, match="more tokens than the tensor"):
        parse_scan("4x16in63x24")
    assert parse_step("16x768") == (16, 768) and parse_step("1x2x3") is None
    chosen = select(["16x768", SCAN, "1x65536x13200"], CPU, quick=False)
    assert chosen.steps == ((16, 768),) and [s.label for s in chosen.scans] == [SCAN]
    assert [s.label for s in chosen.time_scans] == ["1x65536x13200"]
    default = select(None, torch.device("cuda"), quick=False)
    assert [s.label for s in default.scans] == CUDA_SHAPES and len(default.steps) == 18
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu", "--shapes", "16by768"])


def test_time_contiguous_means_what_it_says() -> None:
    shape = parse_scan(SCAN)
    assert shape is not None
    for layout, strides in (("channels", (64 * 24, 24, 1)), ("time", (24 * 64, 1, 64))):
        for tensor in linear.random_pair(shape, torch.float32, CPU, layout):
            assert tensor.shape == (2, 64, 24) and tensor.stride() == strides
            assert tensor.min() > 0 and tensor.max() < 1.0001


def limits() -> Limits:
    return Limits(CPU, 1 << 20)


def test_a_failing_row_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(linear, "linear_scan", broken)
    shape = parse_scan(SCAN)
    assert shape is not None
    dtypes = [torch.float32]
    rows = linear.measure_linear((shape,), (), dtypes, limits())
    assert [(row.note, row.rate, row.verdict) for row in rows] == [("out of memory", None, "")] * 2
    assert rows[0].elementwise
    monkeypatch.setattr(linear, "available_memory", lambda device: 0)
    (row,) = linear.measure_linear((), (shape,), dtypes, limits())
    assert row.note.startswith("skipped: needs") and row.layout == "time"


def test_peers_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> scans.Scan:
        raise ImportError("No module named 'somewhere'")

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ValueError("first line\nsecond line")

    peers = [
        scans.Peer("missing", missing),
        scans.Peer("long", lambda: torch.add, refuses=lambda shape: f"not {shape[1]}"),
        scans.Peer("wrong", lambda: wrong),
        scans.Peer(
            "turned",
            lambda: lambda a, b: versus.linear_scan(a.mT, b.mT).mT,
            prepare=scans._time_contiguous,
            finish=scans._transposed,
        ),
    ]
    monkeypatch.setattr(versus, "available", lambda device: peers)
    shapes = tuple(s for s in map(parse_scan, (SCAN, PACKED)) if s is not None)
    rows = versus.measure_peers(shapes, [torch.float32], limits())
    notes = {row.operator: row.note for row in rows}
    assert notes["missing"] == "not installed: No module named 'somewhere'"
    assert notes["long"] == "not 64" and notes["wrong"] == "ValueError: first line"
    assert len(rows) == 5 and [row.rate is None for row in rows] == [False, True, True, True, False]
    assert rows[-1].error is not None and rows[-1].error < 1e-6


def test_whole_layers_in_plain_torch_agree_with_the_operators() -> None:
    shape = parse_scan(SCAN)
    assert shape is not None
    for cell in fused.CELLS:
        (call,) = fused.fused_calls(cell, shape, torch.float32, CPU, sets=1)
        wanted = call().view(2, 64, 24)
        pre = call.args[0].view(2, 64, -1)
        for peer in (scans.fused_log_space, scans.fused_loop):
            torch.testing.assert_close(peer(pre, cell.coefficients), wanted, rtol=1e-4, atol=1e-5)


def test_peers_refuse_what_they_cannot_do() -> None:
    by_name = {peer.name: peer for peer in scans.PEERS}
    warp = by_name["accelerated-scan warp"]
    assert warp.refuses((1, 4096, 3)) is None
    assert "powers of two" in (warp.refuses((1, 4095, 3)) or "")
    assert "over 65,536" in (by_name["Heinsen log-space"].refuses((1, 2**20, 3)) or "")
    assert [peer.name for peer in scans.available(CPU)] == ["torch.add", "Heinsen log-space"]


def test_bars_are_judged_against_their_limit() -> None:
    row = Row("fused", "x", SCAN, "float32", 900, bar=Bar("element-wise", 0.92))
    assert row.verdict == "" and row.score() is None
    row.timing = Timing(1.0, "graph", 20)
    assert row.verdict == ""
    row.elementwise, row.ceiling = 1000.0, 2000.0
    assert row.score() == 0.9 and row.verdict == "short"
    row.bar = Bar("element-wise", 0.90)
    assert row.verdict == "pass"
    row.bar, row.arithmetic = Bar("copy or arithmetic", 0.8), 1200.0
    assert row.score() == 0.75 and row.verdict == "short"
    row.bar, row.copy_seconds = Bar("times copy", 1.5), 0.5
    assert row.score() == 2 and row.verdict == "short"
    row.copy_seconds = 0.7
    assert row.verdict == "pass"


def test_a_fault_while_memory_is_given_back_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("loadtest.operators.rows.release_memory", faulty)
    row = Row("fused", "x", SCAN, "float32", 1)
    with reported(row, CPU):
        raise RuntimeError("an illegal memory access was encountered")
    assert row.note == "RuntimeError: an illegal memory access was encountered"


def test_steps_have_a_bar_on_a_gpu_only() -> None:
    rows = steps.measure_steps(((3, 8),), [torch.float32], limits())
    assert [row.bar for row in rows] == [None] * 3
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))  # every row fails: it has no limits
    rows = steps.measure_steps(((3, 8),), [torch.float32], gpu)
    assert [row.bar for row in rows] == [Bar("times copy", 1.5)] * 3
    assert all(row.note.startswith("AttributeError") for row in rows)


def test_bars_depend_on_the_traffic() -> None:
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    names = ("1x8192x2048", "8x4096x2048")
    shapes = tuple(s for s in map(parse_scan, names) if s is not None)
    found = fused.measure_fused(shapes, [torch.bfloat16], gpu)
    assert [row.bar.value if row.bar else 0 for row in found] == [0.80, 0.80, 0.92, 0.92]
    found = linear.measure_linear(shapes, (), [torch.float32], gpu)
    assert [row.bar.value if row.bar else 0 for row in found] == [0.85, 0.85, 0.95, 0.95]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    data = {"rows": [], "copy_bytes_per_second": 1.0, "device": "x", "environment": {}}
    with pytest.raises(ValueError, match="no figure"):
        report.roofline_png(tmp_path / "x.png", data)


@pytest.mark.parametrize(("measured", "used"), [(1.0, None), (1e15, 1e15), (None, None)])
def test_an_arithmetic_limit_below_what_was_reached_is_none(
    monkeypatch: pytest.MonkeyPatch, measured: float | None, used: float | None
) -> None:
    monkeypatch.setattr(fused_cpu, "arithmetic_rate", lambda cell, dtype: measured)
    shape = parse_scan(PACKED)
    assert shape is not None
    rows = fused_cpu.measure_fused_cpu((shape,), [torch.float32], limits())
    assert [row.arithmetic for row in rows] == [used] * 2
    assert [bool(row.note) for row in rows] == [measured == 1.0] * 2


@pytest.mark.gpu
def test_heads_beside_products_with_logits(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ["--cases", "heads", "--shapes", "70x64", "300x128", "--json", str(path)]
    assert kernels.main(options) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == (2 if heads.supported(torch.device("cuda")) else 0)
    for row in rows:
        assert row["timing"]["method"] == "graph"
        assert set(row["times"]) == {"product and draw", "torch"}
        assert row["error"] < 0.05
        assert row["note"].endswith("TFLOP/s")
