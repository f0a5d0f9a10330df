"""linrec's scan in Triton (github.com/safelix/linrec): tiles of time in turn, by Triton's own scan.

The package is installed from its repository, which compiles CUDA code that `import linrec` needs.
Its Triton module does not, so it is loaded by itself: a checkout on PYTHONPATH is enough.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

_MODULE = Path("impl", "triton", "ops.py")


def triton_scan() -> Callable[[Tensor, Tensor], Tensor]:
    """Return `scan(a, b)` for contiguous [batch, channels, time] CUDA tensors of any length.

    Raises ImportError if there is no package linrec, if it has no Triton form, or without Triton.
    """
    package = importlib.util.find_spec("linrec")  # finds it without running it
    if package is None:
        raise ImportError("No module named 'linrec'")
    for folder in package.submodule_search_locations or []:
        spec = importlib.util.spec_from_file_location("linrec_triton", Path(folder, _MODULE))
        if Path(folder, _MODULE).is_file() and spec is not None and spec.loader is not None:
            break
    else:
        raise ImportError(f"linrec has no {_MODULE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: Any = module.linrec_pipe

    def scan(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = kernel(b, a)
        return result

    return scan
