"""loadtest.layers and loadtest.seed: layers agree, rows fail alone, ratios name their peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loadtest import layers, layers_step, layers_timing, measuring, seed, timing
from loadtest.layers_step import LOG_SPACE, OURS, PEERS, Layer, Sizes
from loadtest.layers_timing import Budget

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # only named: nothing here runs on it


@pytest.mark.parametrize("bias", [False, True])
def test_log_space_layer_is_the_served_layer(bias: bool) -> None:
    torch.manual_seed(1)
    ours, theirs = layers_step.cell("mingru", 24, bias), layers_step.LogSpaceMinGRU(24, bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 40, 24, requires_grad=True)
    gradient = torch.randn(3, 40, 24)
    found = []
    for layer in (ours, theirs):
        h = layer(x)
        found.append([h, *torch.autograd.grad(h, [x, *layer.parameters()], gradient)])
    assert len(found[0]) == 3 + bias
    for one, other in zip(*found, strict=True):
        # The difference of two long sums of logarithms costs float32 a few digits.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layer", [*OURS, *PEERS, LOG_SPACE], ids=lambda layer: layer.name)
def test_every_layer_has_the_same_shape(layer: Layer) -> None:
    module = layer.build(8, True)
    assert module(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    assert any("bias" in name for name, _ in module.named_parameters())
    assert not any("bias" in name for name, _ in layer.build(8, False).named_parameters())


@pytest.mark.slow
def test_quick_run_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    assert layers.main(["--quick", "--device", "cpu", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    rows = [(row["layer"], row["precision"]) for row in data["training"]]
    dtypes = ("float32", "bfloat16")
    ours = [(name, dtype) for dtype in dtypes for name in ("minGRU", "minLSTM")]
    theirs = [
        (f"{name} (without cuDNN)", dtype) for name in ("nn.GRU", "nn.LSTM") for dtype in dtypes
    ]
    assert sorted(rows[:4]) == sorted(ours)
    assert sorted(rows[4:8]) == sorted(theirs)
    assert rows[8:] == [("minGRU log-space", dtype) for dtype in dtypes]
    assert all(row["seconds"] > 0 for row in data["training"] + data["seed"][1:])
    peers = {(row["layer"], row["precision"]): row["seconds"] for row in data["training"]}
    for row in data["training"]:
        if not row["layer"].startswith("nn."):
            kind = "nn.LSTM" if "LSTM" in row["layer"] else "nn.GRU"
            peer = peers[f"{kind} (without cuDNN)", row["precision"]]
            assert row["speedup"] == pytest.approx(peer / row["seconds"])
    ceiling, *seeds = data["seed"]
    assert [row["precision"] for row in seeds] == ["float32", "bfloat16"]
    for row, itemsize in zip(seeds, (4, 2), strict=True):
        limit = row["gemm_seconds"] + row["copy_seconds"]
        assert row["over_limit"] == pytest.approx(row["seconds"] / limit)
        moved = row["copy_seconds"] * ceiling["copy_bytes_per_second"]
        assert moved == pytest.approx(3 * 256 * 48 * itemsize)
    printed = capsys.readouterr().out
    assert "training step, d 32, batch 2" in printed
    assert "minGRU layer 32 -> 48 -> 32" in printed
    table = printed[printed.index("training step") :]
    names = ["nn.GRU", "minGRU ", "minGRU log-space", "nn.LSTM", "minLSTM"]
    assert [table.index(name) for name in names] == sorted(table.index(name) for name in names)


def test_when_the_time_is_up_nothing_more_starts_and_the_rest_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def measure(layer: Layer, *_: Any) -> dict[str, Any]:
        clock[0] += 10.0
        return {"seconds": 0.002, "peak_bytes": None}

    monkeypatch.setattr(layers_timing, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(layers, "measure_training", measure)
    monkeypatch.setattr(seed, "measure_seed", lambda *_: pytest.fail("not within its time"))
    monkeypatch.setattr(
        seed, "copy_bandwidth", lambda device, size: clock.append(clock.pop() + 5) or 1
    )
    path = tmp_path / "layers.json"
    options = ["--quick", "--device", "cpu", "--json", str(path), "--dtype", "float32"]
    assert layers.main([*options, "--budget-seconds", "5"]) == 0
    data = json.loads(path.read_text())
    assert all("time was up" in row["skipped"] for row in data["training"] + data["seed"][1:])
    monkeypatch.setattr(seed, "measure_seed", lambda *_: {"failed": "not asked for"})
    assert layers.main([*options, "--budget-seconds", "20"]) == 0
    rows = json.loads(path.read_text())["training"]
    assert [row["layer"] for row in rows if "seconds" in row] == ["minGRU", "minLSTM"]
    assert all("time was up" in row["skipped"] for row in rows[2:])
    printed = capsys.readouterr().out
    assert "T 16, float32, minLSTM: 2.000 ms" in printed
    assert "T 16, float32, nn.GRU (without cuDNN): not measured, the time was up" in printed


class OutOfMemory(nn.Module):
    """A layer that no device holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no room for the layer\nand a long trace")


