"""Changes to a checkpoint's folder, as somebody's hand or a broken disk would make them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
NOBODY = 65534


def edit_weights(folder: Path, edit: Callable[[Weights], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def _truncate(path: Path, left: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * left))


def _link_to_itself(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def _link_to_nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/nowhere")


# What cannot be read, by name: who makes it so of a folder, and what is to be said of it.
UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    f"{name}-{kind}": (_in_place_of(name, make), f"{name}: {says}")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json")
    for kind, make, says in (
        ("is-a-folder", Path.mkdir, "is a folder; allowed: a file"),
        ("is-a-pipe", os.mkfifo, "is no regular file; allowed: a file"),
        (
            "leads-nowhere",
            lambda path: path.symlink_to("/nowhere/x"),
            "is a link to /nowhere/x, which does not exist",
        ),
    )
} | {
    "header-cut-off": (
        lambda folder: _truncate(folder / "model.safetensors", 0.01),
        "model.safetensors: damaged or incomplete",
    ),
    "weights-cut-off": (
        lambda folder: _truncate(folder / "model.safetensors", 0.5),
        "model.safetensors: damaged or incomplete",
    ),
    "nothing-in-it": (
        lambda folder: _truncate(folder / "model.safetensors", 0),
        "model.safetensors: damaged or incomplete",
    ),
    "folder-leads-nowhere": (_link_to_nothing, "is a link to /nowhere, which does not exist"),
    "folder-leads-to-itself": (_link_to_itself, "cannot be read: Too many levels"),
}
FORBIDDEN = ("config.json", "model.safetensors", "model.safetensors.index.json", "")  # "": all


@contextmanager
def forbidden(folder: Path, name: str) -> Iterator[Path]:
    """A copy of a folder of which `name` may not be read, for somebody who is not root, to whom
    nothing is forbidden."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # pytest's own folders are root's alone
        copy = Path(place) / "model"
        shutil.copytree(folder, copy)
        path = copy / name if name else copy
        if not path.exists():
            path.write_text("{}")
        path.chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(NOBODY)
        try:
            yield copy
        finally:
            os.seteuid(before)
            path.chmod(0o755)
