"""Distributions of prompt and answer lengths: fixed, uniform or log-normal."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Lengths from `least` to `most`: uniform, or log-normal around `median` if it is given."""

    least: int
    most: int
    median: float | None = None
    sigma: float = 0.0  # of the logarithm

    def draw(self, choice: random.Random) -> int:
        """Draw a length, at least 1."""
        if self.median is None:
            return choice.randint(self.least, self.most)
        drawn = round(choice.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.least), self.most)


def parse_lengths(text: str) -> Lengths:
    """Parse `64`, `fixed:64`, `uniform:16:512` or `lognormal:MEDIAN:SIGMA:MOST`.

    Raises ValueError.
    """
    kind, *values = text.split(":")
    try:
        if kind.isdigit() and not values:
            return _checked(Lengths(int(kind), int(kind)))
        match kind, values:
            case "fixed", [length]:
                return _checked(Lengths(int(length), int(length)))
            case "uniform", [least, most]:
                return _checked(Lengths(int(least), int(most)))
            case "lognormal", [median, sigma, most]:
                return _checked(Lengths(1, int(most), float(median), float(sigma)))
    except ValueError as error:
        raise ValueError(f"lengths {text!r}: {error}") from None
    raise ValueError(
        f"lengths {text!r}: allowed: 64, fixed:64, uniform:16:512, lognormal:MEDIAN:SIGMA:MOST"
    )


def _checked(lengths: Lengths) -> Lengths:
    if not 1 <= lengths.least <= lengths.most:
        raise ValueError(
            f"from {lengths.least} to {lengths.most}; allowed: at least 1, in ascending order"
        )
    if lengths.median is not None and not (lengths.median > 0 and lengths.sigma >= 0):
        raise ValueError("allowed: a median above 0 and a sigma of at least 0")
    return lengths
