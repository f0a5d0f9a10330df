from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError, ConfigError, EngineError
from engine.models.loader import load_model
from engine.models.minrnn.config import CellName
from engine.training.curve import Point
from engine.training.data import Part, Windows
from engine.training.evaluation import windows_loss
from engine.training.folder import Card, write_card, write_checkpoint
from engine.training.ranks import Ranks
from engine.training.sample import sample_ids
from engine.training.state import FILE_NAME
from engine.training.trainer import Trainer
from tests.training.conftest import TEXT, MakeTrainer


def stop_after(steps: int, trainer: Trainer) -> None:
    assert not trainer.run(should_stop=lambda: trainer.step == steps)
    assert trainer.step == steps


def outcome(trainer: Trainer) -> tuple[list[tuple[int, float, float]], list[torch.Tensor]]:
    points = [(p.step, p.train_loss, p.valid_loss) for p in trainer.curve.points()]
    return points, [parameter.detach() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
def test_the_losses_go_down_and_the_best_evaluation_is_kept(
    make_trainer: MakeTrainer, cell: CellName
) -> None:
    trainer = make_trainer(
        config={"cell": cell}, steps=120, evaluate_every=20, learning_rate=1e-2, dropout=0.0
    )
    heard: list[Point] = []
    steps: list[int] = []
    assert trainer.run(on_step=steps.append, on_point=heard.append)
    assert steps == list(range(1, 121))
    assert heard == trainer.curve.points()
    assert [p.step for p in heard] == [20, 40, 60, 80, 100, 120]
    assert heard[-1].train_loss < heard[0].train_loss - 1
    assert heard[-1].valid_loss < heard[0].valid_loss - 1
    best = min(heard, key=lambda p: p.valid_loss)
    assert trainer.best is not None
    assert (trainer.best.step, trainer.best.loss) == (best.step, best.valid_loss)
    assert heard[-1].tokens == 120 * 4 * 32


def test_the_last_step_is_evaluated_also_out_of_turn(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(steps=10, evaluate_every=8)
    trainer.run()
    assert [p.step for p in trainer.curve.points()] == [8, 10]


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
@pytest.mark.parametrize("at", [8, 13])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    make_trainer: MakeTrainer, cell: CellName, at: int
) -> None:
    changes = {"config": {"cell": cell}, "ema": 0.9, "schedule": "cosine", "warmup": 3}
    whole = make_trainer("whole", **changes)
    assert whole.run()
    stop_after(at, make_trainer("parts", **changes))
    torch.manual_seed(999)  # what the process did meanwhile must not matter
    torch.rand(7)
    resumed = make_trainer("parts", **changes)
    resumed.resume()
    assert resumed.step == at
    assert resumed.run()
    points, weights = outcome(whole)
    resumed_points, resumed_weights = outcome(resumed)
    assert resumed_points == points
    assert all(map(torch.equal, weights, resumed_weights))
    assert whole.best is not None and resumed.best is not None
    assert resumed.best.step == whole.best.step
    assert all(
        torch.equal(weight, resumed.best.weights[name])
        for name, weight in whole.best.weights.items()
    )


@pytest.mark.parametrize("cell", ["mingru", "minlstm", "hgrn", "sru"])
def test_a_resumed_run_goes_on_with_carried_states_muon_and_samples(
    make_trainer: MakeTrainer, cell: CellName
) -> None:
    changes = {
        "config": {"cell": cell, "learned_initial_state": True},
        **{"carry": 0.8, "optimizer": "muon", "ema": 0.9, "evaluate_tokens": 40},
    }
    whole = make_trainer("whole", **changes)
    assert whole.run()
    stop_after(13, make_trainer("parts", **changes))
    resumed = make_trainer("parts", **changes)
    resumed.resume()
    assert resumed.run()
    points, weights = outcome(whole)
    resumed_points, resumed_weights = outcome(resumed)
    assert resumed_points == points
    assert all(map(torch.equal, weights, resumed_weights))


def test_carrying_begins_at_the_initial_state_and_reads_what_came_before(
    make_trainer: MakeTrainer,
) -> None:
    """A first step reads all windows from the initial state; later ones do not."""
    changes = {"dropout": 0.0, "steps": 2, "evaluate_every": 1, "learning_rate": 0.0}
    plain, carried = make_trainer(**changes), make_trainer("carried", carry=0.99, **changes)
    plain.run()
    carried.run()
    # other windows are drawn, so only the loss of the untrained model on the same text is like
    first, then = carried.curve.points()
    assert first.train_loss == pytest.approx(plain.curve.points()[0].train_loss, rel=0.1)
    assert then.train_loss != first.train_loss
    batch = Windows(carried.data.train, batch=4, window=32, seed=0, carry=0.99)
    state = carried.model.new_state(4).named
    for point in (first, then):
        drawn = batch.draw()
        carried.model.eval()
        with torch.no_grad():
            logits, state = carried.model.read(drawn.inputs, state, drawn.fresh)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn.targets.flatten())
        assert point.train_loss == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("cell", ["mingru", "hgrn", "sru"])
