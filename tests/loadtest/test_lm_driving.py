"""Driving runner and engine: every token is counted, wrong answers are noticed, rounds overlap."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.models import loader as checkpoint
from engine.protocol.token_ids import pack_ids
from engine.runner.cuda_graphs import buckets
from engine.runner.model_runner import ModelRunner
from engine.step_plan import StepPlan, StepResult
from loadtest import engine as command
from loadtest import lm_driving
from loadtest.lm_driving import (
    GREEDY,
    SAMPLED,
    WrongAnswerError,
    decoding,
    engine_seconds,
    load,
    random_prompt,
    read_prompt,
    round_steps,
)
from loadtest.lm_figures import ModelFigures
from loadtest.lm_measure import fitting, typical
from loadtest.lm_models import Work


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.lm_limits.last_level_cache", lambda: 2**20)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # all that a long run of tests keeps


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    config = EngineConfig(
        model="shakespeare-mingru",
        device="cpu",
        dtype="float32",
        max_slots=8,
        max_step_tokens=128,
        threads=1,
    )
    yield load(config, [1, 8])


def greedy_alone(runner: ModelRunner, first: int, count: int) -> list[int]:
    """The tokens of one sequence by the model itself."""
    model, _ = checkpoint.load_model(Path(runner.info.folder), "cpu", "float32")
    state, slot, token, found = model.new_state(1), torch.zeros(1, dtype=torch.int32), first, []
    with torch.no_grad():
        for _ in range(count):
            logits = model.logits(model.step(torch.tensor([token]), state, slot))
            token = int(logits.argmax(1))
            found.append(token)
    return found


def test_only_the_graphs_asked_for_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    class Warm:
        def __init__(self, config: EngineConfig) -> None:
            pass

        def warm_up(self, batches: Collection[int]) -> None:
            seen.append(buckets(300, batches))

    monkeypatch.setattr(lm_driving, "ModelRunner", Warm)
    load(EngineConfig(), [1, 64, 4096])
    assert seen == [[1, 64, 300]]


def test_decoding_is_the_models(runner: ModelRunner) -> None:
    with decoding(runner, 3, GREEDY) as running:
        first = list(running.tokens)
        steps = []
        for _ in range(5):
            assert running.run(1) > 0
            steps.append(list(running.tokens))
    for row in range(3):
        assert [step[row] for step in steps] == greedy_alone(runner, first[row], 5)


def test_sampled_decoding_draws_after_an_engine_ran_greedily(runner: ModelRunner) -> None:
    with decoding(runner, 8, GREEDY) as running:
        running.run(20)
        greedy = list(running.tokens)
    engine_seconds(runner, 8, 4, GREEDY)
    with decoding(runner, 8, SAMPLED) as running:
        running.run(20)
        assert running.tokens != greedy


@pytest.mark.parametrize("batch", [1, 8])
def test_the_whole_engine_gives_every_request_its_tokens(runner: ModelRunner, batch: int) -> None:
    assert engine_seconds(runner, batch, 5, GREEDY) > 0


def test_a_prompt_is_read_whole_and_in_order(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []

    def run(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return ModelRunner.run(runner, plan)

    monkeypatch.setattr(runner, "run", run)
    ids = random_prompt(300, 257)
    seconds, steps = read_prompt(runner, ids, decode=3)
    assert seconds > 0 and len(steps) == 3
    chunks = [chunk for plan in plans for chunk in plan.prefill]
    assert [chunk.start for chunk in chunks] == [0, 128, 256]
    assert [token for chunk in chunks for token in chunk.tokens] == ids.tolist()
    assert [chunk.sample for chunk in chunks] == [False, False, True]
    assert plans[-1].release == [0]


def test_a_failing_measurement_leaves_no_sequence(runner: ModelRunner) -> None:
    with pytest.raises(RuntimeError, match="broken"), decoding(runner, 2, GREEDY):
        raise RuntimeError("broken")
    with decoding(runner, 2, GREEDY) as running:
        running.run(1)


@dataclass
class RoundRunner:
    """Draws 0, 1, 2, ... in every row, and remembers in which order it was called."""

    calls: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    info: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=100))
    drawn: int = 0
    rows: int = 0
    overlaps: bool = True
    ended: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> Any:
        return self.finish(self.start(plan)) if plan.plain else StepResult()

    def start(self, plan: StepPlan) -> StepPlan:
        self.calls.append("start")
        self.plans.append(plan)
        return plan

    def finish(self, plan: StepPlan) -> Any:
        self.calls.append("finish")
        tokens = list(range(self.drawn, self.drawn + plan.steps))
        self.drawn += plan.steps
        self.rows = self.rows or len(plan.decode)
        packed = pack_ids(tokens * self.rows)
        return SimpleNamespace(
            non_finite=[], sampled=[], drawn=SimpleNamespace(tokens=packed, ended=self.ended)
        )


@pytest.fixture
def rounds() -> RoundRunner:
    return RoundRunner()


def test_rounds_of_several_steps_overlap(rounds: RoundRunner) -> None:
    runner: Any = rounds
    with decoding(runner, 2, GREEDY) as running:
        running.run(3, steps=4)
        assert running.tokens == [11, 11]
    assert rounds.calls == ["start", "start", "finish", "start", "finish", "finish"]
    assert [(plan.plain, plan.again, plan.steps) for plan in rounds.plans] == [
        (True, False, 4),
        (True, True, 4),
        (True, True, 4),
    ]
    assert [(len(plan.decode), plan.at) for plan in rounds.plans] == [(2, [0, 1]), (0, []), (0, [])]


def test_a_row_that_ends_early_is_no_figure(rounds: RoundRunner) -> None:
    rounds.ended = {1: 2}
    runner: Any = rounds
    with (
        decoding(runner, 2, GREEDY) as running,
        pytest.raises(WrongAnswerError, match="ended"),
    ):
        running.run(1, steps=4)


def test_steps_of_a_round_aim_at_its_length() -> None:
    assert round_steps(1e-4, None) == 20
    assert round_steps(1e-6, None) == 32
    assert round_steps(1.0, None) == 1
    assert round_steps(1e-4, 8) == 8


def test_a_runner_that_does_not_overlap_runs_one_round_after_another(rounds: RoundRunner) -> None:
    rounds.overlaps = False
    runner: Any = rounds
    with decoding(runner, 2, GREEDY) as running:
        running.run(2, steps=3)
        assert running.tokens == [5, 5]
    assert rounds.calls == ["start", "finish"] * 2


def test_batches_that_do_not_fit_are_left_out() -> None:
    small = Work(1, 1, state_bytes=1000, flops=1, head_flops=1)
    one = ModelFigures("m", None, "mingru", "float32", None, "cpu", small, 1.0, 1)
    assert fitting([1, 64, 1024], one, vocab=100, free=2 * 64 * 5000) == [1, 64]


def test_the_typical_call_is_a_median_without_the_first() -> None:
    samples = iter([100.0, *[float(value % 7) for value in range(60)]])
    assert typical(lambda: next(samples), 1e-9) == 100.0  # too slow to repeat
    samples = iter([100.0, 3.0, 1.0, 2.0, *[2.0] * 60])
    assert typical(lambda: next(samples), 0.01) == 2.0


def test_the_command_measures_a_model_whole(tmp_path: Path) -> None:
    saved, drawn = tmp_path / "engine.json", tmp_path / "engine.png"
    options = ["--device", "cpu", "--models", "6.3m", "--dtype", "float32", "--batch", "1", "2"]
    options += ["--prefill", "16", "--seconds", "0.01", "--peer", "eager"]
    assert command.main([*options, "--json", str(saved), "--png", str(drawn)]) == 0
    (model,) = json.loads(saved.read_text())["models"]
    assert [row["batch"] for row in model["decode"]] == [1, 2]
    for row in model["decode"]:
        assert not row["notes"]
        for name in ("greedy", "sampled", "penalised", "reported", "engine", "reported_engine"):
            assert row[name] > 0
        assert min(row["peer"], row["gemm"], row["limit"]) > 0
    (prompt,) = model["prefill"]
    for name in ("seconds", "next_step", "peer", "gemm", "limit"):
        assert prompt[name] > 0
    assert model["agreement"]["equal"] == model["agreement"]["compared"] == 12
    assert drawn.stat().st_size > 0


def test_only_what_was_asked_for_and_no_more_than_the_budget(tmp_path: Path) -> None:
    saved = tmp_path / "engine.json"
    options = ["--device", "cpu", "--models", "6.3m", "--batch", "1", "--json", str(saved)]
    assert command.main([*options, "--only", "decode", "--seconds", "0.01"]) == 0
    (model,) = json.loads(saved.read_text())["models"]
    (row,) = model["decode"]
    assert row["greedy"] and not (row["sampled"] or row["engine"] or row["peer"] or row["gemm"])
    assert not model["prefill"] and model["agreement"] is None
    assert command.main([*options, "--only", "decode", "--budget-seconds", "0"]) == 0
    (model,) = json.loads(saved.read_text())["models"]
    assert model["decode"][0]["notes"] == {"greedy": "no time left"}


@pytest.mark.slow
def test_each_model_a_second_time_deterministic(tmp_path: Path) -> None:
    saved = tmp_path / "engine.json"
    options = ["--device", "cpu", "--models", "6.3m", "--quantize", "none", "int8"]
    options += ["--batch", "2", "--prefill", "16", "--only", "decode", "prefill"]
    options += ["--deterministic", "--seconds", "0.01", "--json", str(saved)]
    assert command.main(options) == 0
    kinds = {
        (model["quantization"], model["deterministic"]): model
        for model in json.loads(saved.read_text())["models"]
    }
    assert len(kinds) == 4
    for (quantization, deterministic), model in kinds.items():
        beside = kinds[quantization, False] if deterministic else None
        (row,), (prompt,) = model["decode"], model["prefill"]
        assert row["default"] == (beside and beside["decode"][0]["greedy"])
        assert prompt["default"] == (beside and beside["prefill"][0]["seconds"])


def test_a_model_that_does_not_load_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_but_one(config: EngineConfig, batches: Any) -> ModelRunner:
        if "minlstm" in config.model:
            raise RuntimeError("does not fit")
        return load(config, batches)

    monkeypatch.setattr(command, "load", load_but_one)
    options = ["--device", "cpu", "--models", "6.3m", "--cell", "minlstm", "mingru"]
    options += ["--batch", "1", "--only", "decode", "--seconds", "0.01"]
    assert command.main([*options, "--json", str(tmp_path / "engine.json")]) == 1
    assert "not measured: RuntimeError: does not fit" in capsys.readouterr().out
    failed, measured = json.loads((tmp_path / "engine.json").read_text())["models"]
    assert not failed["decode"] and measured["decode"][0]["greedy"] > 0


@pytest.mark.parametrize(
    "wrong", [["--models", "7b"], ["--batch", "0"], ["--peer", "graph"], ["--only", "tea"]]
)
def test_bad_options_are_refused_before_anything_is_measured(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_bandwidth", lambda device: pytest.fail("measures"))
    with pytest.raises(SystemExit) as ended:
        command.main(["--device", "cpu", *wrong])
    assert ended.value.code == 2
