"""The layout of a state folder: where each of a server's engines has its files.

A single engine uses the folder itself; of several, each has a folder in it,
`engine-RANK-of-ENGINES`. So every engine is alone in its folder, except for the one that replaces
it in a reload. When a server starts, each engine moves the files that belong to it now
(`engine.protocol.placement`) from the folders of other setups, unless another server is using them:

- of another number of engines;
- `RANK-of-ENGINES`, the folders of a version that placed a state by its digest's remainder. With
  any number of engines, the same included, most states are another engine's since.

A file moves by a rename, and each file belongs to one engine. So engines may start at once, and
what one that was killed has not moved is moved at the next start.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from engine.cache.storage.file_store import StateFileStore, digest_in, lock_of
from engine.cache.storage.folder_lock import is_used
from engine.errors import ConfigError
from engine.protocol.placement import StatePlacement, home_of_digest

PREFIX_FOLDER = "prefixes"  # folder of cached prefixes, within an engine's folder

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"(engine-)?(\d+)-of-(\d+)")  # without "engine-": placed by remainder


def open_file_store(
    folder: Path, model: str, variant: str, home: StatePlacement, sync: bool = False
) -> StateFileStore:
    """Open the engine's part of a state folder, after moving all its files there.

    These are the model's named states and the cached states of this variant. `sync` as for
    StateFileStore. Raises ConfigError if the folder cannot be used.
    """
    mine = folder if home.engines == 1 else folder / f"engine-{home.rank}-of-{home.engines}"
    file_store = StateFileStore(mine, model, sync)
    try:
        others = _others(folder, home)
    except OSError as error:
        raise ConfigError(
            f"state_folder {str(folder)!r} cannot be listed: {error.strerror or error}",
            param="state_folder",
        ) from error
    moved = 0
    for other in others:
        if is_used(lock_of(other, model)):
            log.warning(
                "%s: left alone, because another server is using it; its states are taken over at "
                "a start or reload after that server has ended",
                other,
            )
            continue
        moved += _move_all(other, mine, model, home)
        cached = other / PREFIX_FOLDER
        if not cached.is_symlink():
            moved += _move_all(cached, mine / PREFIX_FOLDER, variant, home)
    if moved:
        log.info("%s: moved %d files of another setup of engines here", mine, moved)
    return file_store


def _others(folder: Path, home: StatePlacement) -> list[Path]:
    """Return the folders of other setups: another number of engines, or placed by remainder."""
    found = [folder] if home.engines > 1 else []
    for path in sorted(folder.iterdir()):
        match = _FOLDER.fullmatch(path.name)
        if match is None or (match[1] and int(match[3]) == home.engines):
            continue
        if path.is_dir() and not path.is_symlink():
            found.append(path)
    return found


def _move_all(source: Path, target: Path, model: str, home: StatePlacement) -> int:
    try:
        paths = sorted(source.iterdir())
    except OSError:  # usually there is no such folder
        return 0
    moved = 0
    for path in paths:
        digest = digest_in(path.name, model)
        if digest is None or home_of_digest(digest, home.engines) != home.rank:
            continue
        try:
            target.mkdir(mode=0o700, exist_ok=True)
            _move(path, target / path.name)
        except OSError as error:
            log.warning("%s: cannot be moved: %s", path, error)
        else:
            moved += 1
    return moved


def _move(source: Path, target: Path) -> None:
    """Move a file; of two files with one name, the one used last stays.

    The state may have changed here while another server had the other file. Raises OSError.
    """
    try:
        there = target.lstat()
    except FileNotFoundError:
        source.rename(target)
        return
    if source.lstat().st_mtime > there.st_mtime:
        source.rename(target)
    else:
        source.unlink()