def test_muon_is_for_the_matrices_of_the_layers_alone(
    make_trainer: MakeTrainer, cell: CellName
) -> None:
    changes = {"config": {"cell": cell, "learned_initial_state": True}, "dropout": 0.0}
    plain = make_trainer("plain", **changes)
    assert [type(optimizer) for optimizer in plain._optimizers] == [torch.optim.AdamW]
    trainer = make_trainer(optimizer="muon", weight_decay=0.3, **changes)
    adamw, muon = trainer._optimizers
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, torch.optim.Muon)
    name_of = {id(weight): name for name, weight in trainer.model.named_parameters()}

    def names(optimizer: torch.optim.Optimizer) -> list[set[str]]:
        return [{name_of[id(w)] for w in group["params"]} for group in optimizer.param_groups]

    products = ["conv.pointwise", "cell.gates", "cell.out", "mlp.up", "mlp.down"]
    (mine,) = names(muon)
    assert mine == {f"layers.{i}.{name}.weight" for i in range(2) for name in products}
    matrices, vectors = names(adamw)
    assert matrices == {
        *("embedding.weight", "head.weight"),
        *(f"layers.{index}.conv.weight" for index in range(2)),
    }
    assert mine | matrices | vectors == set(name_of.values())
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.3, 0.0]
    assert [group["weight_decay"] for group in muon.param_groups] == [0.3]
    assert {group["adjust_lr_fn"] for group in muon.param_groups} == {"match_rms_adamw"}


def test_all_optimizers_follow_the_schedule(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        optimizer="muon", warmup=4, schedule="cosine", learning_rate=1e-2, steps=8
    )
    seen = []
    trainer.run(
        on_step=lambda step: seen.append(
            {group["lr"] for optimizer in trainer._optimizers for group in optimizer.param_groups}
        )
    )
    assert seen == [{trainer.recipe.learning_rate_at(step)} for step in range(1, 9)]


@pytest.mark.parametrize("carry", [0.0, 0.5])
def test_muon_and_carried_states_learn(make_trainer: MakeTrainer, carry: float) -> None:
    trainer = make_trainer(
        steps=80, evaluate_every=20, learning_rate=1e-2, dropout=0.0, optimizer="muon", carry=carry
    )
    trainer.run()
    points = trainer.curve.points()
    assert points[-1].train_loss < points[0].train_loss - 1
    assert points[-1].valid_loss < points[0].valid_loss - 1


