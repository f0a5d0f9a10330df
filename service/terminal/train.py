"""`minserve train` after its options are read: runs the training and writes the checkpoint folder.

It imports torch, so it is not imported for `--help`.
"""

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

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 500, 0.8  # of the sample in the folder's README


def check_folder(out: Path) -> None:
    """Raise ConfigError if the folder already holds a run."""
    if any((out / name).exists() for name in ("config.json", CURVE_FILE, FILE_NAME)):
        raise ConfigError(f"{out} already holds a run: give --resume, --overwrite or another --out")


def begin(trainer: Trainer, out: Path, tokenizer: Tokenizer, *, resume: bool) -> None:
    """Create the folder of a new run, or resume the run in it.

    Raises OSError, and ConfigError if there is no run to resume.
    """
    if resume:
        trainer.resume()
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / FILE_NAME).unlink(missing_ok=True)
        (out / CURVE_FILE).unlink(missing_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))


def follow(trainer: Trainer, steps: int) -> None:
    """Train to the end and show the progress.

    Raises Exit with code 130 after Ctrl-C; the run's state has then been saved.
    """
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
        terminal.note(f"stopped at step {trainer.step:,}; the state is saved. To resume: {again}")
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
    """Write the checkpoint and its README with a sample; return a line with the losses.

    `prompt_ids`: the sample's prompt, int64 [tokens] on the model's device.
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
