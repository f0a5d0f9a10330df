"""best_of: of all samples that were drawn of each prompt, those that the model finds likeliest."""

from __future__ import annotations

import math

from service.inference.generation import Outcome


def choose(outcomes: list[Outcome], draws: int, keep: int) -> list[Outcome]:
    """The `keep` best of every `draws` outcomes, best first; all of them, in order, where as many
    are kept as were drawn."""
    if draws == keep:
        return outcomes
    chosen: list[Outcome] = []
    for first in range(0, len(outcomes), draws):
        chosen += sorted(outcomes[first : first + draws], key=_merit, reverse=True)[:keep]
    return chosen


def _merit(outcome: Outcome) -> tuple[int, float]:
    """The mean log-probability of the answer's tokens. Empty answers stand behind all others, and
    what failed behind these; of equals the first drawn stands first."""
    if outcome.error is not None:
        return 0, 0.0
    values = [piece.logprobs.logprob for piece in outcome.pieces if piece.logprobs is not None]
    return (2, math.fsum(values) / len(values)) if values else (1, 0.0)
