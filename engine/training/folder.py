"""Writes the results of a finished run: a checkpoint folder that can be served, and its model card.

The weights are read back from the disk before they are measured, so that the losses in the card
(README.md) are those of the shipped file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.models.language_model import LanguageModel
from engine.models.loader import load_model, save_model
from engine.training.curve import draw
from engine.training.data import Part
from engine.training.evaluation import Loss, carried_loss, windows_loss
from engine.training.state import FILE_NAME
from engine.training.trainer import Trainer

CURVE_IMAGE = "curve.png"


@dataclass(frozen=True)
class Measured:
    """The losses of one part."""

    windows: Loss
    carried: Loss


@dataclass(frozen=True)
class Result:
    """A finished run; the losses are those of the written weights, computed in float32."""

    model: LanguageModel  # as read back
    best_step: int
    losses: dict[str, Measured]  # of the parts that were not trained on, by name
    has_picture: bool  # whether the curve was plotted; False if matplotlib is not installed

    @property
    def reported(self) -> Measured:
        """The losses of the test part, or of the validation part if there is no other."""
        return self.losses["test" if "test" in self.losses else "valid"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model card says besides figures.

    Args:
        data: names of the data.
        command: the command that trained the model.
        prompt, sample: a sample of the model's text, and what it continues.
        about: Markdown to put in front: what the model is for, its data, licences, limits.
    """

    data: str
    command: str
    prompt: str
    sample: str
    about: str = ""


def write_checkpoint(trainer: Trainer) -> Result:
    """Write config.json, model.safetensors and curve.png of a finished run; measure the weights.

    Removes the run's state file, and an old curve.png if none can be drawn. Raises OSError.
    """
    folder, recipe = trainer.folder, trainer.recipe
    config = dataclasses.replace(trainer.config, dtype=recipe.dtype)
    save_model(folder, trainer.best_model(), config, recipe.dtype)
    model, _ = load_model(folder, trainer.device, "float32")
    points, picture = trainer.curve.points(), folder / CURVE_IMAGE
    drawn = draw(points, f"{config.cell}, {trainer.parameters:,} weights", picture)
    if not drawn:
        picture.unlink(missing_ok=True)
    losses = {}
    for name, part in trainer.data.parts.items():
        if name != "train":
            ids = part.to(trainer.device)
            losses[name] = Measured(
                windows_loss(model, ids, window=recipe.window, batch=recipe.batch),
                carried_loss(model, ids),
            )
    best_step = trainer.best.step if trainer.best else 0
    (folder / FILE_NAME).unlink(missing_ok=True)
    return Result(model, best_step, losses, drawn)


def write_card(trainer: Trainer, result: Result, card: Card) -> None:
    """Write README.md: the model, its losses, curve and recipe, and a sample of its text."""
    config, recipe = trainer.config, trainer.recipe
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
    parts = {
        name: (f"{len(part):,}", f"{part.bytes:,}", part.what)
        for name, part in trainer.data.parts.items()
    }
    losses = {
        f"{name}, {how}": (
            f"{loss.per_token:.4f}",
            _bits_per_byte(loss, trainer.data.parts[name]),
            f"{loss.tokens:,}",
        )
        for name, found in result.losses.items()
        for how, loss in (
            (f"windows of {recipe.window} targets, each from the initial state", found.windows),
            ("state carried through the whole part", found.carried),
        )
    }
    chosen = (
        f"The weights are those of step {result.best_step:,}: the best on the validation part of "
        f"the evaluations every {recipe.evaluate_every} steps."
    )
    gpus = trainer.ranks.count
    device = f"one {trainer.device_name}" if gpus == 1 else f"{gpus} x {trainer.device_name}"
    picture = f"![Training and validation loss]({CURVE_IMAGE})\n\n" if result.has_picture else ""
    about = f"{card.about.strip()}\n\n" if card.about.strip() else ""
    text = f"""# {trainer.folder.resolve().name}

A {config.cell} language model of {card.data}, trained by minserve.

{about}## Losses

Of these {recipe.dtype} weights, computed in float32, on text that was not trained on. {chosen}
Bits per byte count every token of a part, headers and end-of-text tokens too; `minserve score` can
leave them out.

{_table(losses, "", "nats per token", "bits per byte", "scored tokens")}

{picture}## Shape

{_table(shape)}

## Data

{_table(parts, "part", "tokens", "bytes", "what")}

## Recipe

{trainer.seconds:,.0f} s on {device}.

```sh
{card.command}
```

{_table({name: (value,) for name, value in dataclasses.asdict(recipe).items()})}

## Sample

After {card.prompt!r}, at temperature 0.8:

```text
{card.sample.replace("```", "'" * 3)}
```
"""
    (trainer.folder / "README.md").write_text(text, encoding="utf-8")


def _bits_per_byte(loss: Loss, part: Part) -> str:
    return f"{loss.nats / math.log(2) / part.bytes:.4f}" if part.bytes else "-"


def _table(rows: Mapping[str, Iterable[object]], *header: str) -> str:
    """Return a Markdown table; each row is its name and its cells."""
    names = header or ("", "")
    lines = [names, ["---"] * len(names), *((name, *cells) for name, cells in rows.items())]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
