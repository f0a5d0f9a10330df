"""`minserve train` after its options are read: runs the training and writes the checkpoint folder.

It imports torch, so it is not imported for `--help`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import CheckpointError, ConfigError
from engine.training.curve import Point
from engine.training.data import Data, Part, split
from engine.training.folder import CURVE_IMAGE, Card, write_card, write_checkpoint
from engine.training.ranks import Ranks
from engine.training.sample import sample_ids
from engine.training.state import FILE_NAME
from engine.training.trainer import CURVE_FILE, Trainer
from service.terminal import console as terminal
from service.text.tokenizer import Tokenizer as TextTokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 500, 0.8  # of the sample in the model card
TOKENS_FOLDER = "tokens"  # of a run without --tokens, in its folder


def check_folder(out: Path) -> None:
    """Raise ConfigError if the folder already holds a run."""
    if any((out / name).exists() for name in ("config.json", CURVE_FILE, FILE_NAME)):
        raise ConfigError(f"{out} already holds a run: give --resume, --overwrite or another --out")


def check_can_resume(out: Path) -> None:
    """Raise CheckpointError if the folder holds no unfinished run."""
    if not (out / FILE_NAME).exists():
        raise CheckpointError(f"{out}: there is no unfinished run to resume")


def discard(cache: Path, out: Path) -> None:
    """Remove a run's own token cache, and the run's folder if nothing else is in it."""
    shutil.rmtree(cache, ignore_errors=True)
    with suppress(OSError):  # it holds something else, or could not be made
        out.rmdir()


def check_gpus(gpus: int, device: str, batch: int) -> None:
    """Raise ConfigError if the run cannot be shared by so many GPUs of this machine."""
    import torch

    found = torch.cuda.device_count()
    if gpus < 1 or (device != "cpu" and gpus > found):
        raise ConfigError(f"--gpus is {gpus}; allowed here: 1 to {max(1, found)}")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--gpus {gpus} and --device {device}: give --device cuda, or no --gpus")
    Ranks(0, gpus).rows(batch)


def own_device(device: str) -> str:
    """Return the device of this process, which torchrun may have started as one of several."""
    local = Ranks.local_rank()
    if local is None or device == "cpu":
        return device
    import torch

    return f"cuda:{local}" if torch.cuda.is_available() else device


def data_of(parts: dict[str, Part], window: int, tokenizer: Tokenizer) -> Data:
    """Return the parts of a token cache as data; a train part alone is split."""
    if "valid" not in parts:
        data = split(parts["train"], window=window)
        sizes = np.asarray(TextTokenizer(tokenizer).text_sizes())
        held_out = int(sizes.take(data.valid.ids, mode="clip").sum())
        rest = parts["train"].bytes - held_out
        return Data(replace(data.train, bytes=rest), replace(data.valid, bytes=held_out))
    return Data(parts["train"], parts["valid"], parts.get("test"))


def begin(trainer: Trainer, out: Path, tokenizer: Tokenizer, *, resume: bool) -> None:
    """Create the folder of a new run, or resume the run in it.

    Raises OSError, and ConfigError if there is no run to resume.
    """
    if resume:
        trainer.resume()
    if trainer.ranks.first:
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            (out / FILE_NAME).unlink(missing_ok=True)
            (out / CURVE_FILE).unlink(missing_ok=True)
        tokenizer.save(str(out / "tokenizer.json"))


def follow(trainer: Trainer, steps: int) -> bool:
    """Train to the end, show the progress in the first process, and return True.

    Returns False after Ctrl-C; the run's state has then been saved.
    """
    with terminal.catch_interrupt() as interrupt:
        if not trainer.ranks.first:
            finished = trainer.run(should_stop=lambda: interrupt.pressed)
        else:
            with terminal.progress("training", steps, trainer.step) as progress:
                finished = trainer.run(
                    on_step=progress.to,
                    on_point=_shower(progress, steps),
                    should_stop=lambda: interrupt.pressed,
                )
    if not finished and trainer.ranks.first:
        again = terminal.command_to_resume()
        terminal.note(f"stopped at step {trainer.step:,}; the state is saved. To resume: {again}")
    return finished


def _shower(progress: terminal.Progress, steps: int) -> Callable[[Point], None]:
    """Return what shows an evaluation, with the time that the remaining steps will take."""
    before: list[Point] = []

    def show(point: Point) -> None:
        left = ""
        if before and (done := point.step - before[-1].step) > 0:
            seconds = (point.seconds - before[-1].seconds) / done * (steps - point.step)
            left = f", {terminal.duration(seconds)} left"
        before[:] = [point]
        progress.to(
            point.step,
            f"step {point.step:,}, {point.tokens_per_second:,.0f} tokens/s, "
            f"train {point.train_loss:.4f}, valid {point.valid_loss:.4f}{left}",
        )

    return show


def write_results(
    trainer: Trainer, tokenizer: Tokenizer, card: Card, prompt_ids: torch.Tensor, *, seed: int
) -> str:
    """Write the checkpoint and its model card with a sample; return a line with the losses.

    `card` has no sample yet. `prompt_ids`: its prompt, int64 [tokens] on the model's device.
    """
    result = write_checkpoint(trainer)
    if not result.has_picture:
        terminal.note(
            f"{CURVE_IMAGE} was not written: matplotlib is not installed; "
            "pip install 'minserve[train]'"
        )
    drawn = sample_ids(
        result.model, prompt_ids, SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=seed
    )
    write_card(trainer, result, replace(card, sample=tokenizer.decode(drawn.tolist())))
    name = "test" if "test" in result.losses else "validation"
    return (
        f"best at step {result.best_step:,}; {name} loss "
        f"{result.reported.windows.per_token:.4f} nats per token in windows, "
        f"{result.reported.carried.per_token:.4f} with the state carried"
    )
