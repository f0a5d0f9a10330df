"""loadtest.layers and loadtest.seed: layers agree, rows fail alone, ratios name their peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loadtest import layers, measuring, seed

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_log_space_layer_is_the_served_layer(bias: bool) -> None:
    torch.manual_seed(1)
    ours, theirs = layers.cell("mingru", 24, bias), layers.LogSpaceMinGRU(24, bias)
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


@pytest.mark.parametrize("family", ["GRU", "LSTM"])
def test_every_layer_of_a_family_has_the_same_shape(family: str) -> None:
    x = torch.randn(2, 5, 8)
    for factory in [layers.PEERS[family], *layers.FAMILIES[family].values()]:
        layer = factory(8, True)
        assert layer(x).shape == (2, 5, 8)
        assert any("bias" in name for name, _ in layer.named_parameters())
        assert not any("bias" in name for name, _ in factory(8, False).named_parameters())


def test_quick_run_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    assert layers.main(["--quick", "--device", "cpu", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    rows = [(row["layer"], row["precision"]) for row in data["training"]]
    names = ["nn.GRU (without cuDNN)", "minGRU", "minGRU log-space"]
    names += ["nn.LSTM (without cuDNN)", "minLSTM"]
    assert rows == [(name, dtype) for dtype in ("float32", "bfloat16") for name in names]
    assert not any("failed" in row for row in data["training"] + data["seed"])
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


class OutOfMemory(nn.Module):
    """A layer that no device holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no room for the layer\nand a long trace")


def test_a_failing_row_says_why_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(layers.FAMILIES["GRU"], "minGRU", lambda width, bias: OutOfMemory())
    monkeypatch.setattr(seed, "copy_rate", lambda size, device: 1 / 0)
    assert layers.main(["--quick", "--device", "cpu", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "OutOfMemoryError: no room for the layer" in printed
    assert "long trace" not in printed
    assert "no copy rate: ZeroDivisionError" in printed
    assert "minLSTM" in printed


def test_no_ratio_without_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.PEERS, "LSTM", lambda width, bias: OutOfMemory())
    peer, ours = layers.measure_family("LSTM", layers.QUICK, 16, True, "float32", CPU)
    assert peer["failed"].startswith("OutOfMemoryError")
    assert ours["seconds"] > 0
    assert "speedup" not in ours


def test_results_that_are_not_finite_fail_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float("inf")

    monkeypatch.setitem(layers.FAMILIES["LSTM"], "minLSTM", lambda d, bias: Overflow(d, d))
    ours = layers.measure_family("LSTM", layers.QUICK, 16, True, "float32", CPU)[-1]
    assert "not finite" in ours["failed"]


def _stand_in(monkeypatch: pytest.MonkeyPatch, figures: dict[str, tuple[float, int]]) -> None:
    """Replaces the measurement by `figures`: module class name and dtype -> (seconds, bytes)."""

    def measure(factory: Any, sizes: Any, length: int, bias: bool, precision: Any, _: Any) -> Any:
        key = f"{type(factory(4, bias)).__name__} {str(precision.dtype).removeprefix('torch.')}"
        seconds, size = figures[key]
        return {"seconds": seconds, "peak_bytes": size}

    monkeypatch.setattr(layers, "measure_training", measure)
    monkeypatch.setattr(
        layers, "runs_on_cudnn", lambda precision, device: precision.dtype != torch.bfloat16
    )


def test_where_cudnn_refuses_bfloat16_its_float16_layer_is_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {
        "OutputOf bfloat16": (9.0, 900),
        "OutputOf float16": (4.0, 400),
        "MinLSTM bfloat16": (0.5, 300),
    }
    _stand_in(monkeypatch, figures)
    sequential, cudnn, ours = layers.measure_family(
        "LSTM", layers.GPU, 512, True, "bfloat16", torch.device("cuda")
    )
    assert sequential["layer"] == "nn.LSTM (without cuDNN)"
    assert (cudnn["layer"], cudnn["precision"]) == ("nn.LSTM (cuDNN)", "float16")
    assert ours["over"] == "nn.LSTM (cuDNN) float16"
    assert ours["speedup"] == 8.0
    assert ours["memory_growth"] == pytest.approx(-0.25)
    row = layers.training_row(ours)
    assert row[0] == "minLSTM"
    assert row[-4:] == ["8.0x", "235x", "-25%", "+88%"]


def test_with_cudnn_there_is_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch, {"OutputOf float32": (3.0, 100), "MinLSTM float32": (1.0, 150)})
    peer, ours = layers.measure_family(
        "LSTM", layers.GPU, 4096, True, "float32", torch.device("cuda")
    )
    assert peer["layer"] == "nn.LSTM (cuDNN)"
    assert layers.training_row(ours)[-4:] == ["3.0x", "1,361x", "+50%", "+88%"]


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

    monkeypatch.setattr(measuring, "perf_counter", lambda: clock[0])
    assert measuring.seconds_of(call, CPU, repeat=5) == 3.0


def test_no_device_memory_on_the_cpu() -> None:
    assert measuring.peak_bytes(lambda: None, CPU) is None
