"""What follows from the figures of loadtest.engine: limits, shares, bars, tables, the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.lm_bars import Check, checks
from loadtest.lm_figures import Agreement, Decode, ModelFigures, Prefill
from loadtest.lm_models import Work, size_config, work
from loadtest.lm_plots import engine_png, main
from loadtest.lm_tables import print_checks, print_model

#: 1,000 FLOP a token, 100 of them in the head; weights of 2,000 bytes; states of 50.
SMALL = Work(parameters=500, weight_bytes=2000, state_bytes=50, flops=1000, head_flops=100)


def figures(**other: Any) -> ModelFigures:
    values: dict[str, Any] = {
        "name": "small",
        "size": None,
        "cell": "mingru",
        "dtype": "bfloat16",
        "quantization": None,
        "device": "cuda",
        "work": SMALL,
        "read_rate": 1e6,
        "step_tokens": 8,
    }
    return ModelFigures(**(values | other))


def sized(size: str, device: str = "cuda", **other: Any) -> ModelFigures:
    shape = work(size_config(size, "mingru", "bfloat16"), torch.bfloat16)
    return figures(name=size, size=size, work=shape, device=device, read_rate=3e12, **other)


def result(found: list[Check], what: str) -> str:
    return next(check.result for check in found if check.what == what)


def test_a_step_is_limited_by_reading_or_by_products() -> None:
    found = figures(decode=[Decode(1, gemm=1e-3), Decode(100, gemm=0.01)])
    assert found.gemm_rate == pytest.approx(100 * 1000 / 0.01)  # of the larger batch
    assert found.decode_limit(1) == pytest.approx(2.1e-3)  # 2,000 bytes and twice a state's 50
    assert found.decode_limit(100) == pytest.approx(0.012)  # 100 states take longer than products
    found.read_rate = 2e6
    assert found.decode_limit(100) == pytest.approx(0.01)  # 100,000 FLOP at that rate


def test_a_prompt_reads_the_weights_once_a_piece_and_the_head_once() -> None:
    found = figures(prefill=[Prefill(20, gemm=1e-6)])
    assert found.prefill_flops(20) == 20 * 900 + 100
    assert found.prefill_limit(20) == pytest.approx(3 * 2e-3)
    found.prefill[0].gemm = 1.0
    assert found.prefill_limit(20) == pytest.approx(1.0)


def test_without_a_gemm_rate_reading_alone_limits() -> None:
    found = figures()
    assert found.gemm_rate is None
    assert found.decode_limit(1000) == pytest.approx(0.102)


def test_a_decode_bar_passes_or_falls_short() -> None:
    for rate, verdict in ((56_100, "pass"), (55_900, "short")):
        one = sized("1.3b", decode=[Decode(64, greedy=64 / rate, gemm=64 / 80_000)])
        assert result(checks([one]), "decode, batch 64") == verdict


def test_ninety_percent_of_the_bare_products_is_the_bar_where_that_is_less() -> None:
    one = sized("1.3b", decode=[Decode(64, greedy=64 / 46_000, gemm=64 / 50_000)])
    check = next(check for check in checks([one]) if check.what.startswith("decode"))
    assert check.bar == pytest.approx(45_000)
    assert check.passes and "56,000" in check.note


@pytest.mark.parametrize(
    "other", [{"cell": "minlstm"}, {"dtype": "float32"}, {"quantization": "int8"}]
)
def test_decode_bars_are_of_bf16_mingru(other: dict[str, Any]) -> None:
    one = sized("113m", decode=[Decode(64, greedy=1.0, gemm=1.0)])
    assert any(check.unit == "tokens/s" for check in checks([one]))
    for name, value in other.items():
        setattr(one, name, value)
    assert not any(check.unit == "tokens/s" for check in checks([one]))


@pytest.mark.parametrize("size", ["mamba-130m", "mamba-1.4b", "mamba-2.8b", "mamba2-1.3b"])
def test_mamba_is_measured_against_the_limit(size: str) -> None:
    one = sized(size, decode=[Decode(1), Decode(64), Decode(7)], prefill=[Prefill(16_384)])
    shares = (0.39, 0.46, 1) if size == "mamba-130m" else (0.69, 0.61, 1)
    for row, share in zip(one.decode, shares, strict=True):
        row.greedy = one.decode_limit(row.batch) / share
    one.prefill[0].seconds = one.prefill_limit(16_384) / 0.61
    found = [check for check in checks([one]) if "limit" in check.what]
    assert [(check.what, check.result) for check in found] == [
        ("of the limit, batch 1", "short"),
        ("of the limit, batch 64", "pass"),
        ("prefill of 16,384, of the limit", "pass"),
    ]


def test_sampling_and_engine_are_measured_against_the_runner() -> None:
    row = Decode(64, greedy=1.0, sampled=1.10, engine=1.2)
    large, middle = checks([sized("1.3b", decode=[row])]), checks([sized("113m", decode=[row])])
    assert result(large, "sampled over greedy, batch 64") == "short"
    assert result(middle, "sampled over greedy, batch 64") == "pass"
    assert result(large, "engine of runner, batch 64") == "short"
    assert result(middle, "engine of runner, batch 64") == "pass"
    beyond = checks([sized("113m", decode=[Decode(4096, greedy=1.0, engine=9.0)])])
    assert not any(check.what.startswith("engine") for check in beyond)


def test_quantised_weights_are_set_beside_bf16_of_the_same_run() -> None:
    plain = sized("1.3b", decode=[Decode(1, greedy=1.6)])
    int8 = sized("1.3b", quantization="int8", decode=[Decode(1, greedy=1.01)])
    assert result(checks([plain, int8]), "batch 1, times bf16") == "short"
    int8.decode[0].greedy = 0.99
    assert result(checks([plain, int8]), "batch 1, times bf16") == "pass"
    assert not checks([int8])


def test_prefill_bars_of_a_gpu() -> None:
    one = sized("1.3b", prefill=[Prefill(16_384, seconds=0.1), Prefill(128, seconds=1.0)])
    assert [check.result for check in checks([one])] == ["pass"]
    middle = sized("113m", prefill=[Prefill(131_072, seconds=2.1, gemm=1.0)])
    assert result(checks([middle]), "prefill of 131,072, of the GEMM rate") == "short"


def test_bars_of_the_cpu() -> None:
    read = sized("113m").work.weight_bytes / 3e12
    one = sized(
        "113m",
        device="cpu",
        decode=[Decode(1, greedy=read / 0.86), Decode(16, greedy=1.0, peer=1.2, gemm=1e-4)],
        prefill=[Prefill(1024, seconds=1.0, peer=1.6, gemm=0.5)],
    )
    found = checks([one])
    assert result(found, "batch 1, of read bandwidth") == "pass"
    assert result(found, "times PyTorch, batch 16") == "short"
    assert result(found, "prefill of 1,024, times PyTorch") == "pass"
    assert result(found, "prefill of 1,024, of the GEMM rate") == "short"
    one.decode[0].greedy = read / 0.8
    assert result(checks([one]), "batch 1, of read bandwidth") == "short"
    one.quantization = "int8"
    assert result(checks([one]), "batch 1, of read bandwidth") == "pass"


def test_deterministic_is_set_beside_the_default_and_has_no_other_bars() -> None:
    one = sized(
        "1.3b",
        deterministic=True,
        decode=[Decode(1, greedy=1.0, default=0.89, sampled=9.0), Decode(64, greedy=1.0)],
        prefill=[Prefill(16_384, seconds=1.0, default=0.91)],
    )
    assert [(check.what, check.result) for check in checks([one])] == [
        ("of the default, batch 1", "short"),
        ("of the default, prefill of 16,384", "pass"),
    ]
    int8 = sized("1.3b", quantization="int8", decode=[Decode(1, greedy=1.0)])
    assert not [check for check in checks([one, int8]) if check.model == int8.label]


def test_different_tokens_fall_short_beyond_the_tolerance() -> None:
    one = figures(agreement=Agreement(96, 95, 0.1, 0.2))
    assert checks([one])[0].passes
    one.agreement = Agreement(96, 95, 0.3, 0.2)
    assert not checks([one])[0].passes


def test_tables_and_picture_of_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = sized(
        "113m",
        decode=[
            Decode(1, 16, greedy=2e-4, sampled=2.1e-4, engine=2.2e-4, peer=1e-3, gemm=1.5e-4),
            Decode(64, notes={"greedy": "no time left", "peer": "no time left"}),
        ],
        prefill=[Prefill(n, seconds=n * 1e-6, next_step=2e-4) for n in (128, 1024)],
    )
    print_model(full)
    print_checks(checks([full]))
    text = capsys.readouterr().out
    assert "5,000" in text and "greedy, peer: no time left" in text and "short" in text
    assert "of default" not in text
    fixed = Decode(1, greedy=2e-4, default=1.5e-4)
    print_model(sized("113m", deterministic=True, decode=[fixed]))
    text = capsys.readouterr().out
    assert "deterministic" in text and "of default" in text and "75%" in text
    data = {
        "environment": {"torch": "2"},
        "device": "a device",
        "read_bytes_per_second": 3e12,
        "models": [full.as_json()],
    }
    saved = tmp_path / "figures.json"
    saved.write_text(json.dumps(data))
    assert main([str(saved), "--png", str(tmp_path / "engine.png")]) == 0
    assert (tmp_path / "engine.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no figure"):
        engine_png(tmp_path / "none.png", {**data, "models": []})
