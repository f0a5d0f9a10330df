"""Models whose states have a given size, and little arithmetic: random weights, tokens of bytes."""

from __future__ import annotations

from pathlib import Path

from loadtest.subject import SMALLEST

# name -> layers, heads and states of a channel of a random Mamba-2
SHAPES = {"300kb": (4, 2, 144), "26mb": (24, 16, 256)}
HEAD_DIM, WIDTH = 64, 32
NAMES = (SMALLEST, *SHAPES)


def folder_of(name: str, inside: Path) -> str:
    """Return a model for `--model`: one of SHAPES, made in the folder, or what is named."""
    if name not in SHAPES:
        return name
    import torch

    from engine.models import registry
    from engine.models.loader import save_model
    from engine.models.mamba2.config import Mamba2Config
    from engine.training.tokenizer import byte_level_tokenizer

    layers, heads, states = SHAPES[name]
    config = Mamba2Config(
        vocab_size=257, eos_token_id=256, d_model=WIDTH, n_layers=layers, dtype="float32",
        heads=heads, head_dim=HEAD_DIM, state_size=states,
    )  # fmt: skip
    torch.manual_seed(0)
    model = registry.build(config)
    with torch.no_grad():  # sharper than random logits are, so that texts differ
        (model.embedding if model.head is None else model.head).weight.mul_(3)
    folder = inside / name
    folder.mkdir()
    save_model(folder, model, config, "float32")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)
