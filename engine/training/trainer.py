"""Trainer: the training loop, from random weights to the best ones.

A step draws a batch on the device, runs the model forward and backward through the operators'
autograd, and updates the weights. Nothing waits for the device between two evaluations. An
evaluation uses what would be written: the weights (or their running average), rounded to the
recipe's dtype, computed in float32. The result is the weights of the best evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import ConfigError, DeviceError, EngineError
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.training.curve import Curve, Point
from engine.training.data import Split, Windows
from engine.training.evaluation import windows_loss
from engine.training.recipe import Recipe
from engine.training.state import Best, RunState

CURVE_FILE = "curve.jsonl"


class Trainer:
    """One run in one folder. Seeds torch's global generators with the recipe's seed.

    `data` must be on `device`. Call `resume` before `run` to continue the folder's unfinished run.
    Raises ConfigError for a quantised model.
    """

    def __init__(
        self,
        config: MinRnnConfig,
        recipe: Recipe,
        data: Split,
        folder: Path,
        device: torch.device,
        *,
        compile_model: bool = False,
    ) -> None:
        if config.quantization is not None:
            raise ConfigError(
                f"a model quantised as {config.quantization} cannot be trained: train it"
                " unquantised, then quantise the result",
                param="quantization",
            )
        torch.manual_seed(recipe.seed)
        self.config = config
        self.recipe = recipe
        self.data = data
        self.folder = folder
        self.device = device
        self.curve = Curve(folder / CURVE_FILE)
        self.step = 0
        self.seconds = 0.0
        self.best: Best | None = None
        self.model = LM(config, dropout=recipe.dropout).to(device)  # float32 master weights
        self.model.train()
        self._forward: Callable[[Tensor], Tensor] = (
            torch.compile(self.model) if compile_model else self.model
        )
        self._evaluated = LM(config).to(device).eval()  # receives the rounded weights
        self._parameters: list[Tensor] = list(self.model.parameters())
        self._average = [p.detach().clone() for p in self._parameters] if recipe.ema else []
        self._optimizer = _adamw(self.model, recipe, device)
        self._windows = Windows(
            data.train, batch=recipe.batch, window=recipe.window, seed=recipe.seed
        )
        self._loss_sum = torch.zeros((), device=device)
        self._loss_steps = 0

    @property
    def parameters(self) -> int:
        """Number of weights in the model."""
        return sum(parameter.numel() for parameter in self._parameters)

    @property
    def device_name(self) -> str:
        """Name of the device, for people."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def run(
        self,
        *,
        on_step: Callable[[int], None] = lambda step: None,
        on_point: Callable[[Point], None] = lambda point: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the recipe's last step and return True, or stop early and return False.

        When stopping early it saves the state. `on_step` is called with each step's number when it
        is queued, `on_point` with each evaluation; `should_stop` is asked before each step. Raises
        EngineError if the loss is no longer finite, DeviceError if the device's memory is too
        small, OSError if the folder cannot be written to.
        """
        recipe = self.recipe
        begun, last_seconds, last_step = (
            time.monotonic() - self.seconds,
            self.seconds,
            self.step,
        )
        while self.step < recipe.steps:
            if should_stop():
                self.save()
                return False
            try:
                self._update()
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"{self.device_name}: out of memory at batch {recipe.batch} x window "
                    f"{recipe.window}; reduce either of them"
                ) from error
            on_step(self.step)
            if self.step % recipe.evaluate_every == 0 or self.step == recipe.steps:
                train_loss, test_loss = self._evaluate()
                self.seconds = time.monotonic() - begun
                tokens = recipe.batch * recipe.window
                spent = max(self.seconds - last_seconds, 1e-9)
                point = Point(
                    step=self.step,
                    tokens=self.step * tokens,
                    train_loss=train_loss,
                    test_loss=test_loss,
                    learning_rate=recipe.learning_rate_at(self.step),
                    tokens_per_second=(self.step - last_step) * tokens / spent,
                    seconds=self.seconds,
                )
                last_seconds, last_step = self.seconds, self.step
                self.curve.append(point)
                on_point(point)
            if self.step % recipe.save_every == 0 and self.step < recipe.steps:
                self.save()
        return True

    def _update(self) -> None:
        self.step += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(self.step)
        inputs, targets = self._windows.draw()
        mixed = self.device.type == "cuda" and self.recipe.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            logits = self._forward(inputs)  # [batch, window, vocab]
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip)
        self._optimizer.step()
        if self._average:
            decay = self.recipe.ema_decay_at(self.step)
            with torch.no_grad():
                torch._foreach_lerp_(self._average, self._parameters, 1.0 - decay)
        self._loss_sum += loss.detach()
        self._loss_steps += 1

    def _evaluate(self) -> tuple[float, float]:
        """Return the train loss since the last evaluation and the test loss; remembers the best."""
        train_loss = float(self._loss_sum) / self._loss_steps
        self._loss_sum.zero_()
        self._loss_steps = 0
        if not math.isfinite(train_loss):
            raise EngineError(
                f"the training loss is {train_loss} at step {self.step}; a lower learning rate, "
                "a warm-up or gradient clipping may help"
            )
        dtype = getattr(torch, self.recipe.dtype)
        sources = self._average or self._parameters
        with torch.no_grad():
            for target, source in zip(self._evaluated.parameters(), sources, strict=True):
                target.copy_(source.to(dtype))
        test = windows_loss(
            self._evaluated,
            self.data.test,
            window=self.recipe.window,
            batch=self.recipe.batch,
        ).per_token
        if self.best is None or test < self.best.loss:
            weights = {
                name: weight.detach().to(dtype)
                for name, weight in self._evaluated.named_parameters()
            }
            self.best = Best(step=self.step, loss=test, weights=weights)
        return train_loss, test

    def best_model(self) -> LM:
        """Return the model of the best evaluation, not training; float32, with rounded weights.

        Raises EngineError before the first evaluation.
        """
        if self.best is None:
            raise EngineError("no evaluation has taken place yet")
        with torch.no_grad():
            for name, weight in self._evaluated.named_parameters():
                weight.copy_(self.best.weights[name])
        return self._evaluated

    def save(self) -> None:
        """Save the state, from which `resume` continues bit for bit (on a CPU). Raises OSError."""
        cuda = self.device.type == "cuda"
        RunState(
            config=asdict(self.config),
            recipe=asdict(self.recipe),
            data=self.data.fingerprint,
            step=self.step,
            seconds=self.seconds,
            loss_sum=self._loss_sum,
            loss_steps=self._loss_steps,
            model=self.model.state_dict(),
            average=self._average,
            optimizer=self._optimizer.state_dict(),
            windows_generator=self._windows.generator.get_state(),
            cpu_generator=torch.get_rng_state(),
            cuda_generator=torch.cuda.get_rng_state(self.device) if cuda else None,
            best=None if self.best is None else vars(self.best),
        ).save(self.folder)

    def resume(self) -> None:
        """Restore the folder's saved state.

        Raises CheckpointError if there is none, ConfigError if it is of another run.
        """
        state = RunState.load(self.folder)
        state.check_same_run(self.config, self.recipe, self.data.fingerprint)
        self.step = state.step
        self.seconds = state.seconds
        self._loss_sum.copy_(state.loss_sum)
        self._loss_steps = state.loss_steps
        self.model.load_state_dict(state.model)
        with torch.no_grad():
            for mine, saved in zip(self._average, state.average, strict=True):
                mine.copy_(saved)
        self._optimizer.load_state_dict(state.optimizer)
        self._windows.generator.set_state(state.windows_generator)
        torch.set_rng_state(state.cpu_generator)
        if state.cuda_generator is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state.cuda_generator, self.device)
        if state.best is not None:
            self.best = Best(**state.best)
        self.curve.keep_until(self.step)


def _adamw(model: LM, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """Make AdamW (arXiv 1711.05101) without weight decay for vectors.

    These are biases, gains, initial states, and parameters that have a vector of each layer.
    """
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and name not in model.vectors_of_layers
        (matrices if is_matrix else vectors).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        fused=True if device.type == "cuda" else None,
    )
