"""Trainer: the training loop, from random weights to the best ones.

A step draws a batch, runs the model forward and backward through the operators' autograd, and
updates the weights. Nothing waits for the device between two evaluations. An evaluation uses what
would be written: the weights (or their running average), rounded to the recipe's dtype, computed in
float32. The result is the weights of the best evaluation.

On several GPUs (ranks.py) every process reads its rows of the batch and gradients are averaged; the
first process evaluates, writes and reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from engine.errors import ConfigError, DeviceError, EngineError
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.training.curve import Curve, Point
from engine.training.data import Data, Windows
from engine.training.evaluation import sample, streams_loss, windows_loss
from engine.training.optimizers import optimizers_of
from engine.training.ranks import STOP_EVERY, Ranks
from engine.training.recipe import Recipe
from engine.training.state import Best, RunState

CURVE_FILE = "curve.jsonl"

State = dict[str, Tensor]


class _Loss(nn.Module):
    """A model and its loss as one module, to be compiled and run on several GPUs."""

    def __init__(self, model: LM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Tensor, targets: Tensor, before: State | None, fresh: Tensor | None
    ) -> tuple[Tensor, State]:
        """Return the mean loss of a batch in nats, and the states behind it (none without any)."""
        after: State = {}
        if before is None:
            logits = self.model(inputs)  # [windows, time, vocab]
        else:
            logits, after = self.model.read(inputs, before, fresh)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss, {name: tensor.detach() for name, tensor in after.items()}


class Trainer:
    """One run in one folder. Seeds torch's global generators with the recipe's seed.

    Call `resume` before `run` to continue the folder's unfinished run. Raises ConfigError for a
    quantised model, data that does not fit the model, or a batch that the GPUs cannot share.

    Args:
        config: the model's shape.
        recipe: how to train it.
        data: what to train it on.
        folder: where the run is kept.
        device: of this process.
        compile_model: use torch.compile.
        ranks: this process among those of the run.
    """

    def __init__(
        self,
        config: MinRnnConfig,
        recipe: Recipe,
        data: Data,
        folder: Path,
        device: torch.device,
        *,
        compile_model: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if config.quantization is not None:
            raise ConfigError(
                f"a model quantised as {config.quantization} cannot be trained: train it"
                " unquantised, then quantise the result",
                param="quantization",
            )
        data.check(window=recipe.window, vocab_size=config.vocab_size)
        self.ranks = ranks or Ranks()
        rows = self.ranks.rows(recipe.batch)
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
        if self.ranks.rank:  # dropout differs, the weights do not
            torch.manual_seed(recipe.seed + self.ranks.rank)
        self._loss = self._prepare(compile_model)
        self._evaluated = LM(config).to(device).eval()  # receives the rounded weights
        self._parameters: list[Tensor] = list(self.model.parameters())
        self._average = [p.detach().clone() for p in self._parameters] if recipe.ema else []
        self._optimizers = optimizers_of(self.model, recipe, device)
        self._windows = Windows(
            data.train,
            batch=recipe.batch,
            window=recipe.window,
            seed=recipe.seed,
            carry=recipe.carry,
            rows=rows,
            device=device,
        )
        # the states of this process's rows, or none if every window begins at the initial state
        own = rows.stop - rows.start
        self._states: State | None = self.model.new_state(own).named if recipe.carry else None
        self._valid = data.valid.to(device) if self.ranks.first else None
        self._loss_sum = torch.zeros((), device=device)
        self._loss_steps = 0

    def _prepare(self, compile_model: bool) -> Callable[..., tuple[Tensor, State]]:
        """Return the loss as it is called: compiled if asked for, averaging over the processes."""
        loss: Any = _Loss(self.model)
        if compile_model:
            loss = torch.compile(loss)
        if self.ranks.count > 1:
            on_gpu = self.device.type == "cuda"
            loss = DistributedDataParallel(loss, device_ids=[self.device] if on_gpu else None)
        called: Callable[..., tuple[Tensor, State]] = loss
        return called

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
            if self._must_stop(should_stop):
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
                train_loss, valid_loss = self._evaluate()
                self.seconds = time.monotonic() - begun
                tokens = recipe.batch * recipe.window
                spent = max(self.seconds - last_seconds, 1e-9)
                point = Point(
                    step=self.step,
                    tokens=self.step * tokens,
                    train_loss=train_loss,
                    valid_loss=valid_loss,
                    learning_rate=recipe.learning_rate_at(self.step),
                    tokens_per_second=(self.step - last_step) * tokens / spent,
                    seconds=self.seconds,
                )
                last_seconds, last_step = self.seconds, self.step
                if self.ranks.first:
                    self.curve.append(point)
                on_point(point)
            if self.step % recipe.save_every == 0 and self.step < recipe.steps:
                self.save()
        return True

    def _must_stop(self, should_stop: Callable[[], bool]) -> bool:
        if self.ranks.count == 1:
            return should_stop()
        # all processes must stop at the same step
        return self.step % STOP_EVERY == 0 and self.ranks.any(should_stop(), self.device)

    def _update(self) -> None:
        self.step += 1
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.learning_rate_at(self.step)
        batch = self._windows.draw()
        mixed = self.device.type == "cuda" and self.recipe.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            fresh = None if self._states is None else batch.fresh
            loss, after = self._loss(batch.inputs, batch.targets, self._states, fresh)
        if self._states is not None:
            self._states = after
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._average:
            decay = self.recipe.ema_decay_at(self.step)
            with torch.no_grad():
                torch._foreach_lerp_(self._average, self._parameters, 1.0 - decay)
        self._loss_sum += loss.detach()
        self._loss_steps += 1

    def _evaluate(self) -> tuple[float, float]:
        """Return the losses: training's since the last evaluation, and validation's.

        Remembers the best weights.
        """
        train_loss = self.ranks.mean(self._loss_sum) / self._loss_steps
        self._loss_sum.zero_()
        self._loss_steps = 0
        if not math.isfinite(train_loss):
            raise EngineError(
                f"the training loss is {train_loss} at step {self.step}; a lower learning rate, "
                "a warm-up or gradient clipping may help"
            )
        valid_loss = math.nan
        if self._valid is not None:
            valid_loss = self._validate(self._valid)
        valid_loss = self.ranks.of_first(valid_loss)
        return train_loss, valid_loss

    def _validate(self, ids: Tensor) -> float:
        """Return the loss of the weights as they would be written; remember them if best."""
        recipe, dtype = self.recipe, getattr(torch, self.recipe.dtype)
        sources = self._average or self._parameters
        with torch.no_grad():
            for target, source in zip(self._evaluated.parameters(), sources, strict=True):
                target.copy_(source.to(dtype))
        how = {"window": recipe.window, "batch": recipe.batch}
        if recipe.carry:
            loss = streams_loss(self._evaluated, ids, **how, tokens=recipe.evaluate_tokens)
        else:
            ids = sample(ids, recipe.evaluate_tokens, recipe.batch, recipe.window)
            loss = windows_loss(self._evaluated, ids, **how)
        found = loss.per_token
        if self.best is None or found < self.best.loss:
            weights = {
                name: weight.detach().to(dtype)
                for name, weight in self._evaluated.named_parameters()
            }
            self.best = Best(step=self.step, loss=found, weights=weights)
        return found

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
        states = self._states or {}
        processes = self.ranks.gather(
            {
                "cpu_generator": torch.get_rng_state(),
                "cuda_generator": torch.cuda.get_rng_state(self.device) if cuda else None,
                "states": {name: tensor.cpu() for name, tensor in states.items()},
                "loss_sum": float(self._loss_sum),
            }
        )
        if not self.ranks.first:
            return
        RunState(
            config=asdict(self.config),
            recipe=asdict(self.recipe),
            data=self.data.fingerprint,
            step=self.step,
            seconds=self.seconds,
            loss_steps=self._loss_steps,
            model=self.model.state_dict(),
            average=self._average,
            optimizers=[optimizer.state_dict() for optimizer in self._optimizers],
            windows_generator=self._windows.generator.get_state(),
            windows_positions=self._windows.positions,
            processes=processes,
            best=None if self.best is None else vars(self.best),
        ).save(self.folder)

    def resume(self) -> None:
        """Restore the folder's saved state.

        Raises CheckpointError if there is none, ConfigError if it is of another run, or of one on
        another number of GPUs.
        """
        state = RunState.load(self.folder)
        state.check_same_run(self.config, self.recipe, self.data.fingerprint, self.ranks.count)
        self.step = state.step
        self.seconds = state.seconds
        self._loss_steps = state.loss_steps
        self.model.load_state_dict(state.model)
        with torch.no_grad():
            for mine, saved in zip(self._average, state.average, strict=True):
                mine.copy_(saved)
        for optimizer, values in zip(self._optimizers, state.optimizers, strict=True):
            optimizer.load_state_dict(values)
        self._windows.generator.set_state(state.windows_generator)
        self._windows.positions = state.windows_positions
        own: Mapping[str, Any] = state.processes[self.ranks.rank]
        self._loss_sum.fill_(own["loss_sum"])
        if self._states is not None:
            self._states = {name: tensor.to(self.device) for name, tensor in own["states"].items()}
        torch.set_rng_state(own["cpu_generator"])
        if own["cuda_generator"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_generator"], self.device)
        if state.best is not None:
            self.best = Best(**state.best)
        if self.ranks.first:
            self.curve.keep_until(self.step)