def test_a_failing_row_says_why_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_room = Layer("minGRU", "GRU", lambda width, bias: OutOfMemory())
    monkeypatch.setattr(layers, "OURS", (no_room, OURS[1]))
    monkeypatch.setattr(seed, "copy_bandwidth", lambda device, size: 1 / 0)
    assert layers.main(["--quick", "--device", "cpu", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "OutOfMemoryError: no room for the layer" in printed
    assert "long trace" not in printed
    assert "no copy rate: ZeroDivisionError" in printed
    assert "minLSTM" in printed


def _rows(device: torch.device, sizes: Sizes, dtypes: list[str]) -> dict[str, dict[str, Any]]:
    """What a run measures: name and dtype of a layer -> its row."""
    rows = layers.run_training(sizes, True, dtypes, device, Budget(None), lambda rows: None)
    return {f"{row['layer']} {row['precision']}": row for row in rows}


def test_no_ratio_without_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = Layer("nn.LSTM", "LSTM", lambda width, bias: OutOfMemory())
    monkeypatch.setattr(layers, "PEERS", (PEERS[0], no_room))
    rows = _rows(CPU, layers.QUICK, ["float32"])
    assert rows["nn.LSTM (without cuDNN) float32"]["failed"].startswith("OutOfMemoryError")
    assert rows["minLSTM float32"]["seconds"] > 0
    assert "speedup" not in rows["minLSTM float32"]
    assert rows["minGRU float32"]["speedup"] > 0


def test_results_that_are_not_finite_fail_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float("inf")

    overflow = Layer("minLSTM", "LSTM", lambda width, bias: Overflow(width, width))
    monkeypatch.setattr(layers, "OURS", (OURS[0], overflow))
    assert "not finite" in _rows(CPU, layers.QUICK, ["float32"])["minLSTM float32"]["failed"]


def test_every_layer_gets_its_input_as_it_reads_it() -> None:
    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inputs.append(x.detach())
            return super().forward(x)

    for time_major in (False, True):
        inputs: list[torch.Tensor] = []
        layer = Layer("seen", "GRU", lambda width, bias: Seen(width, width), time_major)
        precision = measuring.PRECISIONS["float32"]
        layers_step.measure_training(layer, Sizes(8, 3, (20,)), 20, True, precision, CPU)
        lengths = [x.shape[1] for x in inputs]
        assert lengths[0] < 20 and set(lengths[1:]) == {20}
        for x in inputs:
            assert (x.shape[0], x.shape[2]) == (3, 8)
            assert (x.transpose(0, 1) if time_major else x).is_contiguous()


def _stand_in(monkeypatch: pytest.MonkeyPatch, figures: dict[str, tuple[float, int]]) -> None:
    """Replaces the measurement by `figures`: name of a layer and dtype -> (seconds, bytes); all
    others fail. cuDNN takes every type but bfloat16."""

    def measure(layer: Layer, sizes: Any, length: Any, bias: Any, precision: Any, _: Any) -> Any:
        seconds, size = figures[f"{layer.name} {str(precision.dtype).removeprefix('torch.')}"]
        return {"seconds": seconds, "peak_bytes": size}

    monkeypatch.setattr(layers, "measure_training", measure)
    monkeypatch.setattr(
        layers, "runs_on_cudnn", lambda precision, device: precision.dtype != torch.bfloat16
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_where_cudnn_refuses_bfloat16_its_float16_layer_is_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {
        "nn.LSTM bfloat16": (9.0, 900),
        "nn.LSTM float16": (4.0, 400),
        "minLSTM bfloat16": (0.5, 300),
    }
    _stand_in(monkeypatch, figures)
    rows = _rows(CUDA, Sizes(1024, 64, (512,)), ["bfloat16"])
    assert "not measured" in rows["nn.LSTM (without cuDNN) bfloat16"]["skipped"]
    assert "nn.LSTM (without cuDNN) float16" not in rows
    assert rows["nn.LSTM (cuDNN) float16"]["seconds"] == 4.0
    ours = rows["minLSTM bfloat16"]
    assert ours["over"] == "nn.LSTM (cuDNN) float16"
    assert ours["speedup"] == 8.0
    assert ours["memory_growth"] == pytest.approx(-0.25)
    row = layers.training_row(ours)
    assert row[0] == "minLSTM"
    assert row[-4:] == ["8.0x", "235x", "-25%", "+88%"]


def test_with_cudnn_there_is_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, {"nn.LSTM float32": (3.0, 100), "minLSTM float32": (1.0, 150)})
    rows = _rows(CUDA, Sizes(1024, 64, (4096,)), ["float32"])
    assert [name for name in rows if "nn.LSTM" in name] == ["nn.LSTM (cuDNN) float32"]
    assert layers.training_row(rows["minLSTM float32"])[-4:] == ["3.0x", "1,361x", "+50%", "+88%"]


def test_what_matters_most_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "runs_on_cudnn", lambda precision, device: True)
    jobs = layers.plan(layers.GPU, ["tf32", "float32", "bfloat16"], CUDA)
    assert [job.layer in OURS for job in jobs[:8]] == [True] * 8
    assert "tf32" not in {job.precision for job in jobs[:16]}
    assert {job.precision for job in jobs[16:24]} == {"tf32"}
    assert [job.layer for job in jobs[24:]] == [LOG_SPACE] * 6
    assert [job.length for job in jobs[8:16]] == [512] * 4 + [4096] * 4
    assert [job.layer for job in jobs[16:20]] == list(OURS) * 2


def test_published_times_stand_beside_the_seed_layer() -> None:
    measured = {"seconds": 0.5, "gemm_seconds": 0.3, "copy_seconds": 0.1, "over_limit": 1.25}
    row = seed.seed_row({"tokens": 65536, "precision": "float32", **measured})
    assert row[2:7] == ["500.000", "300.000", "100.000", "400.000", "1.25x"]
    assert row[7:] == ["5,330", "10,989"]
    failed = seed.seed_row({"tokens": 524288, "precision": "float32", "failed": "no room"})
    assert failed[2:] == ["no room", "-", "-", "-", "-", "56,150", "90,705"]


def test_precision_holds_inside_and_is_put_back() -> None:
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    for name, inside in (("tf32", ("high", True)), ("float32", ("highest", False))):
        with pytest.raises(KeyError), measuring.in_force(measuring.PRECISIONS[name]):
            assert (
                torch.get_float32_matmul_precision(),
                torch.backends.cudnn.allow_tf32,
            ) == inside
            raise KeyError
        assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)


def test_timing_takes_the_median_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([50.0, 50.0, 50.0, 1.0, 9.0, 2.0, 8.0, 3.0])
    clock = [0.0]

    def call() -> None:
        clock[0] += next(durations)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.seconds_per_call([call], CPU, repeat=5) == 3.0


def test_no_device_memory_on_the_cpu() -> None:
    assert measuring.peak_bytes(lambda: None, CPU) is None


def test_a_slow_call_is_made_twice_and_the_faster_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([2.0, 1.5])
    clock = [0.0]

    def call() -> None:
        clock[0] += next(durations)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(layers_timing, "perf_counter", lambda: clock[0])
    assert layers_timing.step_seconds(call, CPU) == 1.5
    assert next(durations, None) is None


def test_a_fast_call_is_timed_over_many(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([0.09, *[0.5] * 3, 0.01, 0.09, 0.02, 0.08, 0.03, 0.07, 0.04])
    clock = [0.0]

    def call() -> None:
        clock[0] += next(durations)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(layers_timing, "perf_counter", lambda: clock[0])
    assert layers_timing.step_seconds(call, CPU) == pytest.approx(0.04)
