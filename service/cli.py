"""The composition root: `minserve serve | generate | score | train | convert | bench`.

The one module that may reach every room. Each command imports what it needs inside, so that
`--help` is fast and loads no torch. Every expected error ends as one line on stderr and exit
code 2.
"""

from __future__ import annotations

import os
import shlex
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.config import CellName, DtypeName
from engine.errors import ConfigError, EngineError
from engine.training.recipe import Precision, Recipe, Schedule
from service import terminal
from service.terminal_text import TextError, text_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

app = typer.Typer(
    name="minserve",
    help="Serves, trains and converts minGRU and minLSTM language models.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# typer keeps the base class of its command-line errors to itself (older releases: click's).
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

Device = Annotated[str, typer.Option(help='"auto", "cpu", "cuda" or "cuda:N".')]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"minserve {version('minserve')}")
        except PackageNotFoundError:
            print("minserve, not installed")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="The version."),
    ] = False,
) -> None:
    pass


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Text to train on, UTF-8; the last tenth tests.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint, the curve and the state.")],
    cell: Annotated[CellName, typer.Option(help="The recurrence.")] = "mingru",
    layers: int = 3,
    d_model: int = 384,
    expansion: Annotated[float, typer.Option(help="Inner width over d_model.")] = 2.0,
    conv_kernel: Annotated[int, typer.Option(help="0 = no convolution.")] = 4,
    mlp_ratio: Annotated[float, typer.Option(help="MLP width over d_model; 0 = no MLP.")] = 4.0,
    tie_embeddings: Annotated[bool, typer.Option("--tie-embeddings")] = False,
    learned_initial_state: Annotated[bool, typer.Option("--learned-initial-state")] = False,
    steps: int = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = Recipe.batch,
    window: Annotated[int, typer.Option(help="Tokens per window.")] = Recipe.window,
    learning_rate: float = Recipe.learning_rate,
    schedule: Annotated[
        Schedule, typer.Option(help="Of the learning rate, after the warm-up.")
    ] = Recipe.schedule,
    warmup: Annotated[int, typer.Option(help="Steps.")] = Recipe.warmup,
    final_learning_rate: Annotated[
        float, typer.Option(help="Where the cosine ends.")
    ] = Recipe.final_learning_rate,
    beta1: float = Recipe.beta1,
    beta2: float = Recipe.beta2,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = Recipe.weight_decay,
    clip: Annotated[float, typer.Option(help="Gradient norm; 0 = off.")] = Recipe.clip,
    dropout: float = Recipe.dropout,
    ema: Annotated[
        float,
        typer.Option(help="Decay of averaged weights, which are then kept; 0 = off."),
    ] = Recipe.ema,
    evaluate_every: Annotated[int, typer.Option(help="Steps.")] = Recipe.evaluate_every,
    save_every: Annotated[int, typer.Option(help="Steps.")] = Recipe.save_every,
    seed: int = Recipe.seed,
    precision: Annotated[
        Precision, typer.Option(help="Of matrix products on a GPU.")
    ] = Recipe.precision,
    dtype: Annotated[DtypeName, typer.Option(help="Of the written weights.")] = Recipe.dtype,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json; without it, one token is one byte."),
    ] = None,
    end_of_text: Annotated[
        str, typer.Option(help="The tokenizer's end-of-text token, if it has it.")
    ] = "<|endoftext|>",
    sample_prompt: Annotated[str, typer.Option(help="For the README's sample.")] = "\n",
    device: Device = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out's run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out has.")] = False,
) -> None:
    """Trains a model on a text and writes a folder that `minserve serve --model` loads.

    The defaults are the paper's recipe for tinyshakespeare. Ctrl-C saves the run; the same
    command with --resume goes on.
    """
    import torch

    from engine.config import ModelConfig
    from engine.device import resolve_device
    from engine.training import data as training_data
    from engine.training.folder import write_checkpoint, write_readme
    from engine.training.sample import sample_ids
    from engine.training.state import FILE_NAME
    from engine.training.tokenizer import byte_level_tokenizer
    from engine.training.trainer import CURVE_FILE, Trainer

    recipe = Recipe(
        steps=steps,
        batch=batch,
        window=window,
        learning_rate=learning_rate,
        schedule=schedule,
        warmup=warmup,
        final_learning_rate=final_learning_rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        clip=clip,
        dropout=dropout,
        ema=ema,
        evaluate_every=evaluate_every,
        save_every=save_every,
        seed=seed,
        precision=precision,
        dtype=dtype,
    )
    encoder = byte_level_tokenizer() if tokenizer is None else _read_tokenizer(tokenizer)
    config = ModelConfig(
        cell=cell,
        vocab_size=encoder.get_vocab_size(),
        d_model=d_model,
        n_layers=layers,
        expansion=expansion,
        conv_kernel=conv_kernel,
        mlp_ratio=mlp_ratio,
        tie_embeddings=tie_embeddings,
        learned_initial_state=learned_initial_state,
        eos_token_id=encoder.token_to_id(end_of_text),
        dtype=dtype,
    )
    place = resolve_device(device)
    ids = torch.frombuffer(_encode_file(data, encoder), dtype=torch.int32).to(place)
    split = training_data.split(ids, window=window, vocab_size=config.vocab_size)

    if not (resume or overwrite) and any(
        (out / name).exists() for name in ("config.json", CURVE_FILE, FILE_NAME)
    ):
        raise ConfigError(f"{out} already holds a run: give --resume, --overwrite or another --out")
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, recipe, split, out, place, compile_model=compile)
    if resume:
        trainer.resume()
    else:
        (out / FILE_NAME).unlink(missing_ok=True)
        (out / CURVE_FILE).unlink(missing_ok=True)
    encoder.save(str(out / "tokenizer.json"))
    terminal.note(
        f"{cell}, {trainer.parameters:,} weights; {split.train.numel():,} tokens to train on, "
        f"{split.test.numel():,} to test on; {trainer.device_name}"
    )
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
        again = shlex.join(["minserve", *(a for a in sys.argv[1:] if a != "--overwrite")])
        again += "" if resume else " --resume"
        terminal.note(f"stopped at step {trainer.step:,}; the state is saved. To go on: {again}")
        raise typer.Exit(130)
    result = write_checkpoint(trainer)
    prompt = torch.tensor(encoder.encode(sample_prompt, add_special_tokens=False).ids)
    drawn = sample_ids(result.model, prompt.to(place), 500, temperature=0.8, seed=seed)
    write_readme(
        trainer,
        result,
        data_name=data.name,
        command=_command_without_folders(),
        prompt=sample_prompt,
        sample=encoder.decode(drawn.tolist()),
    )
    print(
        f"{out}: best at step {result.best_step:,}; test loss {result.windows.per_token:.4f} nats "
        f"per token in windows, {result.carried.per_token:.4f} with the state carried"
    )


def _command_without_folders() -> str:
    """This command as others may repeat it: absolute paths, true on this machine only, shrink to
    their names."""
    words = sys.argv[1:]
    return shlex.join(["minserve", *(Path(w).name if w.startswith("/") else w for w in words)])


def _read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json. Raises ConfigError, OSError."""
    from tokenizers import Tokenizer

    text = path.read_text(encoding="utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer.json: {error}") from error


def _encode_file(path: Path, tokenizer: Tokenizer) -> array[int]:
    """The token ids of a whole text. Raises OSError, TextError, ConfigError where it is empty."""
    ids = array("i")
    for piece in text_pieces(path):
        ids.extend(tokenizer.encode(piece, add_special_tokens=False).ids)
    if not ids:
        raise ConfigError(f"{path}: the text is empty", param="data")
    return ids


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    try:
        code = app(args=arguments, prog_name="minserve", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of our output is gone, `| head` for one; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _UsageError as usage:
        terminal.error(usage.format_message())  # type: ignore[attr-defined]
    except (EngineError, TextError) as problem:
        terminal.error(str(problem))
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        terminal.error(f"{where}{problem.strerror or problem}")
    else:
        return code if isinstance(code, int) else 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
