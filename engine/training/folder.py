"""Writes the results of a finished run: a checkpoint folder that can be served, and its README.

The weights are read back from the disk before they are measured, so that the losses in the README
are those of the shipped file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.models.language_model import LanguageModel
from engine.models.loader import load_model, save_model
from engine.training.curve import draw
from engine.training.evaluation import Loss, carried_loss, windows_loss
from engine.training.state import FILE_NAME
from engine.training.trainer import Trainer

CURVE_IMAGE = "curve.png"


@dataclass(frozen=True)
class Result:
    """A finished run; the losses are those of the written weights, computed in float32."""

    model: LanguageModel  # as read back
    best_step: int
    windows: Loss
    carried: Loss
    has_picture: bool  # whether the curve was plotted; False if matplotlib is not installed


def write_checkpoint(trainer: Trainer) -> Result:
    """Write config.json, model.safetensors and curve.png of a finished run; measure the weights.

    Removes the run's state file, and an old curve.png if none can be drawn. Raises OSError.
    """
    folder, recipe = trainer.folder, trainer.recipe
    config = dataclasses.replace(trainer.config, dtype=recipe.dtype)
    save_model(folder, trainer.best_model(), config, recipe.dtype)
    model, _ = load_model(folder, trainer.device, "float32")
    test = trainer.data.test
    points, picture = trainer.curve.points(), folder / CURVE_IMAGE
    drawn = draw(points, f"{config.cell}, {trainer.parameters:,} weights", picture)
    if not drawn:
        picture.unlink(missing_ok=True)
    result = Result(
        model=model,
        best_step=trainer.best.step if trainer.best else 0,
        windows=windows_loss(model, test, window=recipe.window, batch=recipe.batch),
        carried=carried_loss(model, test),
        has_picture=drawn,
    )
    (folder / FILE_NAME).unlink(missing_ok=True)
    return result


def write_readme(
    trainer: Trainer,
    result: Result,
    *,
    data_name: str,
    command: str,
    prompt: str,
    sample: str,
) -> None:
    """Write README.md: the model, its losses, curve and recipe, and a sample of its text."""
    config, recipe = trainer.config, trainer.recipe
    train, test = trainer.data.train.numel(), trainer.data.test.numel()
    shape = {
        "cell": (config.cell,),
        "weights": (f"{trainer.parameters:,}",),
        "stored as": (recipe.dtype,),
        "layers": (config.n_layers,),
        "width": (config.d_model,),
        "inner width": (config.inner,),
        "convolution kernel": (config.conv_kernel or "none",),
        "MLP width": (config.mlp_hidden or "none",),
        "vocabulary": (config.vocab_size,),
        "state of one sequence": (f"{config.state_bytes:,} bytes",),
    }
    losses = {
        name: (f"{loss.per_token:.4f}", f"{loss.tokens:,}")
        for name, loss in (
            (f"windows of {recipe.window} targets, each from the initial state", result.windows),
            ("state carried through the whole test text", result.carried),
        )
    }
    picture = f"![Training and test loss]({CURVE_IMAGE})\n\n" if result.has_picture else ""
    text = f"""# {trainer.folder.resolve().name}

A {config.cell} language model of {data_name}, trained by minserve.

## Test loss

Of these {recipe.dtype} weights, computed in float32, over the last tenth of the text, which was
not trained on. The weights are those of step {result.best_step:,}: the best, on this test text,
of the evaluations every {recipe.evaluate_every} steps.

{_table(losses, "", "nats per token", "scored tokens")}

{picture}## Shape

{_table(shape)}

## Recipe

Trained on the first {train:,} tokens, tested on the last {test:,}; {trainer.seconds:.0f} s on one
{trainer.device_name}.

```sh
{command}
```

{_table({name: (value,) for name, value in dataclasses.asdict(recipe).items()})}

## Sample

After {prompt!r}, at temperature 0.8:

```text
{sample.replace("```", "'" * 3)}
```
"""
    (trainer.folder / "README.md").write_text(text, encoding="utf-8")


def _table(rows: Mapping[str, Iterable[object]], *header: str) -> str:
    """Return a Markdown table; each row is its name and its cells."""
    names = header or ("", "")
    lines = [names, ["---"] * len(names), *((name, *cells) for name, cells in rows.items())]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
