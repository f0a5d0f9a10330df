"""The commands of the pages that take minutes, as they stand, one after the other.

    python -m tests.docs.whole TEXT      TEXT: tinyshakespeare.txt, or another text

Exit code 1 if one fails. .ci/full runs it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.commands import commands
from tests.docs.running import prepare, run
from tests.e2e.conftest import Server

SECONDS = 900.0  # for one command


def main(argv: list[str]) -> int:
    """The exit code."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        shutil.copy(argv[0], folder / "tinyshakespeare.txt")
        server = Server("--device", "cpu")
        try:
            for command in commands():
                if command.rule.how != "whole":
                    continue
                if (folder / "run.json").exists():  # two runs to compare
                    for other in ("before.json", "after.json"):
                        shutil.copy(folder / "run.json", folder / other)
                begun = time.monotonic()
                try:
                    run(command.text, folder, server.url, SECONDS)
                    verdict = "pass"
                except AssertionError as error:
                    failed += 1
                    verdict = f"FAIL\n{error}"
                seconds = time.monotonic() - begun
                print(f"{command.page}:{command.line} {seconds:.0f} s {verdict}", flush=True)
        finally:
            server.process.terminate()
            server.process.wait(60)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
