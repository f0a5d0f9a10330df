"""Starts: texts that a model's folder offers to begin from, in its file `starts.json`.

A start is a header or an opening that puts the model into a manner, such as a book's title page.
The server tells clients of them in /v1/models and does nothing else with them. A client reads a
start's text into a state once, and continues from there. The playground shows them as buttons.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from service.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STARTS = "starts.json"
MOST_BYTES = 2**16  # of the file
MOST_STARTS = 24

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
Title = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,64}\Z")]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text to begin from.

    name: Unique in the file; a part of the id of the state that clients keep.
    title: What people are shown.
    text: What the model reads.
    """

    name: Name
    title: Title
    text: Text


_DECODER = msgspec.json.Decoder(Annotated[tuple[Start, ...], Meta(max_length=MOST_STARTS)])


def load_starts(folder: Path, tokenizer: Tokenizer | None) -> tuple[Start, ...]:
    """Read the starts of a model's folder.

    A file that cannot be used is logged, and the model then has no starts. Without a tokenizer no
    text can be read, so there are none either.
    """
    path = folder / STARTS
    try:
        if tokenizer is None or not path.exists():
            return ()
        return _checked(path)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used: %s; the model is served without starts", path, error)
        return ()


def _checked(path: Path) -> tuple[Start, ...]:
    """Return the starts in a file. Raises OSError and ValueError, which say what is wrong."""
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    starts: tuple[Start, ...] = _DECODER.decode(content)
    names = [start.name for start in starts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two starts have the name {name!r}")
    return starts
