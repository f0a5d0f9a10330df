"""Recipe: every number that decides how a model is trained; does not import torch.

The defaults are the paper's for tinyshakespeare (arXiv 2410.01201, language modelling): AdamW at
1e-3, gradients clipped at norm 0.25, batches of 64 windows of 256 tokens, 5,000 steps, dropout 0.2,
an evaluation every 25 steps, and the weights of the best one kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from engine.config import DtypeName
from engine.errors import ConfigError

Schedule = Literal["constant", "cosine"]
Precision = Literal["bfloat16", "float32"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Raises ConfigError, which names the field, for a value out of range."""

    steps: int = 5000
    batch: int = 64  # windows per step, on all GPUs together
    window: int = 256  # tokens per window
    # Probability that a window continues from where the last one of its row ended, with its state
    # (truncated backpropagation through time); 0 = every window begins at the initial state.
    carry: float = 0.0
    optimizer: OptimizerName = "adamw"  # muon: for the layers' matrices, adamw for the rest
    learning_rate: float = 1e-3  # after the warm-up
    schedule: Schedule = "constant"
    warmup: int = 0  # steps over which the learning rate rises linearly from 0
    final_learning_rate: float = 0.0  # end of the cosine schedule, at the last step
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01  # for matrices; biases, gains, initial states, lower bounds: none
    clip: float = 0.25  # global gradient norm; 0 = no clipping
    dropout: float = 0.2
    ema: float = 0.0  # decay of the averaged weights that are evaluated and kept; 0 = no averaging
    evaluate_every: int = 25  # steps
    evaluate_tokens: int = 0  # sample of the validation part for that, spread over it; 0 = all
    save_every: int = 1000  # steps between saves of the state that --resume reads
    seed: int = 0
    # Type of matrix products in a training step on CUDA; weights, optimizer and evaluation are
    # float32.
    precision: Precision = "bfloat16"
    dtype: DtypeName = "bfloat16"  # type of the weights that are evaluated and written

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("batch", 1),
            ("window", 1),
            ("warmup", 0),
            ("evaluate_every", 1),
            ("evaluate_tokens", 0),
            ("save_every", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63
            self._check(ok, name, f"an integer of at least {least}")
        for name, below in (
            ("beta1", 1.0),
            ("beta2", 1.0),
            ("dropout", 1.0),
            ("ema", 1.0),
            ("carry", 1.0),
        ):
            value = getattr(self, name)
            self._check(0 <= value < below, name, f"at least 0 and below {below:g}")
        for name in ("learning_rate", "final_learning_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            self._check(
                math.isfinite(value) and value >= 0,
                name,
                "a finite number of at least 0",
            )
        for name, allowed in (
            ("schedule", get_args(Schedule)),
            ("precision", get_args(Precision)),
            ("optimizer", get_args(OptimizerName)),
            ("dtype", get_args(DtypeName)),
        ):
            self._check(getattr(self, name) in allowed, name, ", ".join(allowed))

    def _check(self, ok: bool, name: str, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}", param=name)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 1."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return self.final_learning_rate + cosine * (self.learning_rate - self.final_learning_rate)

    def ema_decay_at(self, step: int) -> float:
        """Return the decay of the average at update `step`.

        It is lower at first, so that the random initial weights are soon forgotten (the ramp of
        tf.train.ExponentialMovingAverage).
        """
        return min(self.ema, (1 + step) / (10 + step))
