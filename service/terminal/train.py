"""`minserve train` once its options are read: a run with its progress, and the folder it leaves.
Imported with torch, after `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from typer import Exit

from engine.errors import ConfigError
from engine.training.folder import CURVE_IMAGE, write_checkpoint, write_readme
from engine.training.sample import sample_ids
from engine.training.state import FILE_NAME
from engine.training.trainer import CURVE_FILE, Trainer
from service.terminal import console as terminal

if TYPE_CHECKING:
    import torch

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 500, 0.8  # of the text in the folder's README


def check_folder(out: Path) -> None:
    """Raises ConfigError where a run is there."""
    if any((out / name).exists() for name in ("config.json", CURVE_FILE, FILE_NAME)):
        raise ConfigError(f"{out} already holds a run: give --resume, --overwrite or another --out")


def begin(trainer: Trainer, out: Path, tokenizer: Tokenizer, *, resume: bool) -> None:
    """Makes the folder of a new run, or goes on with the one that is there. Raises OSError,
    ConfigError where there is none."""
    if resume:
        trainer.resume()
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / FILE_NAME).unlink(missing_ok=True)
        (out / CURVE_FILE).unlink(missing_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))


def follow(trainer: Trainer, steps: int) -> None:
    """Trains to the end and tells how it goes. Raises Exit 130 where Ctrl-C ends it before, with
    the run's state saved."""
    with (
        terminal.progress("training", steps, trainer.step) as progress,
        terminal.catch_interrupt() as interrupt,
    ):
        finished = trainer.run(
            on_step=progress.to,
            on_point=lambda point: progress.to(
                point.step,
                f"step {point.step:,}, {point.tokens_per_second:,.0f} tokens/s, "
                f"train {point.train_loss:.4f}, test {point.test_loss:.4f}",
            ),
            should_stop=lambda: interrupt.pressed,
        )
    if not finished:
        again = terminal.command_to_resume()
        terminal.note(f"stopped at step {trainer.step:,}; the state is saved. To go on: {again}")
        raise Exit(130)


def write_results(
    trainer: Trainer,
    tokenizer: Tokenizer,
    prompt: str,
    prompt_ids: torch.Tensor,
    *,
    data_name: str,
    seed: int,
) -> str:
    """Writes the checkpoint and its README, with what the model says after the prompt (int64
    [tokens] on its device); returns how good it is, in a line."""
    result = write_checkpoint(trainer)
    if not result.has_picture:
        terminal.note(
            f"without {CURVE_IMAGE}: matplotlib is not installed; pip install 'minserve[train]'"
        )
    drawn = sample_ids(
        result.model, prompt_ids, SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=seed
    )
    write_readme(
        trainer,
        result,
        data_name=data_name,
        command=terminal.command_for_others(),
        prompt=prompt,
        sample=tokenizer.decode(drawn.tolist()),
    )
    return (
        f"best at step {result.best_step:,}; test loss {result.windows.per_token:.4f} nats per "
        f"token in windows, {result.carried.per_token:.4f} with the state carried"
    )
