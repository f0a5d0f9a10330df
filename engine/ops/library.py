"""Finds and loads the compiled operators, once.

An installed wheel has the library beside this file. An editable install puts it in site-packages
while the Python files stay in the source tree. Both places are searched. If the library is missing
or does not match the Python files, the error says what to do.
"""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.config import SCAN_CHUNK

LIBRARY = "libminserve.so"
MEND = "build it with `pip install -e .` in the repository (or install a minserve wheel)"


class LibraryMissingError(ImportError):
    """The compiled operators are missing, or do not match this torch or the Python files."""


def _candidates() -> Iterator[Path]:
    package = sys.modules.get(__package__ or "")
    folders = list(getattr(package, "__path__", [])) or [str(Path(__file__).parent)]
    for folder in [str(Path(__file__).parent), *folders]:
        yield Path(folder) / LIBRARY
    try:
        files = importlib.metadata.files("minserve") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == LIBRARY:
            yield Path(str(file.locate()))
    for folder in sys.path:
        yield Path(folder) / "engine" / "ops" / LIBRARY


def find_library() -> Path:
    """Return the path of the compiled library. Raises LibraryMissingError."""
    for path in _candidates():
        if path.is_file():
            return path
    raise LibraryMissingError(f"{LIBRARY} was not found: {MEND}")


def _load() -> Path:
    path = find_library()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise LibraryMissingError(
            f"{path} does not load into torch {torch.__version__} ({error}): {MEND}"
        ) from error
    # The scheduler and the cache cut prompts where the scans combine carries. With another
    # multiple, answers would depend on the other requests in the batch.
    chunk = int(torch.ops.minserve.scan_chunk())
    if chunk != SCAN_CHUNK:
        raise LibraryMissingError(
            f"{path} scans in chunks of {chunk} tokens, but the Python files beside it expect "
            f"{SCAN_CHUNK}: they are of different versions; {MEND}"
        )
    return path


PATH = _load()


def cuda_archs() -> str:
    """Return the GPU architectures compiled in, for example "90a"; empty for a CPU-only build."""
    return str(torch.ops.minserve.cuda_archs())


def has_cuda_kernels() -> bool:
    """Return whether the library was compiled with CUDA."""
    return bool(cuda_archs())


def cell_number(cell: str) -> int:
    """Return a cell's number in the plans of packed models; RuntimeError names the known cells."""
    return int(torch.ops.minserve.cell_traits(cell)[0])


def preactivations_of(cell: str) -> int:
    """Return how many pre-activations a channel of a cell has; RuntimeError as `cell_number`."""
    return int(torch.ops.minserve.cell_traits(cell)[1])


def cpu_isa() -> str:
    """Return the instruction set in use: "generic", "avx2", "avx512", "avx512_bf16" or "amx"."""
    return str(torch.ops.minserve.cpu_isa())
