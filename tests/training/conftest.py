"""A text that is easy to learn and a model that learns it in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.minrnn.config import MinRnnConfig
from engine.training.data import Part, split
from engine.training.recipe import Recipe
from engine.training.trainer import Trainer

TEXT = b"To be, or not to be: that is the question. " * 40

MakeTrainer = Callable[..., Trainer]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """A trainer in folder `name`; keywords change its recipe, `config` its model."""

    def make(name: str = "run", config: dict[str, Any] | None = None, **changes: Any) -> Trainer:
        recipe = {"steps": 24, "batch": 4, "window": 32, "evaluate_every": 8, **changes}
        shape: dict[str, Any] = {
            "cell": "mingru",
            "vocab_size": 257,
            "d_model": 16,
            "n_layers": 2,
            "conv_kernel": 4,
            "eos_token_id": 256,
            **(config or {}),
        }
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        text = Part(np.frombuffer(TEXT, np.uint8), bytes=len(TEXT))
        data = split(text, window=recipe["window"])
        return Trainer(MinRnnConfig(**shape), Recipe(**recipe), data, folder, torch.device("cpu"))

    return make
