"""Files that hold a secret: keys, and the URL of a store with its password."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

RISKY_MODE = 0o027  # mode bits: others may read, or the group or others may write


def read_secret(path: Path) -> str:
    """Return the text of a file; log a warning if other users may read or write it.

    Raises ConfigError if it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & RISKY_MODE:
                logger.warning("warning: %s should be readable by its owner only", path)
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8") from error
