"""Finds and loads the compiled operators, once.

An installed wheel has the library beside this file; an editable install leaves it in site-packages
while the Python stays in the source tree. Both places are looked at, and what is missing is said
with its mend.
"""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

LIBRARY = "libminserve.so"
MEND = "build it with `pip install -e .` in the repository (or install a minserve wheel)"


class LibraryMissingError(ImportError):
    """The compiled operators are not installed, or were built for another torch."""


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
    """The path of the compiled library; LibraryMissingError if it is nowhere."""
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
    return path


PATH = _load()

#: Splitting a sequence at multiples of this many tokens changes no bit of the result.
SCAN_CHUNK: int = int(torch.ops.minserve.scan_chunk())


def cuda_archs() -> str:
    """The GPU architectures compiled in, for example "90a"; empty for a CPU-only build."""
    return str(torch.ops.minserve.cuda_archs())


def has_cuda_kernels() -> bool:
    """Whether the library was compiled with CUDA."""
    return bool(cuda_archs())


def cpu_isa() -> str:
    """The instruction set in use on this CPU: "generic", "avx2", "avx512", "avx512_bf16"
    or "amx"."""
    return str(torch.ops.minserve.cpu_isa())
