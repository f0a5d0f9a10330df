"""The curve of a run: one JSON line per evaluation, appended during the run, and its plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Point:
    """The measurements at one evaluation; losses are in nats per token."""

    step: int
    tokens: int  # trained on so far
    train_loss: float  # mean since the previous point, with dropout
    valid_loss: float  # loss of the weights as they would be written, see trainer.py
    learning_rate: float
    tokens_per_second: float  # since the previous point, including this evaluation
    seconds: float  # training time so far


class Curve:
    """A JSON Lines file of points."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, point: Point) -> None:
        """Append a point to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(point)) + "\n")

    def points(self) -> list[Point]:
        """Return all points so far; none if the file does not exist."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [_point(line) for line in lines]

    def keep_until(self, step: int) -> None:
        """Remove points after `step`, which an interrupted run wrote after its last saved state.

        An incomplete last line is removed too.
        """
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                point = _point(line)
            except (ValueError, TypeError):
                continue
            if point.step <= step:
                kept.append(line + "\n")
        self.path.write_text("".join(kept), encoding="utf-8")


def _point(line: str) -> Point:
    values = json.loads(line)
    if "test_loss" in values:  # its name in earlier versions
        values["valid_loss"] = values.pop("test_loss")
    return Point(**values)


def draw(points: Sequence[Point], title: str, path: Path) -> bool:
    """Write the curves as a PNG of about 50 kB, with the best validation loss marked.

    Returns False, and writes nothing, if matplotlib (the extra `train`) is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = min(points, key=lambda point: point.valid_loss)
    steps = [point.step for point in points]
    figure, axes = pyplot.subplots(figsize=(7.0, 4.0))
    axes.plot(
        steps,
        [point.train_loss for point in points],
        label="train (with dropout)",
        lw=1,
    )
    axes.plot(steps, [point.valid_loss for point in points], label="validation", lw=1)
    axes.plot([best.step], [best.valid_loss], "o", ms=5, color="black")
    axes.annotate(
        f"best: {best.valid_loss:.4f} at step {best.step}",
        (best.step, best.valid_loss),
        xytext=(0.5, 0.3),  # the middle of the upper half is usually free of curves
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "-", "lw": 0.5},
    )
    axes.set_ylim(min(point.train_loss for point in points) - 0.1, best.valid_loss + 1.0)
    axes.set(xlabel="step", ylabel="nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True
