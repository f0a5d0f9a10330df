from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.training.recipe import Recipe


def test_the_warm_up_rises_linearly_and_the_cosine_ends_at_the_last_step() -> None:
    recipe = Recipe(
        steps=110, warmup=10, schedule="cosine", learning_rate=1.0, final_learning_rate=0.1
    )
    assert recipe.learning_rate_at(1) == pytest.approx(0.1)
    assert recipe.learning_rate_at(10) == 1.0
    assert recipe.learning_rate_at(60) == pytest.approx(0.55)
    assert recipe.learning_rate_at(110) == pytest.approx(0.1)
    rates = [recipe.learning_rate_at(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_without_a_schedule_the_learning_rate_is_constant() -> None:
    assert {Recipe().learning_rate_at(step) for step in (1, 2500, 5000)} == {1e-3}


def test_the_average_forgets_fast_at_first() -> None:
    recipe = Recipe(ema=0.99)
    decays = [recipe.ema_decay_at(step) for step in range(1, 2000)]
    assert decays[0] < 0.2
    assert decays == sorted(decays)
    assert decays[-1] == 0.99


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", 1.5),
        ("batch", 0),
        ("window", -1),
        ("seed", -1),
        ("dropout", 1.0),
        ("ema", 1.0),
        ("beta2", -0.1),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("clip", -1.0),
        ("schedule", "linear"),
        ("precision", "float16"),
        ("dtype", "int8"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Recipe(**{name: value})
    assert caught.value.param == name
