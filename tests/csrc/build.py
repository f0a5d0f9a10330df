"""Compiles the CUDA kernels for the host, against the emulator, with a C++ compiler alone.

``python -m tests.csrc.build [--csrc DIR] OUT [NAME ...]`` leaves one program per name in OUT, built
from another copy of csrc where one is given; each runs the case that its options tell.
"""

import argparse
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"

_FLAGS = [
    "-std=c++17",
    "-DMINSERVE_EMULATOR",
    # As nvcc takes the kernels: casts between pointer types mean what they say, and multiplications
    # and additions fuse only where the code says so.
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-tree-vectorize",
    "-U_FORTIFY_SOURCE",  # it takes a jump to another stack for a mistake
]
# The calls that the sanitizer puts before every access go to emulator/hooks.h.
_WATCHED = ["-O1", "-fsanitize=thread"]


def _cell(header: str, name: str, keep: int, shift: int, types: str) -> list[str]:
    """`keep`: the input that decides how much is kept; `shift` makes it almost all."""
    return [
        f"-D{types}_TYPES",
        f"-DKEEP_INPUT={keep}",
        f"-DKEEP_SHIFT={shift}",
        f'-DCELL_HEADER="{header}"',
        f"-DFORWARD_CELL={name}Cell",
        f"-DBACKWARD_CELL={'No' if name == 'Hgrn' else name}BackwardCell",
    ]


# Programs by name: the source and what it is compiled with.
PROGRAMS: dict[str, tuple[str, list[str]]] = {
    "linear": ("scan_driver.cpp", _cell("cells/linear_scan.h", "Linear", 0, 0, "TWO")),
    "mingru": ("scan_driver.cpp", _cell("cells/mingru.h", "MinGru", 0, -6, "ALL")),
    "minlstm": ("scan_driver.cpp", _cell("cells/minlstm.h", "MinLstm", 1, -6, "TWO")),
    "hgrn": ("scan_driver.cpp", _cell("cells/hgrn.h", "Hgrn", 1, 6, "ALL")),
    "conv": ("conv_driver.cpp", []),
    "selected": ("selected_driver.cpp", []),
    "selective": ("selective_driver.cpp", []),
    "gated_rnn": ("gated_rnn_driver.cpp", []),
    "ssd": ("ssd_driver.cpp", []),
    "sru": ("sru_driver.cpp", []),
    "time_contiguous": ("time_contiguous_driver.cpp", []),
    "sampling": ("sampling_driver.cpp", []),
    "logprobs": ("logprobs_driver.cpp", []),
    "logits_processor": ("logits_processor_driver.cpp", []),
    "fused_norm": ("fused_norm_driver.cpp", []),
    "gated_norm": ("gated_norm_driver.cpp", []),
    "pinned_copy": ("pinned_copy_driver.cpp", []),
    "defects": ("defects.cpp", []),
}

_EMULATOR = ("threads", "schedule")


def compiler() -> str | None:
    """The machine's C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def build(out: Path, names: list[str] | None = None, csrc: Path = CSRC) -> None:
    """Compiles the programs of these names (None: all) into the folder `out`.

    Raises subprocess.CalledProcessError where the compiler refuses; what it says is on stderr.
    """
    names = list(PROGRAMS) if names is None else names
    out.mkdir(parents=True, exist_ok=True)
    command = [str(compiler()), *_FLAGS, f"-I{HERE}", f"-I{csrc}"]

    def compile_one(name: str) -> None:
        if name in _EMULATOR:
            source, flags = f"emulator/{name}.cpp", ["-O2"]
        else:
            source, flags = PROGRAMS[name][0], _WATCHED + PROGRAMS[name][1]
        subprocess.run([*command, *flags, "-c", HERE / source, "-o", out / f"{name}.o"], check=True)

    # As many at once as there are cores.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, [*names, *_EMULATOR]))
    for name in names:
        objects = [out / f"{each}.o" for each in (name, *_EMULATOR)]
        subprocess.run([str(compiler()), *objects, "-o", out / name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--csrc", type=Path, default=CSRC)
    arguments = parser.parse_args()
    build(arguments.out, arguments.names or None, arguments.csrc)


if __name__ == "__main__":
    main()
