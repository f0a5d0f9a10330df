"""Terminal output of the commands: one-line errors, notes, progress; and handling of Ctrl-C.

Results go to stdout (`write`), messages and progress to stderr. Without a terminal (a log file, CI)
progress is a plain line every few seconds.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SECONDS_BETWEEN_LINES = 10.0


def error(message: str) -> None:
    """Print an error as a single line on stderr, even if the message has line breaks."""
    print(f"minserve: error: {' '.join(message.split())}", file=sys.stderr)


def note(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Write a piece of the result to stdout, and flush it."""
    sys.stdout.write(text)
    sys.stdout.flush()


class Progress(Protocol):
    """A display of progress."""

    def to(self, done: float, note: str | None = None) -> None:
        """Show that `done` of the total is done, with a note beside it."""
        ...


class _Lines:
    """Progress without a terminal: a line with the newest note, at most every few seconds."""

    def __init__(self, label: str, total: float | None) -> None:
        self._label = label
        self._total = total
        self._printed_at = time.monotonic()

    def to(self, done: float, note: str | None = None) -> None:
        now = time.monotonic()
        if note is not None and now - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = now
            part = f" {done / self._total:.0%}" if self._total else ""
            print(f"{self._label}{part}: {note}", file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: float | None, done: int = 0) -> Iterator[Progress]:
    """Show progress up to `total` (None: unknown): a bar on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, completed=done, note="")

        class _Bar:
            def to(self, done: float, note: str | None = None) -> None:
                if note is None:
                    bar.update(task, completed=done)
                else:
                    bar.update(task, completed=done, note=note)

        yield _Bar()


class Interrupt:
    """Tells whether Ctrl-C was pressed within `catch_interrupt`."""

    pressed = False


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Let work end in order after a first Ctrl-C; a second one raises KeyboardInterrupt."""
    interrupt = Interrupt()

    def press(_signal: int, _frame: FrameType | None) -> None:
        interrupt.pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def duration(seconds: float) -> str:
    """Return a time for people: "45 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def command_to_resume() -> str:
    """Return the command that resumes the run of this command, `minserve train ...`."""
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    return shlex.join(["minserve", *words, "--resume"])


def command_for_others() -> str:
    """Return this command for the README of a checkpoint: absolute paths are cut to their names."""
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    return shlex.join(["minserve", *(re.sub("(^@?|=@?)/.*/(?=.)", r"\1", word) for word in words)])


def table(figures: Mapping[str, float | None]) -> str:
    """Return figures as lines of text: each one's name and value, "-" for None."""
    shown = {name.replace("_", " "): _figure(value) for name, value in figures.items()}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
