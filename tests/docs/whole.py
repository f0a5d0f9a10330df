"""Run the commands of the pages that take minutes, one after the other.

    python -m tests.docs.whole TEXT [BEGINNING]

TEXT is tinyshakespeare.txt, or another text; only commands that begin with BEGINNING run. They run
as they stand, except for the server's address. Exit code 1 if one fails, as the load test does if
requests were not answered: the machine must be quiet. .ci/full runs it.
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
    """Run the commands and return the exit code."""
    text, beginning = argv[0], (argv[1:] or [""])[0]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        shutil.copy(text, folder / "tinyshakespeare.txt")
        server = Server("--device", "cpu", "--threads", "1", model=None)
        try:
            for command in commands():
                if command.rule.how != "whole" or not command.text.startswith(beginning):
                    continue
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