def test_a_test_part_is_reported_and_chooses_nothing(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.data = dataclasses.replace(
        trainer.data, test=Part(trainer.data.train.ids[:90], bytes=90, what="a test")
    )
    trainer.run()
    result = write_checkpoint(trainer)
    assert list(result.losses) == ["valid", "test"]
    assert result.reported is result.losses["test"]
    assert result.reported.windows.tokens == 89
    assert trainer.best is not None
    assert result.losses["valid"].windows.per_token == pytest.approx(trainer.best.loss, abs=1e-12)
    about = "A model of questions."
    card = Card(data="a text", command="x", prompt="\n", sample="```", about=f"\n{about}\n")
    write_card(trainer, result, card)
    readme = (trainer.folder / "README.md").read_text()
    assert f"trained by minserve.\n\n{about}\n\n## Losses" in readme
    carried = result.losses["test"].carried
    bits = carried.nats / math.log(2) / 90
    figures = f"{carried.per_token:.4f} | {bits:.4f} | 89 |"
    assert f"| test, state carried through the whole part | {figures}" in readme
    assert "| test | 90 | 90 | a test |" in readme
    assert readme.count("```") == 4


def test_an_evaluation_may_read_a_sample(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(steps=1, evaluate_every=1, evaluate_tokens=70, batch=4)
    trainer.run()
    valid = trainer.data.valid.to("cpu")
    pieces = [valid[index * len(valid) // 2 :][:32] for index in range(2)]
    expected = windows_loss(trainer.best_model(), torch.cat(pieces), window=32, batch=4)
    assert trainer.curve.points()[0].valid_loss == pytest.approx(expected.per_token, abs=1e-12)


def test_a_batch_that_the_gpus_cannot_share_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    given = (trainer.config, trainer.recipe, trainer.data, trainer.folder, trainer.device)
    with pytest.raises(ConfigError, match="batch is 4; allowed on 3 GPUs: multiples of 3"):
        Trainer(*given, ranks=Ranks(0, 3))


def test_a_run_that_was_killed_goes_on_from_its_last_save(make_trainer: MakeTrainer) -> None:
    whole = make_trainer("whole", save_every=10)
    whole.run()
    killed = make_trainer("killed", save_every=10)
    with pytest.raises(RuntimeError, match="killed"):
        killed.run(on_step=lambda step: _die_at(step, 17))
    resumed = make_trainer("killed", save_every=10)
    resumed.resume()
    assert resumed.step == 10
    resumed.run()
    assert outcome(resumed)[0] == outcome(whole)[0]


def _die_at(step: int, last: int) -> None:
    if step == last:
        raise RuntimeError("killed")


def test_there_must_be_something_to_resume(make_trainer: MakeTrainer) -> None:
    with pytest.raises(CheckpointError, match="no unfinished run"):
        make_trainer().resume()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 truncated"])
def test_a_damaged_state_is_refused(make_trainer: MakeTrainer, content: bytes) -> None:
    trainer = make_trainer()
    (trainer.folder / FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=FILE_NAME):
        trainer.resume()


def test_a_state_that_would_run_code_is_refused(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    torch.save({"step": _die_at}, trainer.folder / FILE_NAME)
    with pytest.raises(CheckpointError, match=FILE_NAME):
        trainer.resume()


def test_a_run_is_resumed_with_its_own_options_only(make_trainer: MakeTrainer) -> None:
    stop_after(3, make_trainer())
    with pytest.raises(ConfigError, match="dropout") as caught:
        make_trainer(dropout=0.5).resume()
    assert caught.value.param == "dropout"
    with pytest.raises(ConfigError, match="minlstm"):
        make_trainer(config={"cell": "minlstm"}).resume()


def test_a_run_is_resumed_on_its_own_data_only(make_trainer: MakeTrainer) -> None:
    stop_after(3, make_trainer())
    other = make_trainer()
    train = other.data.train
    other.data = dataclasses.replace(other.data, valid=Part(train.ids[:100]))
    with pytest.raises(ConfigError, match="data"):
        other.resume()


def test_the_average_is_what_is_evaluated(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(ema=0.5, dtype="float32", steps=3, evaluate_every=3, learning_rate=1e-2)
    expected = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    def follow(step: int) -> None:
        decay = min(0.5, (1 + step) / (10 + step))
        for average, weight in zip(expected, trainer.model.parameters(), strict=True):
            average.mul_(decay).add_(weight.detach(), alpha=1 - decay)

    trainer.run(on_step=follow)
    kept = list(trainer.best_model().parameters())
    for average, weight, raw in zip(expected, kept, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(weight, average)
        assert not torch.equal(weight, raw)


@pytest.mark.parametrize("cell", ["mingru", "hgrn", "sru"])
def test_only_matrices_decay(make_trainer: MakeTrainer, cell: CellName) -> None:
    one_step = {"config": {"cell": cell}, "learning_rate": 1e-2, "steps": 1, "dropout": 0.0}
    trainer = make_trainer(weight_decay=0.5, **one_step)
    twin = make_trainer("twin", weight_decay=0.0, **one_step)
    if trainer.model.lower_bounds is not None and twin.model.lower_bounds is not None:
        for own in (trainer.model.lower_bounds, twin.model.lower_bounds):
            torch.nn.init.ones_(own)  # zeros would not show a decay
    before = {name: weight.detach().clone() for name, weight in twin.model.named_parameters()}
    trainer.run()
    twin.run()
    with_decay = dict(trainer.model.named_parameters())
    for name, without in twin.model.named_parameters():
        decays = without.ndim >= 2 and name != "lower_bounds"
        shrink = 0.5 * 1e-2 * before[name] if decays else 0.0
        torch.testing.assert_close(with_decay[name], without - shrink)


def test_a_run_that_diverges_says_so(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(clip=0.0)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(EngineError, match="learning rate"):
        trainer.run()


def test_a_run_without_an_evaluation_has_no_best_model(make_trainer: MakeTrainer) -> None:
    with pytest.raises(EngineError, match="no evaluation"):
        make_trainer().best_model()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_losses_reported_are_those_of_the_files(make_trainer: MakeTrainer, dtype: str) -> None:
    trainer = make_trainer(steps=24, dtype=dtype)
    trainer.run()
    trainer.save()
    result = write_checkpoint(trainer)
    write_card(
        trainer,
        result,
        Card(data="a text", command="minserve train", prompt="\n", sample="To be"),
    )
    assert trainer.best is not None
    assert set(result.losses) == {"valid"}
    assert result.reported.windows.per_token == pytest.approx(trainer.best.loss, abs=1e-12)
    model, config = load_model(trainer.folder, "cpu", "float32")
    assert config.dtype == dtype
    valid, reported = trainer.data.valid, result.reported
    assert windows_loss(model, valid.to("cpu"), window=32, batch=4) == reported.windows
    assert reported.windows.tokens == reported.carried.tokens == len(valid) - 1
    readme = (trainer.folder / "README.md").read_text()
    losses = (reported.windows, reported.carried)
    for fact in ("of a text", "minserve train", "To be", *(f"{x.per_token:.4f}" for x in losses)):
        assert fact in readme
    assert sorted(path.name for path in trainer.folder.iterdir()) == [
        "README.md",
        "config.json",
        "curve.jsonl",
        "curve.png",
        "model.safetensors",
    ]


def test_a_folder_that_cannot_be_written_to_raises(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.folder = Path("/proc/nowhere")
    with pytest.raises(OSError):
        trainer.save()


def test_samples_are_in_the_vocabulary_and_follow_from_the_seed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(steps=60, learning_rate=1e-2, dropout=0.0)
    trainer.run()
    model, prompt = trainer.best_model(), torch.tensor(list(TEXT[:8]))
    first, again, other = (
        sample_ids(model, prompt, 30, temperature=5.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first.shape == (30,)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    cold = sample_ids(model, prompt, 5, temperature=1e-4, seed=1)
    greedy = list(TEXT[:8])
    for _ in range(5):
        greedy.append(int(model(torch.tensor([greedy]))[0, -1].argmax()))
    assert cold.tolist() == greedy[8:]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantised_model_is_not_trained(make_trainer: MakeTrainer, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"quantised as {kind} cannot be trained"):
        make_trainer(config={"quantization": kind})
