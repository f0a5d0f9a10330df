"""Runs blocks of commands as a reader would: in an empty folder, against a running server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT

ADDRESS = "http://127.0.0.1:8000"
LOAD_TESTS = ("python -m loadtest.http", "minserve bench")  # ADDRESS is their default
FEW = 2000  # bytes of README.md in that folder: the commands that read it are to be quick


def prepare(folder: Path) -> None:
    """Create the files that the commands read, and the programs minserve and python."""
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes()[:FEW])
    (folder / "FILE").write_text("But soft! what light through yonder window breaks?\n" * 8)
    (folder / "tinyshakespeare.txt").write_text((folder / "FILE").read_text() * 200)
    (folder / "docker").mkdir()
    shutil.copytree(ROOT / "docker" / "grafana", folder / "docker" / "grafana")
    programs = folder / ".programs"
    programs.mkdir()
    for name, what in (("minserve", "-m service.cli "), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {what}"$@"\n')
        program.chmod(0o755)


def asking(block: str, url: str) -> str:
    """Return a block whose commands ask the server at `url`, not the one that the pages name."""
    for program in LOAD_TESTS:
        block = block.replace(f"{program} ", f"{program} --url {url} ")
    return block.replace(ADDRESS, url)


def run(block: str, folder: Path, url: str, timeout: float, **variables: str) -> str:
    """Run a block and return its output.

    Raises AssertionError if a command fails or a server answers with an error.
    """
    paths = os.pathsep.join([str(folder / ".programs"), os.environ["PATH"]])
    python = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", asking(block, url)],
        cwd=folder, capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PATH": paths, "PYTHONPATH": python, **variables},
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    assert '"error"' not in done.stdout, f"{block}\n{done.stdout}"
    return done.stdout
