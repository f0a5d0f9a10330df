"""A model's weights under the names of the package that publishes such models."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from engine.models.language_model import LanguageModel
from engine.models.registry import family_of


def published_state_dict(
    model: LanguageModel, marks: Collection[str] = (), embedding: str = ""
) -> dict[str, Tensor]:
    """Return the weights under published names, as views of them.

    Args:
        model: of a family whose published tensors are rows of ours, without other changes.
        marks: names of tensors whose presence tells which of several published forms is meant.
        embedding: the embedding's name; a tied head is added as `lm_head.weight`.
    """
    config, weights, found = model.config, model.state_dict(), {}
    stored = {name: () for name in marks}
    for name, parts in family_of(config).published_weights(config, stored).tensors.items():
        rows = weights[name].split([part.shape[0] for part in parts])
        found.update(
            {part.name: row.view(part.shape) for part, row in zip(parts, rows, strict=True)}
        )
    if config.tie_embeddings:
        found["lm_head.weight"] = found[embedding]
    return found
